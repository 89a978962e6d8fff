"""Basics of many tests: a valid configuration of a tiny run, and a model's layers."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from small_model import TINY
from torch import nn

from moebius.train.config.run_config import Config

_RUN: dict[str, dict[str, Any]] = {
    "model": TINY.model_dump(mode="json"),
    "data": {"seq_len": 16},
    "prepare": {"tokenizer": "bytes", "vocab_size": 257, "validation_fraction": 0.2},
    "optim": {"learning_rate": 3e-3, "warmup_steps": 3, "decay_steps": 20},
    "train": {"steps": 4, "global_batch": 8, "micro_batch": 2, "eval_rows": 8, "device": "cpu"},
    "checkpoint": {"every": 0},
}


def make_config(data: Path | str | None = None, /, **changes: Any) -> Config:
    """Returns the configuration of a tiny run on bytes, with changes applied in the given order.

        make_config(shards, mesh__ep=2, train__steps=9)
        make_config(shards, model=MODEL, model__feed_forward__router__kind="deepseek")

    Args:
        data: the folder of prepared shards.
        changes: a value by its path, with `__` for each dot. A section is merged when given as a
            dictionary, and replaced when given as a configuration. A new `kind` empties its section.
    """
    values = {name: dict(section) for name, section in _RUN.items()}
    if data is not None:
        values["data"]["directory"] = str(data)
    for path, value in changes.items():
        _change(values, path.split("__"), value)
    return Config.model_validate(values)


def _change(values: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, key = path
    for section in sections:
        values[section] = dict(values.get(section) or {})
        values = values[section]
    if key == "kind" and values.get("kind") != value:
        values.clear()
    before = values.get(key)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif isinstance(value, dict) and isinstance(before, dict):
        same_kind = value.get("kind", before.get("kind")) == before.get("kind")
        value = before | value if same_kind else value
    values[key] = value


def layers(model: nn.Module) -> list[Any]:
    """Returns the layers of the model's group.

    They have the type Any, because torch types every attribute of a module as `Tensor | Module`.
    """
    return list(model.get_submodule("group").children())
