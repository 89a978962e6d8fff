"""The rows of one chunk of a segment, decoded: its tokens, and the pieces of them that rows consist of.

A chunk (packing.py) is decoded whole, and nothing of it is moved afterwards. A row that is cut from
the stream is one piece, and shares its border token with the next; a row of fitted documents is a few
pieces, as the plan says, and padding. They are joined when a batch needs them (gather.py).

The last row of a chunk that is cut from the stream ends in the next chunk. The first tokens of every
chunk are kept when it is decoded; for a chunk that is still to come its first batch is decoded for
them, one of nine.

Legend: S tokens predicted per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import ShardError
from .packing import AGAIN, CHUNK_BATCHES, BestFitPlan, ChunkPieces, SegmentPlan, concat_plan
from .token_store import TokenBatch, TokenStore

BatchReader = Callable[[TokenStore, int, bool, np.ndarray | None], TokenBatch | None]
"""Reads a record batch, if asked with documents' ends and loss mask, its tokens into an array if one
is given; None: pass over it."""


@dataclass(frozen=True)
class LoadedChunk:
    """Holds the tokens of a chunk, and the pieces of them that its rows consist of.

    T tokens, P pieces, R rows. What the pieces of a row leave of its S+1 places is padding.
    """

    width: int  # S+1
    pieces: ChunkPieces
    flat_tokens: np.ndarray  # uint16 or uint32 [T]
    flat_counts: np.ndarray | None  # bool [T]: it is learned; None: all are
    flat_documents: np.ndarray | None  # int32 [T]: its document's number in the chunk; None: not
    # asked for, or every piece is one
    continued: np.ndarray | None  # bool [P]: its first token was a target already; None: of none
    damaged: np.ndarray | None  # bool [R]: some of their tokens are lost; None: no row's
    lost_batches: tuple[int, ...] = ()  # record batches that could not be read


class ChunkSize(NamedTuple):
    """Counts what a chunk has, or has at most."""

    tokens: int
    rows: int
    pieces: int


class ChunkLayout(Protocol):
    """Turns the record batches of a chunk into rows at equal distances."""

    plan: SegmentPlan

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk.

        Raises:
            ShardError: they cannot be read, and that is not to be passed over.
        """
        ...

    def most_of(self, chunk: int) -> ChunkSize:
        """Returns the most that a chunk can have, without reading it."""
        ...


@dataclass(frozen=True)
class WantedOfTokens:
    """Says what is wanted of each token beside its id."""

    counts: bool
    documents: bool


class ConcatLayout:
    """Cuts rows from the stream of a segment, S tokens apart."""

    def __init__(
        self,
        store: TokenStore,
        read_batch: BatchReader,
        *,
        seq_len: int,
        wanted: WantedOfTokens,
        chunk_batches: int = CHUNK_BATCHES,
    ):
        self._store, self._read_batch = store, read_batch
        self._seq_len, self._wanted = seq_len, wanted
        self._heads: dict[int, TokenBatch | None] = {}
        self.plan = concat_plan(
            store.batch_starts, seq_len, store.manifest.batch_tokens, chunk_batches=chunk_batches
        )

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk."""
        first_row, end_row = self.plan.chunks.row_starts[chunk : chunk + 2].tolist()
        begin, end = first_row * self._seq_len, end_row * self._seq_len + 1
        first, next_chunk = self.plan.chunk_batches[chunk : chunk + 2].tolist()
        starts = self._store.batch_starts
        span_begin, last = starts[[first, next_chunk]].tolist()
        span = _Span(self._store, span_begin, max(last, end), self._wanted)
        for batch in range(first, int(np.searchsorted(starts, end, side="left"))):
            is_mine = batch < next_chunk
            found = self._read(batch, span.place_of(batch)) if is_mine else self._head(batch)
            if batch == first:
                self._heads[batch] = _first_tokens(found, self._seq_len)
            span.put(batch, found)
        pieces = _cut(begin - span_begin, end_row - first_row, self._seq_len)
        return LoadedChunk(
            width=self._seq_len + 1,
            pieces=pieces,
            flat_tokens=span.tokens,
            flat_counts=span.counts,
            flat_documents=span.documents,
            continued=None,
            damaged=_damaged_rows(pieces, span),
            lost_batches=tuple(span.lost_batches),
        )

    def most_of(self, chunk: int) -> ChunkSize:
        """Returns the chunk's size; its last row may end in the next chunk."""
        rows = int(np.diff(self.plan.chunks.row_starts[chunk : chunk + 2])[0])
        first, end = self._store.batch_starts[self.plan.chunk_batches[chunk : chunk + 2]].tolist()
        return ChunkSize(end - first + self._seq_len, rows, rows)

    def _read(self, batch: int, into: np.ndarray | None = None) -> TokenBatch | None:
        wanted = self._wanted
        in_full = wanted.documents or (wanted.counts and self._store.source.has_loss_mask)
        return self._read_batch(self._store, batch, in_full, into)

    def _head(self, batch: int) -> TokenBatch | None:
        """Returns the first tokens of a batch, at least S if it has as many."""
        if batch not in self._heads:
            self._heads[batch] = _first_tokens(self._read(batch), self._seq_len)
        return self._heads[batch]


