"""One decoded chunk of a segment: its tokens, and the pieces of them that form rows.

With "concat", a row is one piece, which shares its border token with the next row; a chunk's last row
may end in the next chunk, whose first batch is then decoded too, one in nine. With "best_fit", a row is
several pieces and padding.

Cost: joining a row takes some 6 µs, decoding a token 3 ns.

Legend: S tokens predicted per row.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import ShardError
from .corruption import BatchFetcher
from .packing import AGAIN, ChunkPieces, SegmentPlan, fit_chunk
from .token_store import TokenStore

PADDING = -1
"""The document id of padding."""


@dataclass(frozen=True)
class TokenRows:
    """Holds n rows of S+1 tokens."""

    tokens: np.ndarray  # int64 [n, S+1]
    learned: np.ndarray | None  # bool [n, S+1]: whether the token counts as a target; None: all do
    document_ids: np.ndarray | None  # int32 [n, S+1], −1: padding; None: not requested

    @property
    def loss_mask(self) -> np.ndarray | None:
        """Returns which targets count, bool [n, S]; None: all do."""
        return None if self.learned is None else self.learned[:, 1:]


@dataclass(frozen=True)
class LoadedChunk:
    """Holds the T tokens of a chunk, and the pieces of them that form its rows."""

    pieces: ChunkPieces
    repeated: set[int]  # tokens that end one piece and begin the next
    tokens: np.ndarray  # uint16 or uint32 [T]
    learned: np.ndarray | None  # bool [T]; None: all are
    documents: np.ndarray | None  # int32 [T]: the document's number; None: each piece is one

    def copy_row(self, row: int, rows: TokenRows, place: int) -> None:
        """Copies a row's pieces, one after the other, into a row of padding."""
        filled = 0
        for number, (start, length) in enumerate(self.pieces.of_row(row)):
            here, there = slice(filled, filled + length), slice(start, start + length)
            rows.tokens[place, here] = self.tokens[there]
            if rows.learned is not None:  # a repeated token was a target before
                rows.learned[place, here] = True if self.learned is None else self.learned[there]
                rows.learned[place, filled] &= start not in self.repeated
            if rows.document_ids is not None:
                documents = self.documents
                rows.document_ids[place, here] = (
                    number if documents is None else documents[there] - documents[start]
                )
            filled += length


@dataclass(frozen=True)
class ChunkReader:
    """Decodes the chunks of a segment, following its plan."""

    store: TokenStore
    fetch: BatchFetcher  # reads the record batches
    plan: SegmentPlan
    seq_len: int  # S
    is_fitted: bool  # whether rows hold whole documents ("best_fit") or are cut from the stream
    document_ids: bool  # whether rows have them

    def read(self, chunk: int) -> LoadedChunk:
        """Returns the rows of a chunk.

        Raises:
            ShardError: a record batch is damaged, or the plan is of other documents.
        """
        first, end = self.plan.chunk_batches[chunk : chunk + 2].tolist()
        first_row, end_row = self.plan.chunks.row_starts[chunk : chunk + 2].tolist()
        starts = self.store.batch_starts
        if not self.is_fitted:
            end = max(end, int(np.searchsorted(starts, end_row * self.seq_len + 1)))
        batches = [self.fetch(self.store, batch) for batch in range(first, end)]
        tokens = np.concatenate([one.tokens for one in batches])
        masks = [one.loss_mask for one in batches if one.loss_mask is not None]
        learned = np.concatenate(masks) if masks else None
        lengths = np.concatenate([np.diff(one.document_ends, prepend=0) for one in batches])
        if self.is_fitted:
            pieces = fit_chunk(np.cumsum(lengths), self.seq_len)
            if pieces.num_rows != end_row - first_row:
                place = f"segment {self.store.segment} of source {self.store.source.name!r}"
                raise ShardError(f"the plan of rows of {place} does not fit it: {AGAIN}")
            return LoadedChunk(pieces, _repeated(pieces, self.seq_len), tokens, learned, None)
        begin, count = first_row * self.seq_len - int(starts[first]), end_row - first_row
        row_begins = begin + np.arange(count) * self.seq_len
        pieces = ChunkPieces(row_begins, np.full(count, self.seq_len + 1), np.arange(count + 1))
        documents = None
        if self.document_ids:
            documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return LoadedChunk(pieces, set(), tokens, learned, documents)


def _repeated(pieces: ChunkPieces, seq_len: int) -> set[int]:
    """Returns the tokens that end one piece and begin the next, as documents longer than a row have."""
    full = pieces.starts[pieces.lengths == seq_len + 1]
    return set((full + seq_len).tolist())
