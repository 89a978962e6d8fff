"""Prepared shards to batches: the training loader of one rank, and the fixed pass over a validation
split.

The position of a run in its data is (spec_hash, g), g the number of samples consumed; see `order`
for what comes when. Resuming is opening a loader with start_sample=g. A step covers the samples [g,
g + global_batch); rank r of D takes the contiguous slice r of them, so any D that divides the batch
sees the same samples per step. Every batch carries a digest: added up over ranks (modulo 2**31) it
proves that two runs saw the same rows, whatever their layout.

A thread reads ahead. It keeps a window of decoded record batches (50 MB at 128 Ki tokens of
uint16), which the order makes serve many rows each. Every rank decodes every shard, since all share
the order; on one of two busy cores that leaves 25 M tokens/s for one rank at S=256, 31 M for one of
four at S=2048: far more than a model eats.
"""

import hashlib
import json
import queue
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from .errors import DataError, ShardError
from .mixture import Mixture, WeightStage
from .order import ORDER_VERSION, SampleOrder, SourceRows, num_rows
from .packing import WINDOW_BATCHES, concat_plan
from .shards import TokenStream

_DIGEST_MODULUS = 2**31
_ORDER_SAMPLES = 4096  # computed at a time: numpy takes hardly longer for as many than for one


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


@dataclass(frozen=True)
class ValidationBatch:
    """Holds B rows of one rank's pass over a validation split, of S+1 tokens each."""

    tokens: np.ndarray  # int64 [B, S+1]
    valid: np.ndarray  # bool [B]; False: a copy that only fills up the last batch
    loss_mask: np.ndarray | None = None  # bool [B, S], as a Batch has it
    document_ids: np.ndarray | None = None  # int32 [B, S+1], as a Batch has it


