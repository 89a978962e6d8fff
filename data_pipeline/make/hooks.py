"""What may be put between reading and choosing: rules that drop documents, and near duplicates.

Three places, and nothing in any of them unless the configuration asks for it:

* `set_up` runs once per preparation, before anything is read, and may leave files in the folder of
  unfinished work for all processes;
* `hooks` is made once in every process that reads documents: rules that look at one document at a
  time, and the keys by which it resembles others;
* `near_duplicate_index` lives in the coordinator, is asked in document order, and is made again
  from the saved keys when a preparation goes on after an interruption.

All three must be pure functions of the configuration and the texts: the same documents stay on any
number of machines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Protocol

import numpy as np

from ..atomic import atomic_write
from ..errors import PrepareError
from ..prepare_config import FilterConfig, PrepareConfig
from .decontaminate import EvaluationIndex, build_index, load_index
from .filters import reason_to_drop
from .language import LanguageFilter
from .near_duplicates import NearDuplicateIndex, band_keys

_INDEX_FILE = "evaluation_sets.arrow"


class DocumentRule(Protocol):
    """Declares a rule that looks at one document alone."""

    def reason_to_drop(self, text: str) -> str | None:
        """Returns why a document is dropped, in words that many documents share; None: it stays."""
        ...


class NearDuplicates(Protocol):
    """Declares what finds documents that resemble earlier ones."""

    def choose(self, keys_DB: np.ndarray) -> np.ndarray:
        """Decides about documents in their order, given the keys of each; True: it stays."""
        ...


@dataclass(frozen=True)
class Hooks:
    """Holds what every process does with each document that it reads."""

    rules: tuple[DocumentRule, ...] = ()
    # the keys of one document, uint64 [B]; uint64 [0]: it resembles nothing
    near_duplicate_keys: Callable[[str], np.ndarray] | None = None


def set_up(config: PrepareConfig, work: Path) -> None:
    """Prepares what the hooks of all processes need; `work` is the folder of unfinished files.

    Raises:
        InputError: an evaluation set or the language function cannot be had.
        PrepareError: an evaluation set has changed since the preparation began, or a package is
            missing.
    """
    if config.decontaminate is not None:
        with BytesIO() as index:
            build_index(config.decontaminate).save(index)
            _write_index(work / _INDEX_FILE, index.getvalue())
    if config.language is not None:
        LanguageFilter(config.language)  # before anything is read: most mistakes are in the name
    if config.near_duplicates is not None:
        band_keys("words", config.near_duplicates)


def _write_index(path: Path, data: bytes) -> None:
    if not path.exists():
        with atomic_write(path) as file:
            file.write(data)
    elif path.read_bytes() != data:
        raise PrepareError(
            f"{path.parent.parent} holds an unfinished preparation, and its evaluation sets have "
            "changed since: delete the folder and prepare again"
        )


def hooks(config: PrepareConfig, work: Path) -> Hooks:
    """Returns the hooks of this process: rules that cost little come first."""
    rules: list[DocumentRule] = []
    if config.filters.is_on:
        rules.append(_Filters(config.filters))
    if config.language is not None:
        rules.append(LanguageFilter(config.language))
    if config.decontaminate is not None:
        rules.append(_Decontamination(load_index(work / _INDEX_FILE)))
    near = config.near_duplicates
    keys = None if near is None else partial(band_keys, config=near)
    return Hooks(tuple(rules), keys)


@dataclass(frozen=True)
class _Filters:
    """Drops by length, quality and repetition."""

    config: FilterConfig

    def reason_to_drop(self, text: str) -> str | None:
        return reason_to_drop(text, self.config)


@dataclass(frozen=True)
class _Decontamination:
    """Drops what shares words with an evaluation item, whose set the reason names."""

    index: EvaluationIndex

    def reason_to_drop(self, text: str) -> str | None:
        found = self.index.find(text)
        return None if found is None else f"evaluation set: {found.evaluation_set}"


def near_duplicate_index(config: PrepareConfig) -> NearDuplicates | None:
    """Returns what finds near duplicates, empty; None: they stay."""
    return None if config.near_duplicates is None else NearDuplicateIndex()
