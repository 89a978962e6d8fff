"""Batches from prepared shards or a given dataset: the training loader of a rank, and one pass over a validation split.

A run's position in its data is (spec, g), where g is the number of consumed samples; `order` maps g to
rows. To resume, open a loader with start_sample=g. A step covers the samples [g, g + global_batch).
Rank r of D takes the contiguous slice r, so any D that divides the batch sees the same samples.
Every batch carries a digest of its rows' names and their segments' content. If the sums over the ranks
(modulo 2**31) are equal, two runs saw the same rows, whatever their layout.

A thread reads ahead. In a folder that is still growing it waits until every segment that the step needs
is sealed. All ranks therefore wait at the same step, and `wait_reason` names what they wait for.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError
from ..words import some_of
from .corruption import BatchFetcher, open_fetcher
from .given import GivenRows, open_samples
from .order import RowRefs
from .rows import SplitReader, too_short

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0  # how long `close` waits for a thread that is stuck in a read
_SAY_EVERY_S = 30.0


@dataclass(frozen=True)
class Batch:
    """Holds one rank's share of one optimizer step.

    A accumulation steps, B sequences of a micro-batch, S+1 tokens. The data set decides whether there
    are a loss mask and document ids, so all ranks agree at every step.
    """

    tokens: np.ndarray  # int64 [A, B, S+1]
    first_sample: int  # of the whole step, over all ranks
    digest: int  # of this rank's rows; the ranks' digests add up modulo 2**31
    loss_mask: np.ndarray | None = None  # bool [A, B, S], of the targets; None: all count
    # int32 [A, B, S+1], −1: padding; a document is a run of equal ids; None: not requested
    document_ids: np.ndarray | None = None
    equal_shapes: bool = False  # whether all ranks' batches have the same shape; a loader's do


@dataclass(frozen=True)
class ValidationBatch:
    """Holds B rows of one rank's pass over a validation split, of S+1 tokens each."""

    tokens: np.ndarray  # int64 [B, S+1]
    valid: np.ndarray  # bool [B]; False: a copy that pads the last batch
    loss_mask: np.ndarray | None = None  # bool [B, S], as in Batch
    document_ids: np.ndarray | None = None  # int32 [B, S+1], as in Batch


class Loader:
    """Iterates endlessly over a rank's batches, one per optimizer step, read ahead by a thread.

    Use it as a context manager, or call `close()`. `next()` raises the reading thread's errors.

    Args:
        data: the folder and how to read it.
        global_batch: samples per step, over all ranks.
        micro_batch: sequences per forward pass of one rank.
        rank: this rank's slice of each step.
        num_ranks: the number of slices.
        start_sample: samples consumed before.
        prefetch: batches to read ahead.
        poll_s: how often to look for new segments in a growing folder.
        continues: a checkpoint's position to continue from. If a growing folder has not yet sealed
            the segments read before, the first batch waits for them.

    Raises:
        DataError: the sizes do not fit, the folder cannot be read this way, or its order differs
            from that of `continues`.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
        start_sample: int = 0,
        prefetch: int = 4,
        poll_s: float = 1.0,
        continues: Mapping[str, Any] | None = None,
    ):
        if global_batch % (num_ranks * micro_batch):
            raise DataError(
                f"{global_batch=} is not a multiple of {num_ranks=} x {micro_batch=} = "
                f"{num_ranks * micro_batch} sequences: each rank must get the same number of whole "
                "micro-batches; change one of the three"
            )
        self._fetch = open_fetcher(data)
        self.samples = open_samples(data, self._fetch)
        """The order of all samples, and positions in it."""
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._local_batch = global_batch // num_ranks
        self._local_start = rank * self._local_batch
        self._poll_s = poll_s
        self.wait_s = 0.0
        """Seconds that `next()` has waited for data."""
        self._waiting_for = ""
        self._head: Batch | BaseException | None = None  # already taken from the queue
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._continues = continues
        self._check_continuation()
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(prefetch)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(start_sample,), name="loader", daemon=True
        )
        self._thread.start()

    @property
    def wait_reason(self) -> str:
        """Returns what the reading thread is waiting for or reading; "" if nothing."""
        return self._waiting_for or self._fetch.doing

    def ready(self) -> bool:
        """Returns whether `next()` would return, or raise, at once."""
        return self._has_head or not self._queue.empty()

    @property
    def _has_head(self) -> bool:
        return self._head is not None or self._error is not None

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for a batch or an error; returns whether `next()` has one.

        Logs a warning every 30 s while it waits.
        """
        began = time.perf_counter()
        try:
            while not self._has_head and (waited := time.perf_counter() - began) < timeout_s:
                try:
                    self._head = self._queue.get(timeout=min(timeout_s - waited, _SAY_EVERY_S))
                except queue.Empty:
                    if timeout_s - waited >= _SAY_EVERY_S:
                        reason = self.wait_reason or "reading"
                        logger.warning("still waiting for data: %s", reason)
        finally:
            self.wait_s += time.perf_counter() - began
        return self._has_head

    def check_position(self, position: Mapping[str, Any]) -> None:
        """Checks that a saved position belongs to this loader's order.

        Raises:
            DataError: it does not; the message lists the differences.
        """
        if differing := self.samples.differences(position):
            raise DataError(
                f"the checkpoint's data or their order differ ({some_of(differing, between='; ')}): continuing "
                "would repeat some samples and omit others. Resume with the same data and settings, "
                "start a new run from its weights, or set data.override_position=true"
            )

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise ValueError(
                "this loader is closed: open a new one with start_sample= where it stopped"
            )
        self.wait_until_ready(math.inf)
        if self._error is None:
            found, self._head = self._head, None
            if isinstance(found, Batch):
                return found
            self._error = found
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Ends the thread and drops its batches; may be called again.

        A thread that is stuck in a read is abandoned.
        """
        self._closed.set()
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("abandoned the loader's thread, which is still %s", self.wait_reason)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_ahead(self, first_sample: int) -> None:
        """Reads step after step in the thread until closed; queues any error."""
        try:
            while (refs := self._order_step(first_sample)) is not None:
                if not self._put(self._read_step(first_sample, refs)):
                    return
                first_sample += self._global_batch
        except BaseException as error:  # noqa: BLE001 (raised again, in the thread that calls next)
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        """Puts an item into the queue once there is room; False if the loader is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def _check_continuation(self) -> str:
        """Checks the checkpoint's position once; until it can, returns what it waits for."""
        if self._continues is None:
            return ""
        if not (reason := self.samples.await_segments(self._continues)):
            self.check_position(self._continues)
            self._continues = None
        return reason

    def _order_step(self, first_sample: int) -> RowRefs | None:
        """Returns this rank's rows once the whole step is available; None if closed.

        Every rank checks the whole step, so all of them wait, or fail, at the same one.
        """
        while not self._closed.is_set():
            reason = self._check_continuation()
            reason = reason or self.samples.prepare(first_sample, self._global_batch)
            self._waiting_for = reason
            if not reason:
                local = first_sample + self._local_start
                return self.samples.order.refs_at(local, self._local_batch)
            self._closed.wait(self._poll_s)
        return None

    def _read_step(self, first_sample: int, refs: RowRefs) -> Batch:
        local_first = first_sample + self._local_start
        rows = self.samples.read(refs)
        shape = (-1, self._micro_batch)
        return Batch(
            tokens=rows.tokens.reshape(*shape, rows.tokens.shape[1]),
            first_sample=first_sample,
            digest=self.samples.digest(local_first, refs),
            loss_mask=_split(rows.loss_mask, self._micro_batch),
            document_ids=_split(rows.document_ids, self._micro_batch),
            equal_shapes=True,
        )


