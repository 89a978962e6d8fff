"""Which row comes when: pure functions of (seed, number of samples consumed). No state, no epoch
arrays, no ranks.

Legend: S tokens predicted per row, N rows of the split, R rows of a chunk, g global sample number.

Rows are cut from the split's token stream without regard to documents ("concat"): row n is tokens
S*n up to and including S*(n+1), S+1 of them, so that inputs and targets are the row without its
last and without its first token.

Epoch g // N visits every row once. Its order is a shuffle on two levels, so that a reader which
keeps some tens of record batches decodes each batch about once per epoch:

1. the stream is taken as chunks of R consecutive rows, about one record batch each; the chunks are
   permuted;
2. WINDOW_CHUNKS chunks at a time form a window; the rows of a window are permuted.

Both permutations are Feistel networks with keys from (seed, epoch, level, window): bijections that
are computed for one index alone. Where a domain is no power of four, and for the last, shorter
chunk, an index that falls outside is sent through again until it falls inside ("cycle walking"),
which keeps the whole a bijection. Cost: 1-2 M rows/s.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

WINDOW_CHUNKS = 32
"""Chunks that are mixed with each other: about 4 M tokens, 8 MB of uint16 in a loader's memory."""

ORDER_VERSION = 1
"""Raised when the same (seed, g) would give another row: no run can be resumed across that."""

_ROUNDS = 6


@dataclass(frozen=True)
class RowOrder:
    """Defines the order of a split with `num_rows` rows, in chunks of `rows_per_chunk`."""

    num_rows: int
    rows_per_chunk: int
    seed: int

    def rows_at(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (epochs, rows), int64 [count], of the global samples start, start + 1, ...

        start >= 0, and as large as wanted.
        """
        samples = np.arange(start, start + count, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.num_rows)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            rows[of_epoch] = self._shuffled(positions[of_epoch], int(epoch))
        return epochs, rows

    def _shuffled(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Permutes [0, N).

        It is a permutation of [0, chunks * R), walked until it leaves the missing end of the last
        chunk.
        """
        rows = self._shuffled_full_chunks(positions, epoch)
        while (outside := rows >= self.num_rows).any():
            rows[outside] = self._shuffled_full_chunks(rows[outside], epoch)
        return rows

    def _shuffled_full_chunks(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        rows_per_chunk = min(self.rows_per_chunk, self.num_rows)
        num_chunks = -(-self.num_rows // rows_per_chunk)
        windows, inside = np.divmod(positions, WINDOW_CHUNKS * rows_per_chunk)
        rows = np.empty_like(positions)
        for window in np.unique(windows):
            chunks_before = int(window) * WINDOW_CHUNKS
            size = min(WINDOW_CHUNKS, num_chunks - chunks_before) * rows_per_chunk
            of_window = windows == window
            mixed = permuted(inside[of_window], size, _key(self.seed, epoch, "rows", int(window)))
            slots, offsets = np.divmod(mixed, rows_per_chunk)
            chunks = permuted(chunks_before + slots, num_chunks, _key(self.seed, epoch, "chunks"))
            rows[of_window] = chunks * rows_per_chunk + offsets
        return rows


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Returns how many rows of S+1 tokens, S apart, a stream holds.

    Up to S tokens at its end are not used.
    """
    return max(0, (num_tokens - 1) // seq_len)


def permuted(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Applies a keyed bijection of [0, size) to int64 indices.

    It is a Feistel network with cycle walking.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    result = _feistel(indices.astype(np.uint64), half_bits, key)
    while (outside := result >= np.uint64(size)).any():
        result[outside] = _feistel(result[outside], half_bits, key)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    """Applies a keyed bijection of [0, 4**half_bits)."""
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> half, values & mask
    for round_number in range(_ROUNDS):
        salt = np.uint64((key + round_number * 0x9E3779B97F4A7C15) % 2**64)
        left, right = right, left ^ (_mixed(right ^ salt) & mask)
    return (left << half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finalizer: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _key(*parts: object) -> int:
    """Derives a 64-bit key from the names of what it is for."""
    return int.from_bytes(
        hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big"
    )
