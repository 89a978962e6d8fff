"""The rows of one chunk of an era, decoded and laid out at equal distances.

A chunk (packing.py) is decoded whole. Rows that are cut from the stream lie S tokens apart in it and
share their border token; rows of fitted documents lie S+1 apart, padding included. So any rows of a
chunk are one strided view, and gathering them is one copy.

The last row of a chunk that is cut from the stream ends in the next chunk. The first tokens of every
chunk are kept when it is decoded; for a chunk that is still to come its first batch is decoded for
them, one of nine.

Legend: S tokens predicted per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa

from .errors import ShardError
from .packing import AGAIN, CHUNK_BATCHES, BestFitPlan, ChunkPieces, EraPlan, concat_plan
from .token_store import TokenBatch, TokenStore

BatchReader = Callable[[TokenStore, int, bool, np.ndarray | None], TokenBatch | None]
"""Reads a record batch, if asked with documents' ends and loss mask, its tokens into an array if one
is given; None: pass over it."""


RowBytes = Callable[[int], memoryview]
"""Returns the bytes of a row by its number in its chunk."""


@dataclass(frozen=True)
class LoadedChunk:
    """Holds the rows of a chunk: flat arrays in which they begin `stride` apart, `width` long."""

    stride: int
    width: int  # S+1
    flat_tokens: np.ndarray  # uint16 or uint32
    flat_counts: np.ndarray | None  # bool, of each token: it is learned; None: all are
    # `document_dtype`, of each token: its document's number, −1: padding. Counted in its row; where
    # rows overlap a token is in two of them, and it is counted in the chunk
    flat_documents: np.ndarray | None
    damaged: np.ndarray | None  # bool [rows]: some of their tokens are lost; None: no row's
    lost_batches: tuple[int, ...] = ()  # record batches that could not be read

    @property
    def overlaps(self) -> bool:
        """Returns whether each row shares its last token with the next."""
        return self.stride < self.width

    @property
    def tokens(self) -> np.ndarray:
        """Returns the tokens of each row, a view [rows, S+1]."""
        flat = self.flat_tokens
        rows = (len(flat) - self.width) // self.stride + 1
        strides = (self.stride * flat.itemsize, flat.itemsize)
        return np.lib.stride_tricks.as_strided(flat, (rows, self.width), strides, writeable=False)

    @cached_property
    def tokens_of(self) -> RowBytes:
        """Returns what gives the tokens of a row, as bytes."""
        return _row_bytes(self.flat_tokens, self.stride, self.width)

    @cached_property
    def counts_of(self) -> RowBytes:
        """Returns what gives which tokens of a row are learned, a byte each."""
        assert self.flat_counts is not None, "all are learned"
        return _row_bytes(self.flat_counts, self.stride, self.width)

    @cached_property
    def documents_of(self) -> RowBytes:
        """Returns what gives the documents' numbers of a row, as bytes."""
        assert self.flat_documents is not None, "they were not asked for"
        return _row_bytes(self.flat_documents, self.stride, self.width)


def document_dtype(width: int, overlaps: bool) -> np.dtype:
    """Returns the integers of documents' numbers in chunks of rows so wide."""
    fits = not overlaps and width <= np.iinfo(np.int16).max
    return np.dtype(np.int16 if fits else np.int32)


def _row_bytes(flat: np.ndarray, stride: int, width: int) -> RowBytes:
    values = flat.data.cast("B")
    step, size = stride * flat.itemsize, width * flat.itemsize
    return lambda row: values[row * step : row * step + size]


class ChunkLayout(Protocol):
    """Turns the record batches of a chunk into rows at equal distances."""

    plan: EraPlan

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk.

        Raises:
            ShardError: they cannot be read, and that is not to be passed over.
        """
        ...

    def spans_of(self, row: int) -> list[tuple[int, int]]:
        """Returns begin and end, in the era's stream, of each stretch of tokens in a row."""
        ...

    def rows_of(self, begin: int, end: int) -> list[int]:
        """Returns the rows that hold any of a document's tokens, which begin and end there."""
        ...


@dataclass(frozen=True)
class WantedOfTokens:
    """Says what is wanted of each token beside its id."""

    counts: bool
    documents: bool


