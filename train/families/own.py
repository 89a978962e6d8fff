"""moebius' own exports, of any model: config.json holds the model's configuration whole.

Only config.json and safetensors are read. The code for transformers that lies beside them is not, and
no module that config.json names is imported.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ...model.config.model_config import ModelConfig
from ...plugins import is_own
from ..config.validation import validated
from .family import Arrangement, Family, Rule
from .keys import MOST, UnfitError

_NAMES_OF_EXPERTS = {  # a bank's attribute -> key after the expert's number
    "w_up": "w_up.weight",
    "w_down": "w_down.weight",
    "b_up": "w_up.bias",
    "b_down": "w_down.bias",
    "weight": "weight",
}
_BANK = re.compile(rf"(.+\.experts)\.({'|'.join(_NAMES_OF_EXPERTS)})")
_TABLES = ("embedding", "position_embedding")
# Usual names that repeat the model's, for tools that look for them; its class computes with the first.
_REPEATED = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "tie_word_embeddings": "tied_head",
    "sparse_members": "sparse_members",
}


class _ModelAlone(BaseModel):
    """Holds the section `model` of config.json."""

    model: ModelConfig


class OwnFamily(Family):
    """Reads moebius' own exports; `export` writes them without a family."""

    def read(self, config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
        """Returns the model in config.json, which may have been edited.

        Raises:
            UnfitError: it is not valid, contradicts itself, or names code.
        """
        section = config.get("model")
        if not isinstance(section, dict):
            raise UnfitError(f"model={section!r:.100} is not the configuration of a moebius model")
        for path, value in _values(section, "model"):
            if isinstance(value, str) and is_own(value):
                raise UnfitError(
                    f"{path}={value!r:.200} names code, and a folder's is never imported"
                )
            if isinstance(value, int) and value > MOST:
                raise UnfitError(f"{path}={value} must be at most {MOST:,}")
        model = validated(_ModelAlone, {"model": section}, origin="config.json").model
        if isinstance(grown := config.get("vocab_size"), int):
            model = model.changed({"vocab_size": grown})
        for theirs, ours in _REPEATED.items():
            wanted = getattr(model, ours)
            wanted = [*wanted] if isinstance(wanted, tuple) else wanted
            if config.get(theirs, wanted) != wanted:
                raise UnfitError(
                    f"{theirs}={config[theirs]!r:.200} and model.{ours}={wanted} differ"
                )
        return model, []

    def fits(self, model: ModelConfig, config: Mapping[str, Any] | None = None) -> bool:
        """Returns False: own models go out without a family."""
        return False

    def forms(self, name: str) -> list[list[Rule]]:
        """Returns the one rule of a tensor: of a bank one key per expert, turned as nn.Linear's."""
        if bank := _BANK.fullmatch(name):
            axes = (2, 1) if not bank[2].startswith("b_") else (1,)
            key = f"{bank[1]}.{{E}}.{_NAMES_OF_EXPERTS[bank[2]]}"
            return [[Rule(name, key, Arrangement(axes))]]
        return [[Rule(name, f"{name}.weight" if name in _TABLES else name)]]


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every value of nested sections and lists, with its dotted key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, path)
    else:
        yield path, value


OWN = OwnFamily(("moebius",), "MoebiusForCausalLM", parts=(), constants={}, defaults={}, rules=())