class BestFitLayout:
    """Puts whole documents into rows, as the segment's plan says."""

    def __init__(
        self,
        store: TokenStore,
        read_batch: BatchReader,
        *,
        seq_len: int,
        wanted: WantedOfTokens,
        plan: BestFitPlan,
    ):
        self._store, self._read_batch = store, read_batch
        self._seq_len, self._wanted, self._plan = seq_len, wanted, plan
        self.plan = plan.plan

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk; what no document fills is padding that does not count."""
        stream = self._stream(chunk)
        pieces = self._plan.read(chunk)
        width = self._seq_len + 1
        if not pieces.fit(num_tokens=len(stream.tokens), width=width):
            raise ShardError(f"{self._plan.path} does not fit its segment: {AGAIN}")
        return LoadedChunk(
            width=width,
            pieces=pieces,
            flat_tokens=stream.tokens,
            flat_counts=stream.counts,
            flat_documents=None,
            continued=_continued(pieces, self._seq_len, len(stream.tokens)),
            damaged=_damaged_rows(pieces, stream),
            lost_batches=tuple(stream.lost_batches),
        )

    def most_of(self, chunk: int) -> ChunkSize:
        """Returns the chunk's size: of a document's pieces all but the last fill rows."""
        rows = int(np.diff(self.plan.chunks.row_starts[chunk : chunk + 2])[0])
        batches = self.plan.chunk_batches[chunk : chunk + 2]
        tokens, documents = (
            int(np.diff(starts[batches])[0])
            for starts in (self._store.batch_starts, self._store.document_starts)
        )
        return ChunkSize(tokens, rows, rows + documents)

    def _stream(self, chunk: int) -> "_Span":
        first, end = self.plan.chunk_batches[chunk : chunk + 2].tolist()
        starts = self._store.batch_starts
        has_mask = self._store.source.has_loss_mask
        wanted = WantedOfTokens(counts=has_mask, documents=False)
        span = _Span(self._store, int(starts[first]), int(starts[end]), wanted)
        for batch in range(first, end):
            into = span.place_of(batch)
            span.put(batch, self._read_batch(self._store, batch, has_mask, into))
        return span


class _Span:
    """Is a stretch of a segment's tokens while record batches are decoded or copied into it."""

    def __init__(self, store: TokenStore, begin: int, end: int, wanted: WantedOfTokens):
        size = max(0, end - begin)
        self._starts, self._begin = store.batch_starts, begin
        self.tokens = np.empty(size, dtype=store.token_dtype)
        self.counts = np.ones(size, dtype=bool) if wanted.counts else None
        self.documents = np.zeros(size, dtype=np.int32) if wanted.documents else None
        self._num_documents = 0
        self.lost: list[tuple[int, int]] = []
        """Begins and ends of what could not be read."""
        self.lost_batches: list[int] = []

    def place_of(self, number: int) -> np.ndarray:
        """Returns where the tokens of a batch lie, for who decodes it: it lies here whole."""
        begin, end = (self._starts[number : number + 2] - self._begin).tolist()
        return self.tokens[begin:end]

    def put(self, number: int, batch: TokenBatch | None) -> None:
        """Takes a batch, or its first tokens, as far as it lies in this stretch.

        Tokens that were decoded into their place are not copied.
        """
        begin, end = (self._starts[number : number + 2] - self._begin).tolist()
        here = slice(max(0, begin), min(end, len(self.tokens)))
        if batch is None:
            self.tokens[here] = 0
            self.lost.append((here.start, here.stop))
            self.lost_batches.append(number)
            return
        there = slice(here.start - begin, here.stop - begin)
        if batch.tokens.base is not self.tokens:
            self.tokens[here] = batch.tokens[there]
        if self.counts is not None and batch.loss_mask is not None:
            self.counts[here] = batch.loss_mask[there]
        if self.documents is not None:
            lengths = np.diff(batch.document_ends, prepend=0)
            numbers = np.arange(len(lengths), dtype=np.int32) + self._num_documents
            self.documents[here] = np.repeat(numbers, lengths)[there]
            self._num_documents += len(lengths)


def _first_tokens(batch: TokenBatch | None, count: int) -> TokenBatch | None:
    """Returns copies of the first tokens of a batch."""
    if batch is None:
        return None
    mask = None if batch.loss_mask is None else batch.loss_mask[:count].copy()
    return TokenBatch(batch.tokens[:count].copy(), batch.document_ends, mask)


def _cut(begin: int, count: int, seq_len: int) -> ChunkPieces:
    """Returns rows of one piece each, S tokens apart."""
    starts = begin + np.arange(count) * seq_len
    return ChunkPieces(starts, np.full(count, seq_len + 1), np.arange(count + 1))


def _continued(pieces: ChunkPieces, seq_len: int, num_tokens: int) -> np.ndarray:
    """Returns which pieces go on with a document: their first token was a target already.

    Only a document longer than a row is cut, so the piece before fills a row and ends with the
    token with which this one begins.
    """
    full = pieces.starts[pieces.lengths == seq_len + 1]
    ends_one = np.zeros(num_tokens, dtype=bool)
    ends_one[full + seq_len] = True
    return ends_one[pieces.starts]


def _damaged_rows(pieces: ChunkPieces, stream: _Span) -> np.ndarray | None:
    """Returns which rows hold a token that is lost, or None if none does."""
    damaged = np.zeros(pieces.num_rows, dtype=bool)
    for begin, end in stream.lost:
        row_of = np.repeat(np.arange(pieces.num_rows), np.diff(pieces.row_starts))
        lost = (pieces.starts < end) & (pieces.starts + pieces.lengths > begin)
        damaged[row_of[lost]] = True
    return damaged if damaged.any() else None
