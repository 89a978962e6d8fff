"""Prepared shards to batches: the training loader of one rank, and the fixed pass over a validation
split.

The position of a run in its data is (spec, g), g the number of samples consumed; see `order` for
what comes when. Resuming is opening a loader with start_sample=g. A step covers the samples [g,
g + global_batch); rank r of D takes the contiguous slice r of them, so any D that divides the batch
sees the same samples per step. Every batch carries a digest of its rows' names and of their segments'
content: added up over ranks (modulo 2**31) it proves that two runs saw the same rows, whatever their
layout.

A thread reads ahead. Where the folder is still growing it waits for the segment that a step needs, all
of it, so that all ranks wait at the same step, and `wait_reason` says what for. Chunks are decoded
by the rank itself, or once for all ranks of its node by a data server (serve/).
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError
from ..serve.client import ServedChunks
from ..serve.start import ServerHandle
from .corruption import BatchFetcher, SkipList, open_fetcher
from .order import RowRefs
from .rows import SplitReader, too_short
from .samples import OrderedSamples
from .skipped_samples import NOTHING, SkippedSamples

logger = logging.getLogger(__name__)

OnWait = Callable[[float, str], None]
"""Told that a batch has been waited for so many seconds, and for what."""

_CLOSE_S = 5.0  # a thread that is stuck in a read longer than this is left behind
_SAY_AFTER_S = 10.0  # of waiting for a batch; then after twice as long, and so on
_SAY_EVERY_S = 300.0  # once it has waited longer than that


@dataclass(frozen=True)
class Batch:
    """Holds one rank's share of one optimizer step.

    A accumulation steps, B sequences of a micro-batch, S+1 tokens. Whether there is a loss mask,
    and whether there are document ids, is a property of the data set and not of the rows: it is the
    same on all ranks and at every step, for a step counts its targets together.
    """

    tokens: np.ndarray  # int64 [A, B, S+1]
    first_sample: int  # of the whole step, over all ranks
    digest: int  # of this rank's rows; digests of all ranks add up modulo 2**31
    loss_mask: np.ndarray | None = None  # bool [A, B, S], of the targets; None: every one counts
    # int32 [A, B, S+1], −1: padding; a document is a run of equal ids in a row; None: not asked for
    document_ids: np.ndarray | None = None
    equal_shapes: bool = False  # the batches of all ranks have the same shape; a loader's do


@dataclass(frozen=True)
class ValidationBatch:
    """Holds B rows of one rank's pass over a validation split, of S+1 tokens each."""

    tokens: np.ndarray  # int64 [B, S+1]
    valid: np.ndarray  # bool [B]; False: a copy that only fills up the last batch
    loss_mask: np.ndarray | None = None  # bool [B, S], as a Batch has it
    document_ids: np.ndarray | None = None  # int32 [B, S+1], as a Batch has it


