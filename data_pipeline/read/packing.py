"""Packs the documents of a segment into rows of S+1 tokens, by cutting or by fitting them.

"concat": the segment is one stream, and row n holds its tokens S*n to S*(n+1) inclusive, across
document borders. It loses and stores nothing, but cuts half of the documents.

"best_fit": best-fit-decreasing inside chunks of about 1,000 documents: the longest first, each into
the fullest row with room for it. At S=2048 and a mean document of 1,900 tokens it fills 99.8 % of the
places, for 0.5 ns per token. Only documents longer than a row are cut, into rows that share their
border token, so that every token but the first is a target; the tail is fitted like a short document.
The plan lies beside the shards:

    pack-SOURCE-SEGMENT-sS.arrow   one record batch per chunk: for each row its pieces (start, length)
    pack-SOURCE-SEGMENT-sS.json    the segment, and per chunk its rows and its batch's place and CRC32

A plan whose head is deleted or damaged is made again, in about the time of reading the shards once.
Each S has its own plan.

Legend: S tokens predicted per row, C chunks of a segment. A chunk is a run of whole record batches.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..arrow_columns import number_column
from ..arrow_messages import EncodedBuffers
from ..atomic import atomic_write, read_record, write_record
from ..errors import ShardError
from .order import ChunkTable, num_rows
from .token_store import ARROW_MAGIC_BYTES, crc32

PLAN_VERSION = 1
"""Raise it when the same documents would get other rows; old plans are then made again."""

WINDOW_BATCHES = 64
"""Record batches of usual size per shuffle window: 16 MiB of uint16."""

CHUNK_BATCHES = 8
"""Record batches per chunk with "concat"; its last row may need a ninth."""

_PLAN_DOCUMENTS = 1000
_PLAN_ROWS = 256  # a chunk leaves about one row unfilled, whatever its size
_PLAN_BATCHES = 16
AGAIN = "delete the plan's two files; they are made again"
"""The advice for a damaged plan."""


@dataclass(frozen=True)
class SegmentPlan:
    """Divides a segment's record batches into chunks, and counts their rows."""

    chunk_batches: np.ndarray  # int64 [C + 1]: chunk c begins with batch chunk_batches[c]
    chunks: ChunkTable


# concat -----------------------------------------------------------------------------------------