class ConcatLayout:
    """Cuts rows from the stream of an era, S tokens apart."""

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
        here = slice(begin - span_begin, end - span_begin)
        row_begins = here.start + np.arange(end_row - first_row) * self._seq_len
        return LoadedChunk(
            stride=self._seq_len,
            width=self._seq_len + 1,
            flat_tokens=span.tokens[here],
            flat_counts=None if span.counts is None else span.counts[here],
            flat_documents=None if span.documents is None else span.documents[here],
            damaged=_overlapping(row_begins, span, self._seq_len),
            lost_batches=tuple(span.lost_batches),
        )

    def spans_of(self, row: int) -> list[tuple[int, int]]:
        """Returns the one stretch that a row is."""
        return [(row * self._seq_len, (row + 1) * self._seq_len + 1)]

    def rows_of(self, begin: int, end: int) -> list[int]:
        """Returns the rows that overlap a stretch; those that share a border token both do."""
        first = max(0, -(-(begin - self._seq_len) // self._seq_len))
        last = (end - 1) // self._seq_len
        return list(range(first, min(last + 1, self.plan.chunks.num_rows)))

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
    """Puts whole documents into rows, as the era's plan says."""

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
        places = _places(pieces, width, len(stream.tokens), self._plan)
        padding = width - np.add.reduceat(pieces.lengths, pieces.row_starts[:-1])
        end_id = self._store.manifest.end_of_document_id
        tokens = _laid_out(stream.tokens, pieces, padding, end_id)
        if stream.counts is None:
            counts = np.ones(len(tokens), dtype=bool)
            for begin, end in _tails(padding, width):
                counts[begin:end] = False
        else:
            counts = _laid_out(stream.counts, pieces, padding, False).copy()
        counts[places[_continued(pieces, self._seq_len)]] = False
        documents = None
        if self._wanted.documents:
            documents = _piece_numbers(pieces, padding, document_dtype(width, overlaps=False))
        damaged = _damaged_rows(pieces, stream)
        return LoadedChunk(
            stride=width,
            width=width,
            flat_tokens=tokens,
            flat_counts=counts,
            flat_documents=documents,
            damaged=damaged,
            lost_batches=tuple(stream.lost_batches),
        )

    def spans_of(self, row: int) -> list[tuple[int, int]]:
        """Returns the stretches that a row is made of, in its order."""
        starts = self.plan.chunks.row_starts
        chunk = int(np.searchsorted(starts, row, side="right")) - 1
        pieces = self._plan.read(chunk)
        inside = row - int(starts[chunk])
        mine = slice(*pieces.row_starts[inside : inside + 2].tolist())
        begins = pieces.starts[mine] + self._begin_of(chunk)
        ends = begins + pieces.lengths[mine]
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def rows_of(self, begin: int, end: int) -> list[int]:
        """Returns the rows with a piece of a document, which lies whole in one chunk."""
        batch = int(np.searchsorted(self._store.batch_starts, begin, side="right")) - 1
        chunk = int(np.searchsorted(self.plan.chunk_batches, batch, side="right")) - 1
        pieces = self._plan.read(chunk)
        begins = pieces.starts + self._begin_of(chunk)
        overlaps = (begins < end) & (begins + pieces.lengths > begin)
        row_of = np.repeat(np.arange(pieces.num_rows), np.diff(pieces.row_starts))
        return (np.unique(row_of[overlaps]) + int(self.plan.chunks.row_starts[chunk])).tolist()

    def _begin_of(self, chunk: int) -> int:
        """Returns the first token of a chunk in the era's stream."""
        return int(self._store.batch_starts[self.plan.chunk_batches[chunk]])

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
    """Is a stretch of an era's tokens while record batches are decoded or copied into it."""

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


def _overlapping(row_begins: np.ndarray, span: _Span, seq_len: int) -> np.ndarray | None:
    """Returns which rows hold a token that is lost, or None if none does."""
    damaged = np.zeros(len(row_begins), dtype=bool)
    for begin, end in span.lost:
        damaged |= (row_begins < end) & (row_begins + seq_len + 1 > begin)
    return damaged if damaged.any() else None


# Fitted documents -------------------------------------------------------------------------------

_BINARY_VIEW = np.dtype(
    [("length", "<i4"), ("prefix", "<i4"), ("buffer", "<i4"), ("offset", "<i4")]
)
"""An element of Arrow's binary view arrays; up to 12 bytes stand in the place of the last three."""


def _places(pieces: ChunkPieces, width: int, num_tokens: int, plan: BestFitPlan) -> np.ndarray:
    """Returns where each piece begins among the rows: one after the other in its row."""
    ends = np.cumsum(pieces.lengths)
    before_row = np.concatenate([[0], ends])[pieces.row_starts]
    per_row = np.diff(pieces.row_starts)
    fits = (
        len(pieces.lengths) == int(pieces.row_starts[-1])
        and (per_row > 0).all()
        and (pieces.lengths > 0).all()
        and (pieces.starts + pieces.lengths <= num_tokens).all()
        and (np.diff(before_row) <= width).all()
    )
    if not fits:
        raise ShardError(f"{plan.path} does not fit its era: {AGAIN}")
    inside = ends - pieces.lengths - np.repeat(before_row[:-1], per_row)
    return np.repeat(np.arange(pieces.num_rows) * width, per_row) + inside


def _laid_out(
    stream: np.ndarray, pieces: ChunkPieces, padding: np.ndarray, fill: int
) -> np.ndarray:
    """Returns the values of all rows: of each its pieces of the stream, then padding.

    Pieces are binary views of Arrow's, which it joins where it makes plain binary values of them: a
    quarter of the time of as many assignments, half of that of joining slices of bytes.
    """
    rows = np.flatnonzero(padding)
    row_ends = pieces.row_starts[rows + 1]
    places = np.insert(pieces.starts, row_ends, 0)
    lengths = np.insert(pieces.lengths, row_ends, padding[rows])
    is_padding = np.insert(np.zeros(len(pieces.starts), dtype=bool), row_ends, True)
    filling = np.full(max(1, padding.max(initial=0)), fill, stream.dtype)
    views = np.empty(len(places), dtype=_BINARY_VIEW)
    views["length"], views["offset"] = lengths * stream.itemsize, places * stream.itemsize
    views["prefix"], views["buffer"] = 0, is_padding
    _write_short(views, (stream.view(np.uint8), filling.view(np.uint8)))
    buffers = [pa.py_buffer(array) for array in (views, stream, filling)]
    array = pa.Array.from_buffers(pa.binary_view(), len(views), [None, *buffers])
    return np.frombuffer(array.cast(pa.binary()).buffers()[2], dtype=stream.dtype)


def _write_short(views: np.ndarray, buffers: tuple[np.ndarray, np.ndarray]) -> None:
    """Writes values of up to 12 bytes into their views, where the format wants them."""
    inline = views.view(np.uint8).reshape(-1, _BINARY_VIEW.itemsize)[:, 4:]
    short = np.flatnonzero(views["length"] <= inline.shape[1])
    numbers = views["buffer"][short]  # before values are written over them
    for number, buffer in enumerate(buffers):
        mine = short[numbers == number]
        places = views["offset"][mine][:, None] + np.arange(inline.shape[1])
        inside = np.arange(inline.shape[1]) < views["length"][mine][:, None]
        inline[mine] = np.where(inside, buffer[places.clip(max=len(buffer) - 1)], 0)


def _tails(padding: np.ndarray, width: int) -> list[tuple[int, int]]:
    """Returns where padding begins and ends in the rows that are not full."""
    rows = np.flatnonzero(padding)
    ends = (rows + 1) * width
    return list(zip((ends - padding[rows]).tolist(), ends.tolist(), strict=True))


def _piece_numbers(pieces: ChunkPieces, padding: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the number in its row of the piece that each place belongs to; −1: padding."""
    per_row = np.diff(pieces.row_starts)
    inside = np.arange(len(pieces.lengths)) - np.repeat(pieces.row_starts[:-1], per_row)
    ends = pieces.row_starts[1:]
    numbers = np.insert(inside, ends, -1).astype(dtype)
    return np.repeat(numbers, np.insert(pieces.lengths, ends, padding))


def _continued(pieces: ChunkPieces, seq_len: int) -> np.ndarray:
    """Returns which pieces go on with a document: their first token was a target already.

    Only a document longer than a row is cut, so the piece before fills a row and ends with the
    token with which this one begins.
    """
    full = np.sort(pieces.starts[pieces.lengths == seq_len + 1]) + seq_len
    if not len(full):
        return np.zeros(len(pieces.starts), dtype=bool)
    nearest = np.searchsorted(full, pieces.starts).clip(max=len(full) - 1)
    return full[nearest] == pieces.starts


def _damaged_rows(pieces: ChunkPieces, stream: _Span) -> np.ndarray | None:
    damaged = np.zeros(pieces.num_rows, dtype=bool)
    row_of = np.repeat(np.arange(pieces.num_rows), np.diff(pieces.row_starts))
    for begin, end in stream.lost:
        lost = (pieces.starts < end) & (pieces.starts + pieces.lengths > begin)
        damaged[row_of[lost]] = True
    return damaged if damaged.any() else None
