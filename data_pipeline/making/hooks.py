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
from pathlib import Path
from typing import Protocol

import numpy as np

from ..config import DataConfig


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


def set_up(config: DataConfig, work: Path) -> None:
    """Prepares what the hooks of all processes need; `work` is the folder of unfinished files."""


def hooks(config: DataConfig, work: Path) -> Hooks:
    """Returns the hooks of this process."""
    return Hooks()


def near_duplicate_index(config: DataConfig) -> NearDuplicates | None:
    """Returns what finds near duplicates, empty; None: they stay."""
    return None
