"""A cache of documents between scanning and tokenising, per process.

The process that scans a unit often tokenises it shortly afterwards, and then need not read, parse,
normalise and hash it again. The cache never changes results: an entry is used only if its files have
not changed and its hashes are those decided about.

It holds only units of local files. Checking a remote file for changes costs time, and functions are
called twice to detect different results.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from ..sources.documents import Document
from .units import Unit

MAX_KEPT_BYTES = 2**27
"""The most bytes of cached units in a process: two units of the usual size."""

_SETTLED_NS = 2 * 10**9  # coarse clocks of file systems can hide a second write to a fresh file
_LEFT_OUT = Document("", "", 0)

_Stamp = tuple[int, ...]
_Key = tuple[Path, str, int]


@dataclass
class Kept:
    """Collects the documents of a unit while they are read."""

    stamps: tuple[_Stamp, ...] | None  # of its files at the start; None: caches nothing
    documents: list[Document] = field(default_factory=list)
    num_bytes: int = 0
    records: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, document: Document, *, stays: bool) -> None:
        """Adds the next document, or a placeholder if a rule drops it."""
        if self.stamps is None:
            return
        self.documents.append(document if stays else _LEFT_OUT)
        if stays:
            self.num_bytes += sys.getsizeof(document.text) + sys.getsizeof(document.prompt)
            self.num_bytes += sys.getsizeof(document.tokens)
        if self.num_bytes > MAX_KEPT_BYTES:
            self.stamps, self.documents = None, []


_kept: dict[_Key, Kept] = {}
_lock = Lock()  # a pool may run tasks in threads


def begin_keeping(unit: Unit) -> Kept:
    """Returns a collector for the documents of a unit that is about to be read."""
    return Kept(_stamps(unit))


def keep(directory: Path, unit: Unit, kept: Kept, records: np.ndarray) -> None:
    """Caches a unit's documents if its files have not changed; evicts the oldest units for them."""
    if kept.stamps is None or kept.stamps != _stamps(unit):
        return
    kept.records = records
    with _lock:
        _kept[directory, unit.source, unit.number] = kept
        while sum(one.num_bytes for one in _kept.values()) > MAX_KEPT_BYTES:
            del _kept[next(iter(_kept))]


def take(directory: Path, unit: Unit, records: np.ndarray) -> Sequence[Document] | None:
    """Removes and returns a unit's documents; None if they must be read again.

    Documents that a rule drops are empty.

    Args:
        directory: the folder being prepared.
        unit: the unit.
        records: the records that the documents must match; another process may have scanned them.
    """
    with _lock:
        kept = _kept.pop((directory, unit.source, unit.number), None)
    if kept is None or kept.stamps != _stamps(unit) or not np.array_equal(kept.records, records):
        return None
    return kept.documents


def forget(directory: Path) -> None:
    """Removes a folder's units from the cache."""
    with _lock:
        for key in [key for key in _kept if key[0] == directory]:
            del _kept[key]


def _stamps(unit: Unit) -> tuple[_Stamp, ...] | None:
    """Returns stamps that change with the content of a unit's files; None if there are none."""
    stamps = []
    now = time.time_ns()
    for url in dict.fromkeys(split.url for split in unit.splits):
        try:
            found = os.stat(url)
        except OSError:  # not a local file
            return None
        if now - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
            return None
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(stamps)