class Loader:
    """Iterates endlessly over a rank's batches, one per optimizer step, read ahead by a thread.

    Use it as a context manager, or call `close()`. An error of the reading thread is raised by
    `next()`.

    Args:
        data: which folder, and how it is read.
        global_batch: samples of a step, over all ranks.
        micro_batch: sequences of a forward pass of one rank.
        rank: which slice of each step.
        num_ranks: how many slices there are.
        start_sample: samples that were consumed before.
        prefetch: batches that are read ahead.
        skip_folder: where damaged rows are written down that were passed over (`corruption`).
        poll_s: how often a growing folder is looked at.
        on_wait: told when a batch is waited for.
        server: the node's data server, which is closed with the loader; None: this rank decodes.
        skipped_samples: samples that no step takes.
        continues: the position, of a checkpoint, that the first batch goes on from. Where a growing
            folder has not sealed again what was read before, the first batch waits for that.

    Raises:
        DataError: sizes that do not fit, a folder that cannot be read so, or another order of data
            than that of `continues`.
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
        skip_folder: Path | None = None,
        poll_s: float = 1.0,
        on_wait: OnWait | None = None,
        server: ServerHandle | None = None,
        skipped_samples: SkippedSamples = NOTHING,
        continues: Mapping[str, Any] | None = None,
    ):
        _check_layout(global_batch, micro_batch, rank, num_ranks, start_sample, prefetch)
        self._skipped = SkipList(skip_folder, rank=rank, most_batches=data.max_skipped_batches)
        self._fetch = open_fetcher(data, self._skipped)
        self._server = server
        self._served: ServedChunks | None = None
        if server is not None:
            self._served = server.connect(data, rank=rank, skipped=self._skipped)
        try:
            self._samples = OrderedSamples(data, self._fetch, self._served)
        except BaseException:
            self._close_server()
            raise
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._local_batch = global_batch // num_ranks
        self._local_start = rank * self._local_batch
        self._poll_s, self._on_wait = poll_s, on_wait
        self._skipped_samples = skipped_samples
        self.wait_s = 0.0
        """Seconds that `next()` has waited for data: what a faster disk or more prefetch saves."""
        self._waiting_for = ""
        self._waiting_since: float | None = None
        self._say_after_s = _SAY_AFTER_S
        self._head: Batch | BaseException | None = None  # what was taken from the queue already
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._continues = continues
        try:
            self._go_on()
        except BaseException:
            self._close_server()
            raise
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(prefetch)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(start_sample,), name="loader", daemon=True
        )
        self._thread.start()

    @property
    def wait_reason(self) -> str:
        """Returns what the reading thread waits for or reads just now; "": nothing."""
        served = "" if self._served is None else self._served.doing
        return self._waiting_for or served or self._fetch.doing

    @property
    def lost_server(self) -> bool:
        """Returns whether this rank decodes by itself because its data server is gone."""
        return self._served is not None and bool(self._served.lost)

    def ready(self) -> bool:
        """Returns whether `next()` would return, or raise, at once."""
        return self._has_head or not self._queue.empty()

    @property
    def _has_head(self) -> bool:
        return self._head is not None or self._error is not None

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Waits for a batch, at most so long, and returns whether `next()` has one.

        While there is none it says so, ever more rarely: in the log, and to `on_wait`.
        """
        if self._has_head:
            return True
        began = time.perf_counter()
        until = began + timeout_s
        try:
            while self._head is None and (remaining := until - time.perf_counter()) > 0:
                try:
                    self._head = self._queue.get(timeout=min(remaining, self._say_in_s()))
                except queue.Empty:
                    self._say_waiting()
        finally:
            self.wait_s += time.perf_counter() - began
        if self._head is None:
            return False
        self._waiting_since = None
        return True

    def _say_in_s(self) -> float:
        """Returns in how many seconds it is to be said that a batch is waited for."""
        if self._waiting_since is None:
            self._waiting_since, self._say_after_s = time.perf_counter(), _SAY_AFTER_S
        return max(0.0, self._waiting_since + self._say_after_s - time.perf_counter())

    def _say_waiting(self) -> None:
        if self._waiting_since is None or self._say_in_s() > 0:
            return
        seconds = time.perf_counter() - self._waiting_since
        self._say_after_s += min(self._say_after_s, _SAY_EVERY_S)
        reason = self.wait_reason or "reading"
        logger.warning("waiting for data since %.0f s: %s", seconds, reason)
        if self._on_wait is not None:
            self._on_wait(seconds, reason)

    def position(self, samples: int) -> dict[str, Any]:
        """Returns what fixes the order of the first `samples` samples, for a checkpoint."""
        return self._samples.position(samples)

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns what of a saved position does not hold for this loader, each as one line."""
        return self._samples.differences(position)

    def check_position(self, position: Mapping[str, Any]) -> None:
        """Checks that a saved position was counted in this loader's order.

        Raises:
            DataError: it was not, and what differs.
        """
        if differing := self.differences(position):
            raise DataError(
                f"the checkpoint counted its samples in another order of data ({'; '.join(differing)}): "
                "continuing would repeat some and leave out others. Resume with the same data and "
                "settings, start a new run from its weights, or accept that with "
                "data.override_position=true"
            )

    def check_enough(self, samples: int) -> None:
        """Checks that the data is enough for so many samples, as far as that is known already.

        Raises:
            DataError: a source would be read more often than its `max_epochs`.
        """
        self._samples.check_enough(samples)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise ValueError(
                "this loader was closed: open a new one with start_sample= where it stopped"
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
        """Ends the thread and closes the files; batches read ahead are dropped.

        May be called again. A thread that is stuck in a read is left behind.
        """
        self._closed.set()
        if self._served is not None:
            self._served.close()
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the loader's thread is still %s, and is left behind", self.wait_reason)
        else:
            self._samples.close()
        self._close_server()

    def _close_server(self) -> None:
        if self._served is not None:
            self._served.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_ahead(self, first_sample: int) -> None:
        """Runs in the thread: reads step after step until closed, or an error, which it queues."""
        step = self._global_batch
        first_sample = self._skipped_samples.next_step(first_sample, step)
        try:
            while (refs := self._order_step(first_sample)) is not None:
                if not self._put(self._read_step(first_sample, refs)):
                    return
                first_sample = self._skipped_samples.next_step(first_sample + step, step)
        except BaseException as error:  # noqa: BLE001 (raised again, in the thread that calls next)
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        """Waits for room in the queue and puts an item there; False once the loader is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def _go_on(self) -> str:
        """Checks, once, that the data goes on as the checkpoint says, or says what that waits for."""
        if self._continues is None:
            return ""
        if not (reason := self._samples.await_segments(self._continues)):
            self.check_position(self._continues)
            self._continues = None
        return reason

    def _order_step(self, first_sample: int) -> RowRefs | None:
        """Returns this rank's rows of a step, once all of the step's are there; None: closed.

        All ranks look at the whole step, so they wait, and fail, at the same one.
        """
        while not self._closed.is_set():
            reason = self._go_on() or self._samples.prepare(first_sample, self._global_batch)
            self._waiting_for = reason
            if not reason:
                local = first_sample + self._local_start
                return self._samples.refs_at(local, self._local_batch)
            self._closed.wait(self._poll_s)
        return None

    def _read_step(self, first_sample: int, refs: RowRefs) -> Batch:
        local_first = first_sample + self._local_start
        if self._served is not None:
            self._served.progress(first_sample)
        refs, rows = self._samples.read(local_first, refs, self._skipped)
        shape = (-1, self._micro_batch)
        return Batch(
            tokens=rows.tokens.reshape(*shape, rows.tokens.shape[1]),
            first_sample=first_sample,
            digest=self._samples.digest(local_first, refs),
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
) -> Iterator[ValidationBatch]:
    """Iterates once over a split, in batches of `batch_size` rows.

    There are as many batches on every rank. Every row comes exactly once over all ranks. The last
    batches are filled up with copies that are not valid, so that all ranks meet in the same
    collectives. `max_rows` takes that many rows, evenly spaced.

    A model that routes `sequences_per_group` consecutive sequences together gets the same groups
    for every number of ranks and batch size, with members from far apart: neighbours in the stream
    are parts of one document, and a member that shows how another goes on would be a look into its
    future. Row m of group j is row j + m·(number of groups) of the pass; a last, incomplete group
    is filled up with rows from the beginning of the pass.

    Raises:
        DataError: sizes that do not fit.
        ShardError: the split is shorter than one row.
    """
    if batch_size < 1 or not 0 <= rank < num_ranks or (max_rows is not None and max_rows < 1):
        raise DataError(
            f"validation needs {batch_size=} >= 1, 0 <= {rank=} < {num_ranks=}, {max_rows=} >= 1 "
            "or None"
        )
    if sequences_per_group < 1 or batch_size % sequences_per_group:
        raise DataError(
            f"validation needs whole groups: {batch_size=} must be a multiple of "
            f"{sequences_per_group=}"
        )
    reader = SplitReader(directory, split, seq_len=seq_len, document_ids=document_ids, fetch=fetch)
    if reader.num_rows < 1:
        reader.close()
        raise too_short(f"split {split!r} of {directory}", reader.num_tokens, seq_len)
    count = min(max_rows or reader.num_rows, reader.num_rows)
    slots = _group_slots(count, sequences_per_group)
    rows = (slots % count) * reader.num_rows // count
    return _padded_batches(
        reader, rows, slots < count, batch_size=batch_size, rank=rank, num_ranks=num_ranks
    )


