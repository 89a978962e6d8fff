"""Packs the documents of a segment into rows of S+1 tokens, by cutting or by fitting them.

"concat": the segment is one stream, and row n holds its tokens S*n to S*(n+1) inclusive, across
document borders. It loses and stores nothing, but cuts half of the documents.

"best_fit": best-fit-decreasing inside chunks of about 1,000 documents: the longest first, each into
the fullest row with room for it. At S=2048 and a mean document of 1,900 tokens it fills 99.8 % of the
places, for 0.5 ns per token. Only documents longer than a row are cut, into rows that share their
border token, so that every token but the first is a target; the tail is fitted like a short document.
A reader fits a chunk again when it decodes it, but the order of rows needs their number in all chunks.
This plan lies beside the shards, in pack-SOURCE-SEGMENT-sS.json. If it is deleted or damaged, it is made
again, in about the time of reading the shards once.

Legend: S tokens predicted per row, C chunks of a segment. A chunk is a run of whole record batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..atomic import read_record, write_record
from ..errors import ShardError
from .order import ChunkTable, num_rows

PLAN_VERSION = 1
"""Raise it when the same documents would get other rows; old plans are then made again."""

WINDOW_BATCHES = 64
"""Record batches of usual size per shuffle window: 16 MiB of uint16."""

CHUNK_BATCHES = 8
"""Record batches per chunk with "concat"; its last row may need a ninth."""

_PLAN_DOCUMENTS = 1000
_PLAN_ROWS = 256  # a chunk leaves about one row unfilled, whatever its size
_PLAN_BATCHES = 16
AGAIN = "delete the file pack-*.json of the plan; it is made again"
"""The advice for a plan that cannot be used."""


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

    def of_row(self, row: int) -> Iterator[tuple[int, int]]:
        """Returns start and length of a row's pieces."""
        mine = slice(*self.row_starts[row : row + 2].tolist())
        return zip(self.starts[mine].tolist(), self.lengths[mine].tolist(), strict=True)


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


# The plan's file --------------------------------------------------------------------------------


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
    def file_name(self) -> str:
        """Returns the name of the plan's file."""
        return f"pack-{self.source}-{self.segment:06d}-s{self.seq_len}.json"


def open_plan(
    directory: Path,
    key: PlanKey,
    *,
    batch_tokens: int,
    batches: Callable[[], Iterator[np.ndarray]],
) -> SegmentPlan:
    """Opens the plan of a segment; makes it first if there is none.

    Args:
        directory: the prepared folder.
        key: names the plan.
        batch_tokens: the usual size of a record batch.
        batches: yields each record batch's document ends; called only to make the plan.

    Raises:
        ShardError: the plan cannot be read.
        PrepareError: the plan cannot be written.
    """
    path = directory / key.file_name
    named = {"version": PLAN_VERSION, "batch_tokens": batch_tokens, **asdict(key)}
    try:
        found = read_record(path)
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
    if not isinstance(found, dict) or found.get("plan") != named:
        chunks = [
            (batch_end, int(ends[-1]), fit_chunk(ends, key.seq_len).num_rows)
            for batch_end, ends in _chunks_of(batches(), key.seq_len, batch_tokens)
        ]
        found = {"plan": named, "chunks": chunks}
        write_record(path, found)
    batch_ends, tokens, rows = np.array(found["chunks"], dtype=np.int64).reshape(-1, 3).T
    table = _chunk_table(np.cumsum([0, *rows]), int(tokens.sum()), batch_tokens)
    return SegmentPlan(np.concatenate([[0], batch_ends]), table)


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
