"""Documents that this process has scanned, kept until it tokenises them.

A unit is read to be scanned, and once it is decided about, to be tokenised; most often by the same
process, a moment later. Then it need not be read, parsed, normalised and hashed once more. Whether
it was kept changes nothing but the time: what is taken back was read from files that have not
changed since, and has the hashes that were decided about. Anything else is read again, and
compared with them.

Kept are units of local files alone. Whether a remote one has changed cannot be told for nothing,
and a function is called twice to notice one that does not give the same each time.
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
"""Of all units together, in one process: two of the usual size."""

# A file that was written just now may be written again without its times changing: the clocks of
# file systems are coarse.
_SETTLED_NS = 2 * 10**9
_LEFT_OUT = Document("", "", 0)

_Stamp = tuple[int, ...]
_Key = tuple[Path, str, int]


@dataclass
class Kept:
    """Collects the documents of a unit while they are read."""

    stamps: tuple[_Stamp, ...] | None  # of its files when that began; None: nothing is kept
    documents: list[Document] = field(default_factory=list)
    num_bytes: int = 0
    records: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, document: Document, *, stays: bool) -> None:
        """Adds the next document; of one that does not stay, only its place."""
        if self.stamps is None:
            return
        self.documents.append(document if stays else _LEFT_OUT)
        if stays:
            self.num_bytes += sys.getsizeof(document.text) + sys.getsizeof(document.prompt)
        if self.num_bytes > MAX_KEPT_BYTES:
            self.stamps, self.documents = None, []


_kept: dict[_Key, Kept] = {}
_lock = Lock()  # a pool may run tasks in threads


def begin_keeping(unit: Unit) -> Kept:
    """Returns what collects the documents of a unit that is about to be read."""
    return Kept(_stamps(unit))


def keep(directory: Path, unit: Unit, kept: Kept, records: np.ndarray) -> None:
    """Keeps the documents of a unit, if its files are what they were; drops the oldest for them."""
    if kept.stamps is None or kept.stamps != _stamps(unit):
        return
    kept.records = records
    with _lock:
        _kept[directory, unit.source, unit.number] = kept
        while sum(one.num_bytes for one in _kept.values()) > MAX_KEPT_BYTES:
            del _kept[next(iter(_kept))]


def take(directory: Path, unit: Unit, records: np.ndarray) -> Sequence[Document] | None:
    """Returns the documents of a unit, and forgets them; None: they are to be read.

    Those that no rule lets stay are empty.

    Args:
        directory: what is being prepared.
        unit: what was read.
        records: what its documents have to be; not necessarily what this process has read.
    """
    with _lock:
        kept = _kept.pop((directory, unit.source, unit.number), None)
    if kept is None or kept.stamps != _stamps(unit) or not np.array_equal(kept.records, records):
        return None
    return kept.documents


def forget(directory: Path) -> None:
    """Forgets what was kept for a folder."""
    with _lock:
        for key in [key for key in _kept if key[0] == directory]:
            del _kept[key]


def _stamps(unit: Unit) -> tuple[_Stamp, ...] | None:
    """Returns what changes with the content of a unit's files; None: that cannot be told."""
    stamps = []
    now = time.time_ns()
    for url in dict.fromkeys(split.url for split in unit.splits):
        try:
            found = os.stat(url)
        except OSError:  # no local file
            return None
        if now - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
            return None
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(stamps)