def _group_slots(count: int, sequences_per_group: int) -> np.ndarray:
    """Returns indices 0 … count − 1 in the order of the groups' members.

    More follow where the last groups are not full.
    """
    num_groups = -(-count // sequences_per_group)
    slots = np.arange(num_groups * sequences_per_group, dtype=np.int64)
    return slots.reshape(sequences_per_group, num_groups).T.reshape(-1)


def _padded_batches(
    reader: SplitReader,
    rows: np.ndarray,
    valid: np.ndarray,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
) -> Iterator[ValidationBatch]:
    with reader:
        for first in range(0, len(rows), num_ranks * batch_size):
            slots = first + rank * batch_size + np.arange(batch_size)
            last = np.minimum(slots, len(rows) - 1)
            found = reader.read(rows[last])
            counted = valid[last] & (slots < len(rows)) & ~found.damaged
            yield ValidationBatch(found.tokens, counted, found.loss_mask, found.document_ids)


def _check_layout(
    global_batch: int, micro_batch: int, rank: int, num_ranks: int, start_sample: int, prefetch: int
) -> None:
    if not (
        0 <= rank < num_ranks
        and micro_batch >= 1
        and global_batch >= 1
        and start_sample >= 0
        and prefetch >= 1
    ):
        raise DataError(
            f"a loader needs 0 <= {rank=} < {num_ranks=}, {global_batch=} and {micro_batch=} of at "
            "least 1, "
            f"{start_sample=} of at least 0 and {prefetch=} of at least 1"
        )
    if global_batch % (num_ranks * micro_batch):
        raise DataError(
            f"{global_batch=} is not a multiple of {num_ranks=} x {micro_batch=} = "
            f"{num_ranks * micro_batch} sequences: "
            "each rank must get the same number of whole micro-batches; change one of the three"
        )
