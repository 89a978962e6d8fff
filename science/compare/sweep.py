"""A sweep: one recipe under several values of its keys, written as a comparison with an arm for each."""

import itertools
import re
import tomllib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import moebius

from .file import SECTIONS, CompareError, ComparisonFile
from .sizes import value_at


def sweep_file(recipe: str, sweeps: Sequence[str], overrides: Sequence[str]) -> ComparisonFile:
    """Returns the comparison of every combination of values; its arms differ in nothing else.

    The baseline is the arm with the recipe's own values, or the first one where there is none.

    Args:
        recipe: the name of a recipe, a TOML file, or `module:function`.
        sweeps: `section.key=value,value,…` with TOML values; several give all combinations.
        overrides: `section.key=value` of all arms, which none of the sweeps may name.

    Raises:
        CompareError: a sweep is not of this form, or gives a key or a value twice.
        ConfigError: the recipe has no such key.
    """
    values = dict(_read(sweep) for sweep in sweeps)
    if len(values) < len(sweeps):
        raise CompareError(f"--sweep {' --sweep '.join(sweeps)}: give each key once")
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in values:
            raise CompareError(f"{override}: {key} is swept; leave one of the two out")
    own = moebius.recipe(recipe, *overrides).model_dump(mode="json")
    arms = {}
    baseline = ""
    for chosen in itertools.product(*values.values()):
        of_arm = dict(zip(values, chosen, strict=True))
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in of_arm.items()]
        name = "-".join(re.sub(r"[^\w.-]+", "_", word, flags=re.ASCII) for word in words)[:64]
        if name in arms:
            raise CompareError(f"--sweep: {', '.join(words)} is given twice")
        arms[name] = {"recipe": recipe, "label": ", ".join(words)[:60], **_nested(of_arm)}
        if all(value_at(own, key) == value for key, value in of_arm.items()):
            baseline = name
    keys = "-".join(key.rpartition(".")[2] for key in values)
    of_recipe = re.sub(r"[^\w.-]+", "_", PurePath(recipe).stem, flags=re.ASCII)
    return ComparisonFile.model_validate(
        {
            "name": f"{of_recipe}-{keys}"[:64],
            "question": f"What does {' with '.join(values)} do to {recipe}?",
            "baseline": baseline or next(iter(arms)),
            "match": "none",
            "seeds": (0,),
            "arms": arms,
        }
    )


def _read(sweep: str) -> tuple[str, list[Any]]:
    """Returns the key and the values of `section.key=value,value,…`."""
    key, _, text = (part.strip() for part in sweep.partition("="))
    section, _, rest = key.partition(".")
    if section not in SECTIONS or not rest or not text:
        raise CompareError(
            f"--sweep {sweep}: write section.key=value,value,…, such as "
            "optim.learning_rate=1e-4,3e-4,1e-3"
        )
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:  # words without quotation marks
        values = [word.strip() for word in text.split(",")]
    return key, values


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values by dotted keys as sections in sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found
