"""The global document shuffle: spreads a source's documents evenly over all its shards.

A loader shuffles only inside a segment, so files sorted by date or site would be read in that order.
With `shuffle_documents`, a keyed hash of its text gives each document a place, in two passes:

    spill_unit      tokenises a unit, and writes its documents sorted by bucket, a piece at a time
    gather_bucket   collects a bucket from all units, sorts it by hash, and writes its shards

The order depends only on the documents. It needs the whole corpus: no segment is sealed before the last
unit is tokenised, so no run can train meanwhile. Each token is written and read once more, and takes
twice the disk space until the end.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from ..atomic import atomic_write, read_record, write_record
from ..errors import ShardError
from ..manifest import SPLITS, ShardEntry, Split
from ..prepare_config import PrepareConfig
from ..read.token_store import bools_of, crc32, decode_batch, decode_index
from ..shards import ShardWriter, TokenDocument
from .tasks import (
    ShardPair,
    UnitTask,
    in_batches,
    ready_shards,
    save_shards,
    schema_of,
    token_documents,
    unfinished_file,
)
from .units import Unit, interleaved

MAX_BUCKETS = 1024
_PIECE_TOKENS = 2**24  # sorted in memory at a time
_KEY = 0x5D5F_1E2D_0C5B_A7E3


def shuffled_buckets(units: Sequence[Unit], config: PrepareConfig) -> tuple[Unit, ...]:
    """Returns the buckets of all sources, in the order of commits.

    They replace units, without input of their own. Each is about as large as an input split, and a
    source has at most MAX_BUCKETS.
    """
    total_bytes: Counter[str] = Counter()
    for unit in units:
        total_bytes[unit.source] += unit.num_bytes
    return interleaved(
        Unit(source, number, ())
        for source, num_bytes in total_bytes.items()
        for number in range(min(MAX_BUCKETS, max(1, -(-num_bytes // config.split_bytes))))
    )


# ---- first pass


def spill_unit(task: UnitTask) -> int:
    """Writes a unit's documents sorted by bucket; returns their number of tokens."""
    said = task.unfinished("spill.json")
    if (found := read_record(said)) is not None:
        return int(found["num_tokens"])
    places: list[int] = []
    num_tokens = 0
    with ExitStack() as files:
        file = files.enter_context(atomic_write(task.unfinished("spill.tok.arrow")))
        index_file = files.enter_context(atomic_write(task.unfinished("spill.idx.arrow")))
        writer = ShardWriter(file, schema=schema_of(task), batch_tokens=task.config.batch_tokens)
        for piece in in_batches(token_documents(task), _num_tokens, _PIECE_TOKENS):
            for place, documents in _by_place(piece, task.num_buckets):
                for document in documents:
                    writer.add(document)
                    num_tokens += len(document.tokens)
                writer.end_batch()
                places.extend([place] * (writer.num_batches - len(places)))
        writer.close_index(index_file)
    write_record(said, {"num_tokens": num_tokens, "places": places})
    return num_tokens


_Placed = tuple[Split, TokenDocument]


def _num_tokens(placed: _Placed) -> int:
    return len(placed[1].tokens)


def _by_place(
    piece: Sequence[_Placed], num_buckets: int
) -> Iterator[tuple[int, list[TokenDocument]]]:
    """Yields the documents of a piece by place: 2 × bucket + side."""
    groups: dict[int, list[TokenDocument]] = {}
    for side, document in piece:
        bucket = _shuffle_key(document.doc_id) * num_buckets >> 64
        groups.setdefault(2 * bucket + SPLITS.index(side), []).append(document)
    yield from sorted(groups.items())


def _shuffle_key(doc_id: bytes) -> int:
    """Returns a document's 64-bit sort key: splitmix64's finalizer of its hash's second half.

    The first half decides about validation.
    """
    value = int.from_bytes(doc_id[8:], "big") ^ _KEY
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


# ---- second pass


def gather_bucket(task: UnitTask) -> tuple[ShardEntry, ...]:
    """Writes the shards of one bucket of a source."""
    if (ready := ready_shards(task)) is not None:
        return ready
    label = f"bucket {task.unit.number + 1} of {task.num_buckets}"
    with ExitStack() as files:
        writers = ShardPair(task, files, label=label)
        for number, side in enumerate(SPLITS):
            place = 2 * task.unit.number + number
            documents = [
                document for unit in task.spilled for document in _spilled(task, unit, place)
            ]
            for document in sorted(documents, key=lambda one: _shuffle_key(one.doc_id)):
                writers.add(side, document)
        shards = writers.close()
    save_shards(task, shards)
    return shards


def _spilled(task: UnitTask, unit: Unit, place: int) -> Iterator[TokenDocument]:
    """Reads the documents that a unit spilled for one place."""
    said = unfinished_file(task.directory, unit, "spill.json")
    if (spilled := read_record(said)) is None:
        raise ShardError(f"{said} is damaged: run the same command again")
    batches = [number for number, found in enumerate(spilled["places"]) if found == place]
    path, index_path = (
        unfinished_file(task.directory, unit, what)
        for what in ("spill.tok.arrow", "spill.idx.arrow")
    )
    try:
        index = decode_index(index_path.read_bytes())
        with open(path, "rb") as file:
            for number in batches:
                offset, length = int(index["offset"][number]), int(index["length"][number])
                message = os.pread(file.fileno(), length, offset)
                if crc32(message) != int(index["crc32"][number]):
                    raise ValueError(f"record batch {number} has another CRC32")
                yield from _documents_of(decode_batch(message, schema_of(task)))
    except (OSError, ValueError) as error:
        raise ShardError(
            f"{path} is damaged ({error}): delete the folder and prepare again"
        ) from error


def _documents_of(batch: pa.RecordBatch) -> Iterator[TokenDocument]:
    tokens = batch.column("tokens")
    values, offsets = np.from_dlpack(tokens.values), np.from_dlpack(tokens.offsets).tolist()
    has_mask = "loss_mask" in batch.schema.names
    learned = bools_of(batch.column("loss_mask").values) if has_mask else None
    others = [name for name in batch.schema.names if name not in ("tokens", "loss_mask")]
    for place, row in enumerate(batch.select(others).to_pylist()):
        part = slice(*offsets[place : place + 2])
        yield TokenDocument(
            tokens=values[part],
            doc_id=row["doc_id"],
            num_text_bytes=row["n_bytes"],
            source=row["source"],
            source_row=row["source_row"],
            num_prompt_tokens=0 if learned is None else int(np.count_nonzero(~learned[part])),
            record_id=row.get("record_id", ""),
        )
