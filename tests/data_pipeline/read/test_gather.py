"""Joined rows, compared with a loop over their pieces."""

import numpy as np
import pytest

from moebius.data_pipeline.read.chunks import LoadedChunk
from moebius.data_pipeline.read.gather import JoinedChunks
from moebius.data_pipeline.read.packing import ChunkPieces

WIDTH = 24
END = 7


def chunk_of(rng: np.random.Generator, dtype: type, *, learned: bool) -> LoadedChunk:
    """Returns a chunk of random pieces, many of them short, in more or less full rows."""
    tokens = rng.integers(0, 2**16, 300).astype(dtype)
    rows: list[list[tuple[int, int]]] = []
    for _ in range(20):
        row, left = [], WIDTH
        while left and (not row or rng.random() < 0.8):
            length = int(rng.integers(1, rng.choice([2, 8, left + 1]) + 1).clip(max=left))
            row.append((int(rng.integers(0, 300 - length + 1)), length))
            left -= length
        rows.append(row)
    starts, lengths = np.array([piece for row in rows for piece in row]).T
    return LoadedChunk(
        pieces=ChunkPieces(starts, lengths, np.cumsum([0, *map(len, rows)])),
        flat_tokens=tokens,
        flat_counts=rng.random(300) < 0.7 if learned else None,
        flat_documents=None,
        continued=rng.random(len(starts)) < 0.3,
    )


def slowly(chunk: LoadedChunk, row: int) -> tuple[list[int], list[bool], list[int]]:
    """Returns a row's tokens, which of them count, and its document ids."""
    tokens, counts, ids = [], [], []
    for number, piece in enumerate(range(*chunk.pieces.row_starts[row : row + 2])):
        begin = int(chunk.pieces.starts[piece])
        here = slice(begin, begin + int(chunk.pieces.lengths[piece]))
        tokens += chunk.flat_tokens[here].tolist()
        learned = np.ones(300, bool) if chunk.flat_counts is None else chunk.flat_counts
        learned = learned[here].copy()
        assert chunk.continued is not None
        learned[0] &= not chunk.continued[piece]
        counts += learned.tolist()
        ids += [number] * len(learned)
    padding = WIDTH - len(tokens)
    return tokens + [END] * padding, counts + [False] * padding, ids + [-1] * padding


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("learned", [False, True])
def test_rows_are_their_pieces_and_then_padding(dtype, learned):
    rng = np.random.default_rng(0)
    chunks = {number: chunk_of(rng, dtype, learned=learned) for number in (4, 0, 5)}
    joined = JoinedChunks(chunks, num_chunks=9, width=WIDTH, end_id=END)
    assert joined.has(np.array([5, 0, 4, 0]))
    assert not joined.has(np.array([5, 1]))
    numbers, rows = rng.choice([0, 4, 5], 50), rng.integers(0, 20, 50)
    found = joined.read(numbers, rows, loss_mask=True, document_ids=True)
    assert found.loss_mask is not None
    assert found.document_ids is not None
    assert (found.tokens.dtype, found.document_ids.dtype) == (np.int64, np.int32)
    for place, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
        tokens, counts, ids = slowly(chunks[number], row)
        assert found.tokens[place].tolist() == tokens
        assert found.loss_mask[place].tolist() == counts[1:]
        assert found.document_ids[place].tolist() == ids


def test_pieces_that_cannot_be_rows_are_told_from_those_that_can():
    def fit(starts: list[int], lengths: list[int], row_starts: list[int]) -> bool:
        pieces = ChunkPieces(np.array(starts), np.array(lengths), np.array(row_starts))
        return pieces.fit(num_tokens=10, width=5)

    assert fit([0, 3, 5], [3, 2, 5], [0, 2, 3])
    assert not fit([0, 3, 6], [3, 2, 5], [0, 2, 3])  # beyond the last token
    assert not fit([-1, 3, 5], [3, 2, 5], [0, 2, 3])
    assert not fit([2**63 - 1, 3, 5], [3, 2, 5], [0, 2, 3])  # the end would be below 0
    assert not fit([0, 3, 5], [3, 3, 5], [0, 2, 3])  # a row of six
    assert not fit([0, 3, 5], [3, 0, 5], [0, 2, 3])
    assert not fit([0, 3, 5], [3, 2, 5], [0, 3, 3])  # a row without pieces
    assert not fit([0, 3, 5], [3, 2, 5], [0, 2, 4])
    assert not fit([0, 3, 5], [3, 2, 5], [1, 2, 3])
    assert not fit([0, 3], [3, 2, 5], [0, 2, 3])