def _split(rows: np.ndarray | None, micro_batch: int) -> np.ndarray | None:
    return None if rows is None else rows.reshape(-1, micro_batch, rows.shape[1])


def validation_batches(
    directory: str | Path,
    *,
    split: str = "validation",
    seq_len: int,
    batch_size: int,
    rank: int,
    num_ranks: int,
    max_rows: int | None = None,
    sequences_per_group: int = 1,
    document_ids: bool = False,
    fetch: BatchFetcher | None = None,
    given: GivenRows | None = None,
) -> Iterator[ValidationBatch]:
    """Iterates once over a split, in batches of `batch_size` rows.

    Over all ranks, every row comes exactly once. All ranks get the same number of batches, padded with
    invalid copies, so that they meet in the same collectives. `max_rows` selects that many rows,
    evenly spaced.

    A model that routes `sequences_per_group` consecutive sequences together gets the same groups for
    any number of ranks and any batch size. Members of a group come from far apart: neighbours in the
    stream may belong to one document, and one would reveal the continuation of another. Row m of
    group j is row j + m·(number of groups) of the pass; rows from its beginning fill the last group.

    `batch_size` is a multiple of `sequences_per_group`. `given` replaces the folder.

    Raises:
        ShardError: the split is shorter than one row.
    """
    assert batch_size % sequences_per_group == 0, "a group would be split between batches"
    reader = given or SplitReader(
        directory, split, seq_len=seq_len, document_ids=document_ids, fetch=fetch
    )
    if not reader.num_rows:
        raise too_short(f"split {split!r} of {directory}", reader.num_tokens, seq_len)
    count = min(max_rows or reader.num_rows, reader.num_rows)
    num_groups = -(-count // sequences_per_group)
    # by group, its members num_groups apart; those from `count` on fill up
    slots = np.arange(num_groups * sequences_per_group, dtype=np.int64)
    slots = slots.reshape(sequences_per_group, num_groups).T.reshape(-1)
    rows = (slots % count) * reader.num_rows // count
    return _padded_batches(
        reader, rows, slots < count, batch_size=batch_size, rank=rank, num_ranks=num_ranks
    )


def _padded_batches(
    reader: SplitReader | GivenRows,
    rows: np.ndarray,
    valid: np.ndarray,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
) -> Iterator[ValidationBatch]:
    for first in range(0, len(rows), num_ranks * batch_size):
        slots = first + rank * batch_size + np.arange(batch_size)
        last = np.minimum(slots, len(rows) - 1)
        found = reader.read(rows[last])
        counted = valid[last] & (slots < len(rows))
        yield ValidationBatch(found.tokens, counted, found.loss_mask, found.document_ids)
