"""One decoded chunk of a segment: its tokens, and the pieces of them that form rows.

A chunk (packing.py) is decoded whole and in place. With "concat", a row is one piece, which shares its
border token with the next row. With "best_fit", a row is several pieces, as planned, and padding.
`gather` joins the pieces when a batch needs them.

With "concat", a chunk's last row ends in the next chunk. The first tokens of each decoded chunk are
kept for it; if the next chunk is not decoded yet, its first batch is, one in nine.

Legend: S tokens predicted per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ShardError
from .packing import AGAIN, CHUNK_BATCHES, BestFitPlan, ChunkPieces, concat_plan
from .token_store import TokenBatch, TokenStore

BatchReader = Callable[[TokenStore, int, bool, np.ndarray | None], TokenBatch]
"""Reads a record batch by store, number, whether ends and mask are wanted, and an optional array for
its tokens."""


@dataclass(frozen=True)
class LoadedChunk:
    """Holds the tokens of a chunk, and the pieces of them that form its rows.

    T tokens, P pieces, R rows. Padding fills what the pieces leave of a row's S+1 places.
    """

    pieces: ChunkPieces
    flat_tokens: np.ndarray  # uint16 or uint32 [T]
    flat_counts: np.ndarray | None  # bool [T]: whether the token is learned; None: all are
    # int32 [T]: the document's number in the chunk; None: not requested, or each piece is one
    flat_documents: np.ndarray | None
    continued: np.ndarray | None  # bool [P]: its first token was a target before; None: no piece's


@dataclass(frozen=True)
class WantedOfTokens:
    """Says which values per token are needed beside its id."""

    counts: bool
    documents: bool


class ConcatLayout:
    """Cuts rows from a segment's stream, S tokens apart."""

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
        self._heads: dict[int, TokenBatch] = {}
        self.plan = concat_plan(
            store.batch_starts,
            seq_len,
            store.manifest.header.batch_tokens,
            chunk_batches=chunk_batches,
        )

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk.

        Raises:
            ShardError: a record batch is damaged.
        """
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
            pieces=pieces,
            flat_tokens=span.tokens,
            flat_counts=span.counts,
            flat_documents=span.documents,
            continued=None,
        )

    def _read(self, batch: int, into: np.ndarray | None = None) -> TokenBatch:
        wanted = self._wanted
        in_full = wanted.documents or (wanted.counts and self._store.source.has_loss_mask)
        return self._read_batch(self._store, batch, in_full, into)

    def _head(self, batch: int) -> TokenBatch:
        """Returns the first S tokens of a batch, or fewer if it has fewer."""
        if batch not in self._heads:
            self._heads[batch] = _first_tokens(self._read(batch), self._seq_len)
        return self._heads[batch]


class BestFitLayout:
    """Puts whole documents into rows, following the segment's plan."""

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
        """Returns the rows of a chunk; padding fills up rows and does not count.

        Raises:
            ShardError: the plan or a record batch is damaged.
        """
        stream = self._stream(chunk)
        pieces = self._plan.read(chunk)
        if not pieces.fit(num_tokens=len(stream.tokens), width=self._seq_len + 1):
            raise ShardError(f"{self._plan.path} does not fit its segment: {AGAIN}")
        return LoadedChunk(
            pieces=pieces,
            flat_tokens=stream.tokens,
            flat_counts=stream.counts,
            flat_documents=None,
            continued=_continued(pieces, self._seq_len, len(stream.tokens)),
        )

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


ChunkLayout = ConcatLayout | BestFitLayout


class _Span:
    """Collects a stretch of a segment's tokens, into which record batches are decoded or copied."""

    def __init__(self, store: TokenStore, begin: int, end: int, wanted: WantedOfTokens):
        size = max(0, end - begin)
        self._starts, self._begin = store.batch_starts, begin
        self.tokens = np.empty(size, dtype=store.token_dtype)
        self.counts = np.ones(size, dtype=bool) if wanted.counts else None
        self.documents = np.zeros(size, dtype=np.int32) if wanted.documents else None
        self._num_documents = 0

    def place_of(self, number: int) -> np.ndarray:
        """Returns the array to decode a batch into, which must lie here whole."""
        begin, end = (self._starts[number : number + 2] - self._begin).tolist()
        return self.tokens[begin:end]

    def put(self, number: int, batch: TokenBatch) -> None:
        """Adds the part of a batch that lies in this stretch; copies tokens not decoded in place."""
        begin, end = (self._starts[number : number + 2] - self._begin).tolist()
        here = slice(max(0, begin), min(end, len(self.tokens)))
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


def _first_tokens(batch: TokenBatch, count: int) -> TokenBatch:
    """Returns copies of the first tokens of a batch."""
    mask = None if batch.loss_mask is None else batch.loss_mask[:count].copy()
    return TokenBatch(batch.tokens[:count].copy(), batch.document_ends, mask)


def _cut(begin: int, count: int, seq_len: int) -> ChunkPieces:
    """Returns rows of one piece each, S tokens apart."""
    starts = begin + np.arange(count) * seq_len
    return ChunkPieces(starts, np.full(count, seq_len + 1), np.arange(count + 1))


def _continued(pieces: ChunkPieces, seq_len: int, num_tokens: int) -> np.ndarray:
    """Returns which pieces continue a document, so that their first token was a target before.

    Only documents longer than a row are cut: the piece before fills a row and ends with the token
    that begins this one.
    """
    full = pieces.starts[pieces.lengths == seq_len + 1]
    ends_one = np.zeros(num_tokens, dtype=bool)
    ends_one[full + seq_len] = True
    return ends_one[pieces.starts]
