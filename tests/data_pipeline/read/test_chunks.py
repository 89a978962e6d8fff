"""Joined rows, compared with a loop over their pieces."""

import numpy as np
import pytest

from moebius.data_pipeline.read.chunks import LoadedChunk, padding_rows
from moebius.data_pipeline.read.packing import ChunkPieces

WIDTH = 24
END = 7


def chunk_of(rng: np.random.Generator, dtype: type, *, learned: bool) -> LoadedChunk:
    """Returns a chunk of random pieces, many of them short, in more or less full rows."""
    rows: list[list[tuple[int, int]]] = []
    for _ in range(20):
        row, left = [], WIDTH
        while left and (not row or rng.random() < 0.8):
            length = int(rng.integers(1, rng.choice([2, 8, left + 1]) + 1).clip(max=left))
            row.append((int(rng.integers(0, 300 - length + 1)), length))
            left -= length
        rows.append(row)
    starts, lengths = np.array([piece for row in rows for piece in row]).T
    pieces = ChunkPieces(starts, lengths, np.cumsum([0, *map(len, rows)]))
    repeated = set(rng.choice(starts, len(starts) // 3).tolist())
    tokens = rng.integers(0, 2**16, 300).astype(dtype)
    return LoadedChunk(pieces, repeated, tokens, rng.random(300) < 0.7 if learned else None, None)


def slowly(chunk: LoadedChunk, row: int) -> tuple[list[int], list[bool], list[int]]:
    """Returns a row's tokens, which of them count, and its document ids."""
    tokens, counts, ids = [], [], []
    for number, piece in enumerate(range(*chunk.pieces.row_starts[row : row + 2].tolist())):
        start = int(chunk.pieces.starts[piece])
        for place in range(start, start + int(chunk.pieces.lengths[piece])):
            tokens.append(int(chunk.tokens[place]))
            is_learned = chunk.learned is None or bool(chunk.learned[place])
            counts.append(is_learned and not (place == start and start in chunk.repeated))
            ids.append(number)
    padding = WIDTH - len(tokens)
    return tokens + [END] * padding, counts + [False] * padding, ids + [-1] * padding


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("learned", [False, True])
def test_rows_are_their_pieces_and_then_padding(dtype, learned):
    chunk = chunk_of(np.random.default_rng(0), dtype, learned=learned)
    found = padding_rows(20, WIDTH - 1, END, loss_mask=True, document_ids=True)
    assert found.loss_mask is not None
    assert found.document_ids is not None
    assert (found.tokens.dtype, found.document_ids.dtype) == (np.int64, np.int32)
    for row in range(20):
        chunk.copy_row(row, found, 19 - row)
        tokens, counts, ids = slowly(chunk, row)
        assert found.tokens[19 - row].tolist() == tokens
        assert found.loss_mask[19 - row].tolist() == counts[1:]
        assert found.document_ids[19 - row].tolist() == ids