class RowReader:
    """Reads rows of a token stream, and keeps the latest decoded record batches.

    Not for several threads at once.
    """

    def __init__(self, store: TokenStream, seq_len: int):
        self._store, self._seq_len = store, seq_len
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()
        self._decoded_bytes = 0
        # A chunk of rows touches up to three record batches, since these hold whole documents.
        token_bytes = 2 if store.manifest.vocab_size <= 2**16 else 4
        self._keep_bytes = 3 * WINDOW_BATCHES * store.manifest.batch_tokens * token_bytes

    @property
    def num_rows(self) -> int:
        """Returns the number of rows that the stream is cut into."""
        return num_rows(self._store.num_tokens, self._seq_len)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads rows: int64 [len(rows), S+1].

        Raises:
            ShardError: a record batch is not as it was written.
        """
        tokens = np.empty((len(rows), self._seq_len + 1), dtype=np.int64)
        for target, row in zip(tokens, rows.tolist(), strict=True):
            self._fill(target, row * self._seq_len)
        return tokens

    def _fill(self, target: np.ndarray, position: int) -> None:
        """Copies the stream from `position` on into `target`, across record batches."""
        starts = self._store.batch_starts
        batch = int(np.searchsorted(starts, position, side="right")) - 1
        filled = 0
        while filled < len(target):
            begin = position + filled - int(starts[batch])
            tokens = self._batch(batch)[begin : begin + len(target) - filled]
            target[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            batch += 1

    def _batch(self, batch: int) -> np.ndarray:
        if batch in self._decoded:
            self._decoded.move_to_end(batch)
            return self._decoded[batch]
        tokens = self._store.read_tokens(batch)
        self._decoded[batch] = tokens
        self._decoded_bytes += tokens.nbytes
        while self._decoded_bytes > self._keep_bytes and len(self._decoded) > 1:
            _, oldest = self._decoded.popitem(last=False)
            self._decoded_bytes -= oldest.nbytes
        return tokens


class Loader:
    """Iterates endlessly over a rank's batches, one per optimizer step, read ahead by a thread.

    Use it as a context manager, or call `close()`. An error of the reading thread is raised by
    `next()`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        split: str = "train",
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        num_ranks: int,
        seed: int,
        start_sample: int = 0,
        prefetch: int = 4,
    ):
        _check_layout(global_batch, micro_batch, rank, num_ranks, start_sample, prefetch)
        self._store = TokenStream(directory, split)
        _check_one_source(self._store)
        self._reader = RowReader(self._store, seq_len)
        if self._reader.num_rows < 1:
            raise _too_short(self._store, split, seq_len)
        self._order = _order(self._store, seq_len, seed)
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._local_batch = global_batch // num_ranks
        self._local_start = rank * self._local_batch
        self._ordered_from, self._ordered = start_sample, np.zeros((2, 0), dtype=np.int64)
        self.spec = _position_spec(self._store, split, seq_len, seed)
        """What fixes the order of samples, for people to read; `spec_hash` is its hash."""
        self.wait_s = 0.0
        """Seconds that `next()` has waited for data: what a faster disk or more prefetch saves."""
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(prefetch)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(start_sample,), name="loader", daemon=True
        )
        self._thread.start()

    @property
    def num_rows(self) -> int:
        """Returns the samples of one epoch."""
        return self._reader.num_rows

    @property
    def spec_hash(self) -> str:
        """Returns the hex sha256 of `spec`.

        With the number of samples consumed it is the whole state of a run in its data.
        """
        return hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()

    def check_position(
        self, saved_spec_hash: str, saved_spec: Mapping[str, object] | None = None
    ) -> None:
        """Checks that a saved position was counted in this loader's order.

        Raises:
            DataError: it was not; with its `spec`, the error says what differs.
        """
        if saved_spec_hash == self.spec_hash:
            return
        if saved_spec is None:
            difference = "this run has " + ", ".join(
                f"{key}={value}" for key, value in self.spec.items()
            )
        else:
            keys = [key for key in self.spec if saved_spec.get(key) != self.spec[key]]
            difference = "; ".join(
                f"{key}: saved {saved_spec.get(key)!r}, now {self.spec[key]!r}" for key in keys
            )
        raise DataError(
            f"the checkpoint counted its samples in another order of data ({difference}): "
            "continuing would repeat some "
            "and leave out others. Resume with the same data, data.seed and data.seq_len, or start "
            "a new run from its "
            "weights"
        )

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise ValueError(
                "this loader was closed: open a new one with start_sample= where it stopped"
            )
        if self._error is None:
            began = time.perf_counter()
            found = self._queue.get()
            self.wait_s += time.perf_counter() - began
            if isinstance(found, Batch):
                return found
            self._error = found
        raise self._error

    def close(self) -> None:
        """Ends the thread and closes the files; batches read ahead are dropped.

        May be called again.
        """
        self._closed.set()
        self._thread.join()
        self._store.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_ahead(self, first_sample: int) -> None:
        """Runs in the thread: reads step after step until closed, or an error, which it queues."""
        try:
            while self._put(self._read_step(first_sample)):
                first_sample += self._global_batch
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

    def _read_step(self, first_sample: int) -> Batch:
        local_first = first_sample + self._local_start
        epochs, rows = self._rows_at(local_first)
        tokens = self._reader.read(rows)
        digest = _digest(local_first, epochs, rows, tokens)
        return Batch(tokens.reshape(-1, self._micro_batch, tokens.shape[1]), first_sample, digest)

    def _rows_at(self, local_first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns epochs and rows of the local batch.

        They are cut from a longer stretch of the order that is computed once.
        """
        begin = local_first - self._ordered_from
        if begin + self._local_batch > self._ordered.shape[1]:
            count = max(self._local_batch, _ORDER_SAMPLES)
            self._ordered_from, begin = local_first, 0
            refs = self._order.refs_at(local_first, count)
            self._ordered = np.stack([refs.epochs, refs.rows])
        epochs, rows = self._ordered[:, begin : begin + self._local_batch]
        return epochs, rows


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
    store = TokenStream(directory, split)
    reader = RowReader(store, seq_len)
    if reader.num_rows < 1:
        store.close()
        raise _too_short(store, split, seq_len)
    count = min(max_rows or reader.num_rows, reader.num_rows)
    slots = _group_slots(count, sequences_per_group)
    rows = (slots % count) * reader.num_rows // count
    return _padded_batches(
        store, reader, rows, slots < count, batch_size=batch_size, rank=rank, num_ranks=num_ranks
    )


def _group_slots(count: int, sequences_per_group: int) -> np.ndarray:
    """Returns indices 0 … count − 1 in the order of the groups' members.

    More follow where the last groups are not full.
    """
    num_groups = -(-count // sequences_per_group)
    slots = np.arange(num_groups * sequences_per_group, dtype=np.int64)
    return slots.reshape(sequences_per_group, num_groups).T.reshape(-1)


def _padded_batches(
    store: TokenStream,
    reader: RowReader,
    rows: np.ndarray,
    valid: np.ndarray,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
) -> Iterator[ValidationBatch]:
    try:
        for first in range(0, len(rows), num_ranks * batch_size):
            slots = first + rank * batch_size + np.arange(batch_size)
            last = np.minimum(slots, len(rows) - 1)
            yield ValidationBatch(reader.read(rows[last]), valid[last] & (slots < len(rows)))
    finally:
        store.close()


def _order(store: TokenStream, seq_len: int, seed: int) -> SampleOrder:
    """Returns the order of a split that is the one era of one source."""
    plan = concat_plan(store.batch_starts, seq_len, store.manifest.batch_tokens)
    name = "text"
    return SampleOrder(
        Mixture((name,), [WeightStage(0, {name: 1.0})], seed=seed),
        {name: SourceRows((plan.chunks.num_rows,), complete=True)},
        lambda source, era: plan.chunks,
        seed=seed,
    )


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


def _check_one_source(store: TokenStream) -> None:
    manifest = store.manifest
    if len(manifest.sources) > 1 or not manifest.complete:
        raise DataError(
            f"{store.directory} holds {len(manifest.sources)} sources and is "
            f"{'complete' if manifest.complete else 'still growing'}: this version trains on one "
            "source that is complete"
        )


def _too_short(store: TokenStream, split: str, seq_len: int) -> ShardError:
    return ShardError(
        f"split {split!r} of {store.directory} has {store.num_tokens} tokens, fewer than the "
        f"{seq_len + 1} of one row "
        f"({seq_len=}): prepare more text for it (for validation: raise validation_fraction), or "
        "lower seq_len"
    )


def _position_spec(store: TokenStream, split: str, seq_len: int, seed: int) -> dict[str, object]:
    """Returns all that `order` and the token stream depend on.

    The folder's path is not in it: data may be moved or copied.
    """
    contents = hashlib.sha256(
        "\n".join(entry.blake2b for entry in store.entries).encode()
    ).hexdigest()
    return {
        "shards_sha256": contents,
        "split": split,
        "num_tokens": store.num_tokens,
        "tokenizer_sha256": store.manifest.tokenizer_sha256,
        "batch_tokens": store.manifest.batch_tokens,
        "order_version": ORDER_VERSION,
        "seq_len": seq_len,
        "seed": seed,
    }


def _digest(first_sample: int, epochs: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Adds up the rows' checksums, modulo 2**31.

    A row's is over its global sample, epoch, number, and the crc32 of its tokens as uint32.
    """
    total = 0
    for index, (epoch, row) in enumerate(zip(epochs.tolist(), rows.tolist(), strict=True)):
        content = crc32(tokens[index].astype("<u4"))
        total += crc32(struct.pack("<QQQI", first_sample + index, epoch, row, content))
    return total % _DIGEST_MODULUS
