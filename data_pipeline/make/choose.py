"""Decides, unit by unit, which documents are repeats and which are held out.

Only this part of a preparation must see all documents in order, so it sees just their hashes. It runs
in the coordinator. Decisions depend only on earlier units, so a unit can be tokenised as soon as its
turn comes. After an interruption, the scans are replayed and the decisions are the same.

Cost: 16 bytes of memory per document, some 2 M documents/s.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ..prepare_config import PrepareConfig
from .tasks import (
    DUPLICATE,
    FIRST_REASON,
    TRAIN,
    VALIDATION,
    Scanned,
    held_out_below,
)
from .units import Unit


class ExactIndex:
    """Holds a set of 128-bit hashes, 16 bytes each.

    It is a list of sorted runs whose sizes at least halve from one to the next: n insertions cost
    O(n log n), a look-up costs one binary search per run.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """Adds hashes, uint64 [D] each; returns which were known, bool [D].

        Among equal ones, all but the first are known.
        """
        order = np.lexsort((low, high))  # stable: the first stays first
        high, low = high[order], low[order]
        known = np.zeros(len(high), dtype=bool)
        known[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        for run in self._runs:
            known |= _contains(run, high, low)
        _enter(self._runs, high[~known], low[~known])
        result = np.empty_like(known)
        result[order] = known
        return result


def _contains(run: tuple[np.ndarray, np.ndarray], high: np.ndarray, low: np.ndarray) -> np.ndarray:
    run_high, run_low = run
    first = np.searchsorted(run_high, high)
    inside = np.minimum(first, len(run_high) - 1)
    found = (run_high[inside] == high) & (run_low[inside] == low)
    # equal first halves of different hashes: one pair among some 10**10 documents
    unclear = (run_high[inside] == high) & ~found
    for index in np.flatnonzero(unclear).tolist():
        last = int(np.searchsorted(run_high, high[index], side="right"))
        found[index] = bool((run_low[int(first[index]) : last] == low[index]).any())
    return found


def _enter(runs: list[tuple[np.ndarray, np.ndarray]], high: np.ndarray, low: np.ndarray) -> None:
    while runs and len(runs[-1][0]) < 2 * len(high):
        run_high, run_low = runs.pop()
        high, low = np.concatenate([run_high, high]), np.concatenate([run_low, low])
        order = np.argsort(high, kind="stable")  # merges two sorted runs in linear time
        high, low = high[order], low[order]
    if len(high):
        runs.append((high, low))


@dataclass
class SourceCounts:
    """Counts the chosen and the dropped documents of one source."""

    chosen: Counter[str] = field(default_factory=Counter)  # by side
    dropped: Counter[str] = field(default_factory=Counter)  # by reason


class Chooser:
    """Decides the fates of documents, one unit after the other."""

    def __init__(self, config: PrepareConfig):
        self._held_out_below = np.uint64(held_out_below(config))
        self._holds_out = config.validation_fraction > 0.0
        self._exact = ExactIndex()
        self.counts = {source.name: SourceCounts() for source in config.all_sources}

    def choose(self, unit: Unit, scanned: Scanned) -> np.ndarray:
        """Returns the fate of every document of a unit: uint8 [documents]."""
        fates = scanned.records["fate"].copy()
        alive = np.flatnonzero(fates == TRAIN)
        repeats = self._exact.add(scanned.records["high"][alive], scanned.records["low"][alive])
        fates[alive[repeats]] = DUPLICATE
        counts = self.counts[unit.source]
        if unit.role == "validation":
            fates[fates == TRAIN] = VALIDATION
        elif unit.role == "both" and self._holds_out:
            self._hold_out(fates, scanned.records["high"], counts)
        _count(counts, fates, scanned)
        return fates

    def _hold_out(self, fates: np.ndarray, high: np.ndarray, counts: SourceCounts) -> None:
        """Holds out documents with small hashes.

        If a source has held out none when it reaches two documents, the one with the smallest hash of
        that unit is. Small data thus has validation text, and no decision depends on later units.
        """
        alive = np.flatnonzero(fates == TRAIN)
        held_out = alive[high[alive] < self._held_out_below]
        none_yet = not len(held_out) and not counts.chosen["validation"]
        if none_yet and len(alive) and len(alive) + counts.chosen["train"] >= 2:
            held_out = alive[[np.argmin(high[alive])]]
        fates[held_out] = VALIDATION


def _count(counts: SourceCounts, fates: np.ndarray, scanned: Scanned) -> None:
    numbers = np.bincount(fates, minlength=FIRST_REASON + len(scanned.reasons)).tolist()
    counts.chosen["train"] += numbers[TRAIN]
    counts.chosen["validation"] += numbers[VALIDATION]
    names = {DUPLICATE: "duplicate"} | {
        FIRST_REASON + index: reason for index, reason in enumerate(scanned.reasons)
    }
    for fate, reason in names.items():
        if numbers[fate]:
            counts.dropped[reason] += numbers[fate]