def concat_plan(
    batch_starts: np.ndarray,
    seq_len: int,
    batch_tokens: int,
    *,
    chunk_batches: int = CHUNK_BATCHES,
) -> SegmentPlan:
    """Returns the plan of rows that are cut from the stream.

    A row belongs to the chunk of its first token; its last tokens may lie in the next chunk.

    Args:
        batch_starts: int64 [batches + 1]: the first token of each record batch in the segment's stream.
        seq_len: S.
        batch_tokens: the usual size of a record batch.
        chunk_batches: how many record batches of that size make a chunk.
    """
    firsts = _grouped(np.diff(batch_starts), chunk_batches * batch_tokens)
    total = num_rows(int(batch_starts[-1]), seq_len)
    row_starts = np.minimum(-(-batch_starts[firsts] // seq_len), total)
    return SegmentPlan(firsts, _chunk_table(row_starts, int(batch_starts[-1]), batch_tokens))


def _grouped(sizes: np.ndarray, least: int) -> np.ndarray:
    """Groups consecutive batches until each group has `least` tokens.

    Returns:
        The first batch of each group, then the number of batches.
    """
    starts, tokens = [0], 0
    for batch, size in enumerate(sizes.tolist(), start=1):
        tokens += size
        if tokens >= least:
            starts.append(batch)
            tokens = 0
    if starts[-1] != len(sizes):
        starts.append(len(sizes))
    return np.array(starts, dtype=np.int64)


def _chunk_table(row_starts: np.ndarray, num_tokens: int, batch_tokens: int) -> ChunkTable:
    chunks = len(row_starts) - 1
    per_window = -(-WINDOW_BATCHES * batch_tokens * chunks // max(1, num_tokens))
    return ChunkTable(row_starts, max(2, min(WINDOW_BATCHES, per_window)))


# best_fit ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkPieces:
    """Lists the pieces that form the rows of a chunk, in stream order within a row.

    P pieces, R rows.
    """

    starts: np.ndarray  # int64 [P]: in the chunk's tokens
    lengths: np.ndarray  # int64 [P]
    row_starts: np.ndarray  # int64 [R + 1]: row r begins with piece row_starts[r]

    @property
    def num_rows(self) -> int:
        """Returns the number of rows."""
        return len(self.row_starts) - 1

    def fit(self, *, num_tokens: int, width: int) -> bool:
        """Returns whether the pieces lie within `num_tokens` tokens and no row exceeds `width`."""
        starts, lengths, row_starts = self.starts, self.lengths, self.row_starts
        if not len(starts) == len(lengths) == int(row_starts[-1]) or int(row_starts[0]) != 0:
            return False
        if (np.diff(row_starts) < 1).any() or (starts < 0).any() or (lengths < 1).any():
            return False
        if (lengths > width).any() or (starts > num_tokens - lengths).any():
            return False
        return not len(lengths) or bool((np.add.reduceat(lengths, row_starts[:-1]) <= width).all())


def fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Fits items into rows of `capacity`, best-fit-decreasing.

    Returns:
        The row of each item, and the number of rows.
    """
    lengths_list = lengths.tolist()
    row_of = np.zeros(len(lengths_list), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if some row has exactly r places left
    rows = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = lengths_list[item]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the best fit
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_of[item] = row
        if left := room - length:
            rooms |= 1 << left
            with_room[left].append(row)
    return row_of, rows


def fit_chunk(document_ends: np.ndarray, seq_len: int) -> ChunkPieces:
    """Fits the documents of a chunk into rows of S+1 tokens.

    Args:
        document_ends: int64, ascending: where each document ends in the chunk's tokens.
        seq_len: S.
    """
    starts, lengths = _cut_documents(document_ends, seq_len)
    row_of, rows = fit(lengths, seq_len + 1)
    by_row = np.lexsort((starts, row_of))
    counts = np.bincount(row_of, minlength=rows)
    row_starts = np.concatenate([[0], np.cumsum(counts)])
    return ChunkPieces(starts[by_row], lengths[by_row], row_starts)


def _cut_documents(document_ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents longer than a row into pieces of S+1 tokens that share their border token.

    Returns:
        Starts and lengths of all pieces, in the order of the tokens.
    """
    lengths = np.diff(document_ends, prepend=0)
    # A piece has at least two tokens, hence a target, unless its document has only one.
    pieces = np.maximum(1, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * seq_len
    starts = (document_ends - lengths)[document] + offsets
    return starts, np.minimum(lengths[document] - offsets, seq_len + 1)


# The plan's files -------------------------------------------------------------------------------


_PIECES = pa.list_(pa.struct([("start", pa.uint32()), ("length", pa.uint32())]))
_PLAN_SCHEMA = pa.schema([("pieces", _PIECES)])
_OFFSETS, _STARTS, _LENGTHS = 1, 4, 6
"""Buffer numbers in a record batch of this schema; those between are validity bitmaps, all unset."""


@dataclass(frozen=True)
class PlanKey:
    """Names a plan by source, segment and S.

    `content` is a hash of the segment's content, so that no plan of other documents is used.
    """

    source: str
    segment: int
    seq_len: int
    content: str

    @property
    def stem(self) -> str:
        """Returns the common stem of the plan's file names."""
        return f"pack-{self.source}-{self.segment:06d}-s{self.seq_len}"


class _Chunk(NamedTuple):
    batch_end: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1)]
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=1)]
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


