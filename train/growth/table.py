"""The operators of growth by their words, and their composition from left to right.

    split=2                       every expert into two
    experts=×2 asleep             a copy of every expert
    split=2 experts=+8 by=load    one after another
    mixture=8/4                   experts out of a dense model
    prelude=0:4 core=4:8 loops=2  loops out of layers

An operator is a function of a model and its words; it knows no file, layout or rank. What it returns is data: a
configuration and a table of regions (`Take`), which a run keeps in its source.json.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from ...data_pipeline.words import some_of
from ...distributed.checkpoint.grown import BlockReader, GrownReader, takes_to_json
from ...distributed.checkpoint.source import GrownBy
from ...model.config.model_config import ModelConfig
from ...model.config.sections import plain_message
from ...plugins import nearest
from ..config.errors import ConfigError
from ..families.table import shapes_of
from .depth import depth
from .experts import copy_experts
from .growth import Given, Growth, loss_of
from .mixture import mixture
from .split import split

_FLAGS = ("asleep", "exact")


@dataclass(frozen=True)
class Operator:
    """Names the words of an operator, of which it needs the first."""

    words: tuple[str, ...]
    grow: Callable[[ModelConfig, Mapping[str, str], Given], Growth]


OPERATORS = {
    "split": Operator(("split",), split),
    "experts": Operator(("experts", "by", "asleep", "noise"), copy_experts),
    "mixture": Operator(("mixture", "exact", "drop"), mixture),
    "depth": Operator(("core", "prelude", "coda", "loops"), depth),
}


def parse(words: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the operators that words name, each with its words, in their order.

    Raises:
        ConfigError: a word is unknown, or stands without the one that it belongs to.
    """
    owners = {word: name for name, each in OPERATORS.items() for word in each.words}
    found: list[tuple[str, dict[str, str]]] = []
    for given in " ".join(words).split():
        word, equals, value = given.partition("=")
        if word not in owners:
            raise ConfigError(
                f"--grow {given}: there is no such word{nearest(word, owners) or ';'} the words are {', '.join(owners)}"
            )
        if word in _FLAGS and equals:
            raise ConfigError(
                f"--grow {given}: {word} takes no value; write {word}, or leave it out"
            )
        if not found or found[-1][0] != owners[word] or word in found[-1][1]:
            found.append((owners[word], {}))
        found[-1][1][word] = value
    for name, own in found:
        if (first := OPERATORS[name].words[0]) not in own:
            raise ConfigError(f"--grow {_text(own)}: belongs to {first}=…, which is not there")
    return found


def grow(
    model: ModelConfig, words: Sequence[str], reader: BlockReader, given: Given
) -> tuple[ModelConfig, tuple[GrownBy, ...], tuple[str, ...]]:
    """Returns what a model grows into, how, and what the user should know.

    Args:
        model: the model before.
        words: as a user writes them.
        reader: of the weights before; most operators read none.
        given: to the first operator.

    Raises:
        ConfigError: a word is wrong, or an operator does not fit the model.
    """
    first, growths, notes, is_exact = (model, reader), list[GrownBy](), list[str](), True
    for name, own in parse(words):
        try:
            growth = OPERATORS[name].grow(model, own, replace(given, tensor=reader.weight))
        except ValidationError as error:
            said = "; ".join(plain_message(entry) for entry in error.errors())
            raise ConfigError(f"--grow {_text(own)}: {said}") from None
        except ConfigError as error:
            raise ConfigError(f"--grow {_text(own)}: {error}") from None
        model, reader = growth.model, GrownReader(reader, growth.takes)
        shapes = shapes_of(model).items()
        unlike = [each for each, shape in shapes if reader.shape(f"model.{each}") != shape]
        if unlike:
            raise ConfigError(f"--grow {_text(own)}: nothing gives the model's {some_of(unlike)}")
        table = takes_to_json(growth.takes)
        growths.append(GrownBy.of(_text(own), model.model_dump(mode="json"), table))
        notes += [f"grows by {_text(own)}: {growth.promise}", *growth.notes]
        is_exact = is_exact and growth.is_exact
    if not is_exact:
        notes.append(_losses([first, (model, reader)], given))
    return model, tuple(growths), tuple(notes)


def _losses(states: Sequence[tuple[ModelConfig, BlockReader]], given: Given) -> str:
    """Says the loss of a few validation rows before and after a growth that is not exact."""
    try:
        rows = given.rows()
        found = [loss_of(model, reader.weight, rows, given.step) for model, reader in states]
    except ValueError as error:
        return f"the first evaluation says the loss after it ({error})"
    if not math.isfinite(found[1]):
        raise ConfigError(f"--grow: the loss would be {found[1]}, after {found[0]:.4f}")
    count = sum(some.num_rows for some in rows)
    return f"loss of {count} validation rows: {found[0]:.4f} before, {found[1]:.4f} after"


def _text(words: Mapping[str, str]) -> str:
    return " ".join(f"{word}={value}" if value else word for word, value in words.items())
