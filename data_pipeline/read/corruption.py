"""Handles damaged record batches: fail, read them elsewhere, or replace their rows.

    fail      the error names file, batch and bytes, and ends the run
    refetch   reads the batch again, then from the copies in `data.replicas`
    skip      like refetch; if that fails, other rows of the window replace the lost ones

The replacement is a pure function of the order: the first intact row from half a window further on. All
ranks therefore agree without communication, whatever their number. Each rank also records its replaced
rows in `skipped/` of the run folder. A resumed run repeats the replacements, even if the file has been
repaired since.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, ShardError
from ..manifest import is_prepared
from .token_store import TokenBatch, TokenStore

logger = logging.getLogger(__name__)

WhenCorrupt = Literal["fail", "refetch", "skip"]
RowKey = tuple[str, int, int, int]
"""Source, epoch, segment, row."""

_TRIES = 3
_PAUSE_S = 0.2  # doubles with every try: a network file system may recover


@dataclass(frozen=True)
class SkippedBatch:
    """Names a record batch that was skipped, and why."""

    source: str
    segment: int
    batch: int
    error: str


@dataclass(frozen=True)
class SkippedRow:
    """Names a replaced row, its sample, and its replacement from the same segment."""

    source: str
    epoch: int
    segment: int
    row: int
    sample: int  # the global sample number
    replaced_by: int

    @property
    def key(self) -> RowKey:
        """Returns (source, epoch, segment, row)."""
        return self.source, self.epoch, self.segment, self.row


class SkipList:
    """Keeps skipped batches and replaced rows, in memory and in one file per rank.

    Args:
        folder: the folder of the files; None keeps them in memory only.
        rank: whose file to write; all ranks' files are read. None only reads.
        most_batches: how many damaged record batches may be skipped.

    Raises:
        DataError: a file cannot be read.
    """

    def __init__(
        self, folder: Path | None = None, *, rank: int | None = None, most_batches: int = 10
    ):
        self._most_batches = most_batches
        self.rows: dict[RowKey, SkippedRow] = {}
        self.batches: dict[tuple[str, int, int], SkippedBatch] = {}
        self._file = None
        if folder is not None and rank is not None:
            self._file = folder / f"rank-{rank:05d}.jsonl"
        if folder is not None and folder.is_dir():
            for path in sorted(folder.glob("rank-*.jsonl")):
                for entry in _read_entries(path):
                    self._note(entry)

    def add_batch(self, batch: SkippedBatch) -> None:
        """Records a damaged batch.

        Raises:
            DataError: too many batches are damaged.
        """
        key = batch.source, batch.segment, batch.batch
        if key in self.batches:
            return
        if len(self.batches) >= self._most_batches:
            raise DataError(
                f"{len(self.batches) + 1} record batches are damaged, more than data."
                f"max_skipped_batches={self._most_batches}: restore the folder from a copy, or allow "
                f"more. The last: {batch.error}"
            )
        self._note(batch)
        self._append({"batch": asdict(batch)})
        logger.warning("replacing the rows of a damaged record batch: %s", batch.error)

    def add_row(self, row: SkippedRow) -> None:
        """Records that one row was replaced."""
        if row.key not in self.rows:
            self._note(row)
            self._append({"row": asdict(row)})

    def _note(self, entry: SkippedBatch | SkippedRow) -> None:
        if isinstance(entry, SkippedBatch):
            self.batches[entry.source, entry.segment, entry.batch] = entry
        else:
            self.rows.setdefault(entry.key, entry)

    def _append(self, entry: dict[str, Any]) -> None:
        """Appends a line durably, on a new line if an earlier crash tore the last one."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "ab+") as file:
                torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write((b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{self._file} cannot be written ({error.strerror}), so a resumed run could not "
                "repeat which rows were replaced: free some space there"
            ) from error


def _read_entries(path: Path) -> list[SkippedBatch | SkippedRow]:
    found: list[SkippedBatch | SkippedRow] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    for line in filter(None, lines):
        try:
            ((kind, values),) = json.loads(line).items()
            found.append(SkippedBatch(**values) if kind == "batch" else SkippedRow(**values))
        except (ValueError, RecursionError, TypeError, AttributeError):
            logger.warning("ignoring a torn line of %s: %.80r", path, line)
    return found


class BatchFetcher:
    """Reads record batches, and applies a policy to damaged ones.

    Args:
        when_corrupt: the policy.
        replicas: copies of the prepared folder.
        skipped: records skipped batches.
    """

    def __init__(
        self,
        when_corrupt: WhenCorrupt = "fail",
        *,
        replicas: Sequence[Path] = (),
        skipped: SkipList | None = None,
    ):
        self.when_corrupt: WhenCorrupt = when_corrupt
        self._replicas, self._skipped = tuple(replicas), skipped or SkipList()
        self._lost: set[tuple[str, int, int]] = set()
        self.doing = ""
        """What is being read, for wait messages; "" if nothing."""

    def __call__(
        self, store: TokenStore, batch: int, in_full: bool, into: np.ndarray | None = None
    ) -> TokenBatch | None:
        """Reads a record batch: its tokens, or in full with documents' ends and loss mask.

        Args:
            store: the segment.
            batch: the record batch's number.
            in_full: whether to read ends and mask.
            into: the array to decode the tokens into; None allocates one.

        Returns:
            The batch; None if it is lost and the policy is to skip it.

        Raises:
            ShardError: it is lost, and the policy is not to skip it.
            DataError: too many batches are lost.
        """
        self.doing = f"reading record batch {batch} of segment {store.segment} of source {store.source.name!r}"
        try:
            return store.read(batch, into, in_full=in_full)
        except ShardError as error:
            if self.when_corrupt == "fail":
                raise
            return self._read_elsewhere(store, batch, in_full, into, error)
        finally:
            self.doing = ""

    def _read_elsewhere(
        self,
        store: TokenStore,
        batch: int,
        in_full: bool,
        into: np.ndarray | None,
        error: ShardError,
    ) -> TokenBatch | None:
        key = store.source.name, store.segment, batch
        if key not in self._lost:
            found = self._first_that_works(store, batch, in_full, into)
            if found is not None:
                return found
            self._lost.add(key)
        if self.when_corrupt == "refetch":
            raise ShardError(
                f"{error} (read {_TRIES} times and from {len(self._replicas)} replicas)"
            ) from error
        self._skipped.add_batch(SkippedBatch(*key, str(error)))
        return None

    def _first_that_works(
        self, store: TokenStore, batch: int, in_full: bool, into: np.ndarray | None
    ) -> TokenBatch | None:
        """Reads a batch again after pauses, then from the replicas; None if all reads fail."""
        for number, folder in enumerate([*[None] * (_TRIES - 1), *self._replicas]):
            try:
                if folder is None:
                    time.sleep(_PAUSE_S * 2**number)
                    return store.read(batch, into, in_full=in_full)
                of_store = (store.source.name, store.segment, store.split, store.manifest)
                with closing(TokenStore(folder, *of_store, check_sizes=False)) as copy:
                    return copy.read(batch, into, in_full=in_full)
            except ShardError as error:
                logger.warning("%s", error)
        return None


def open_fetcher(data: DataConfig, skipped: SkipList | None = None) -> BatchFetcher:
    """Returns a fetcher with the configuration's policy for damaged batches."""
    for folder in data.replicas:
        if not is_prepared(folder):
            logger.warning(
                "data.replicas: %s holds no prepared data, so it can repair none", folder
            )
    return BatchFetcher(
        data.when_corrupt, replicas=[Path(folder) for folder in data.replicas], skipped=skipped
    )