class _PlanHead(BaseModel):
    """Holds the content of a plan's .json file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan_version: int = PLAN_VERSION
    packing: Literal["best_fit"] = "best_fit"
    source: str
    segment: int
    seq_len: int
    content: str
    batch_tokens: Annotated[int, Field(ge=1)]
    num_tokens: Annotated[int, Field(ge=0)]  # of the segment
    num_filled: Annotated[int, Field(ge=0)]  # places in rows that hold a token
    chunks: tuple[_Chunk, ...]

    @property
    def key(self) -> PlanKey:
        return PlanKey(self.source, self.segment, self.seq_len, self.content)


class BestFitPlan:
    """Reads the plan of a segment, chunk by chunk."""

    def __init__(self, directory: Path, head: _PlanHead):
        self.path = directory / f"{head.key.stem}.arrow"
        self._chunks = np.array(head.chunks, dtype=np.int64).reshape(-1, len(_Chunk._fields))
        batch_ends, rows = self._chunks[:, 0], self._chunks[:, 1]
        self.plan = SegmentPlan(
            np.concatenate([[0], batch_ends]),
            _chunk_table(np.cumsum([0, *rows]), head.num_tokens, head.batch_tokens),
        )

    def read(self, chunk: int) -> ChunkPieces:
        """Returns the pieces of a chunk.

        Raises:
            ShardError: the plan is damaged.
        """
        entry = _Chunk(*self._chunks[chunk].tolist())
        end = entry.offset + entry.length
        where = f"{self.path}, chunk {chunk} (bytes {entry.offset} to {end})"
        try:
            with open(self.path, "rb") as file:
                if end > os.fstat(file.fileno()).st_size:
                    raise ShardError(f"{where}: the file is shorter; {AGAIN}")
                message = os.pread(file.fileno(), entry.length, entry.offset)
        except OSError as error:
            raise ShardError(f"{where}: cannot be read ({error.strerror}); {AGAIN}") from error
        if crc32(message) != entry.crc32:
            raise ShardError(f"{where}: its CRC32 differs from the plan's head; {AGAIN}")
        try:
            return _decoded(message, entry.rows)
        except ValueError as error:
            raise ShardError(f"{where}: not {entry.rows} rows ({error}); {AGAIN}") from error


def open_plan(
    directory: Path,
    key: PlanKey,
    *,
    batch_tokens: int,
    batches: Callable[[], Iterator[np.ndarray]],
) -> BestFitPlan:
    """Opens the plan of a segment; makes it first if there is none.

    Args:
        directory: the prepared folder.
        key: names the plan.
        batch_tokens: the usual size of a record batch.
        batches: yields each record batch's document ends; called only to make the plan.

    Raises:
        ShardError: the plan is damaged.
        PrepareError: the plan cannot be written.
    """
    head = _read_head(directory, key)
    if head is None:
        head = _write_plan(directory, key, batch_tokens, batches())
    return BestFitPlan(directory, head)


def _write_plan(
    directory: Path, key: PlanKey, batch_tokens: int, batches: Iterator[np.ndarray]
) -> _PlanHead:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 3), use_threads=False)
    chunks: list[list[int]] = []
    filled = tokens = 0
    with pa.ipc.new_file(sink, _PLAN_SCHEMA, options=options) as writer:
        for batch_end, ends in _chunks_of(batches, key.seq_len, batch_tokens):
            pieces = fit_chunk(ends, key.seq_len)
            offset = sink.tell() if chunks else ARROW_MAGIC_BYTES + _PLAN_SCHEMA.serialize().size
            writer.write_batch(_encoded(pieces))
            chunks.append([batch_end, pieces.num_rows, offset, sink.tell() - offset, 0])
            filled += int(pieces.lengths.sum())
            tokens += int(ends[-1])
    data = sink.getvalue()
    for chunk in chunks:
        chunk[4] = crc32(data[chunk[2] : chunk[2] + chunk[3]])
    head = _PlanHead(
        source=key.source,
        segment=key.segment,
        seq_len=key.seq_len,
        content=key.content,
        batch_tokens=batch_tokens,
        num_tokens=tokens,
        num_filled=filled,
        chunks=tuple(_Chunk(*chunk) for chunk in chunks),
    )
    with atomic_write(directory / f"{key.stem}.arrow") as file:
        file.write(data)
    # last: it makes the plan valid
    write_record(directory / f"{key.stem}.json", head.model_dump(mode="json"))
    return head


def _chunks_of(
    batches: Iterator[np.ndarray], seq_len: int, batch_tokens: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields for each chunk the batch after its last, and where its documents end in it."""
    least = min(_PLAN_ROWS * (seq_len + 1), WINDOW_BATCHES * batch_tokens)
    collected: list[np.ndarray] = []
    documents = tokens = batch = 0
    for batch, ends in enumerate(batches, start=1):
        collected.append(ends + tokens)
        documents += len(ends)
        tokens += int(ends[-1])
        many = documents >= _PLAN_DOCUMENTS or tokens >= _PLAN_BATCHES * batch_tokens
        if many and tokens >= least:
            yield batch, np.concatenate(collected)
            collected, documents, tokens = [], 0, 0
    if collected:
        yield batch, np.concatenate(collected)


def _encoded(pieces: ChunkPieces) -> pa.RecordBatch:
    fields = [_PIECES.value_type.field(number) for number in range(2)]
    width = np.dtype("<u4")
    arrays = [number_column(values, width) for values in (pieces.starts, pieces.lengths)]
    structs = pa.StructArray.from_arrays(arrays, fields=fields)
    column = pa.ListArray.from_arrays(number_column(pieces.row_starts, np.dtype("<i4")), structs)
    return pa.RecordBatch.from_arrays([column.cast(_PIECES)], schema=_PLAN_SCHEMA)


def _decoded(message: bytes, num_rows: int) -> ChunkPieces:
    """Decodes a chunk's pieces buffer by buffer; Arrow's own decoder would start a thread."""
    encoded = EncodedBuffers(message)
    row_starts = encoded.decode(_OFFSETS, num_rows + 1, np.dtype("<i4")).astype(np.int64)
    if row_starts[0] != 0:
        raise ValueError("its first row does not begin with its first piece")
    num_pieces = max(0, int(row_starts[-1]))
    starts, lengths = (
        encoded.decode(number, num_pieces, np.dtype("<u4")).astype(np.int64)
        for number in (_STARTS, _LENGTHS)
    )
    return ChunkPieces(starts, lengths, row_starts)


def _read_head(directory: Path, key: PlanKey) -> _PlanHead | None:
    """Returns the head of this segment's plan; None if it must be made."""
    path = directory / f"{key.stem}.json"
    try:
        head = _PlanHead.model_validate(read_record(path))
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
    except ValidationError:  # missing, damaged, or of another version
        return None
    return head if (head.key, head.plan_version) == (key, PLAN_VERSION) else None
