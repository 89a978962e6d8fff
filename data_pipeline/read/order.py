"""The order of rows, a pure function of the seed and the number of consumed samples.

Legend: S tokens predicted per row, g global sample number, i number of a row within its source.

    g -> (source, i)             the mixture (mixture.py) deals rows by weight
    i -> (epoch, segment, j)     segments follow each other; after the last, another epoch begins
    j -> row                     a shuffle inside the segment, keyed by (seed, source, epoch, segment)

A sealed segment never changes, so the order within it does not depend on segments still being made. A
run may therefore start on the first segment and sees the same rows as after a full preparation. Epoch
0 takes the segments in the order of their making, later epochs in a keyed order.

The shuffle inside a segment has two levels, so that a reader that keeps some tens of record batches
decodes each batch about once per epoch:

1. permute the segment's chunks, each of which holds the rows of a few consecutive record batches;
2. group consecutive chunks into windows, and permute the rows of each window.

Finding any (epoch, segment, j) permutes its segment's chunks and its window's rows: 1 ms for a window
of 32,768 rows. The latest windows are cached, so a run pays some 50 ns per row.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .mixture import SourceMixture, derive_key, permutation

ORDER_VERSION = 2
"""Raise it when the same (seed, g) would give another row; older runs then cannot be resumed."""

_KEPT_WINDOWS = 2


@dataclass(frozen=True)
class ChunkTable:
    """Divides the rows of a segment into chunks, and chunks into windows."""

    row_starts: np.ndarray  # int64 [chunks + 1]: chunk c begins with row row_starts[c]
    chunks_per_window: int

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of the segment."""
        return int(self.row_starts[-1])

    def chunks_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the chunk that each row lies in."""
        return np.searchsorted(self.row_starts, rows, side="right") - 1


class SegmentOrder:
    """Shuffles the rows of one segment for one epoch, which `key` names."""

    def __init__(self, chunks: ChunkTable, key: int):
        self._chunks, self._key = chunks, key
        num_chunks = len(chunks.row_starts) - 1
        self.chunk_order = permutation(num_chunks, derive_key(key, "chunks"))
        """int64: the chunks in reading order."""
        rows_in_order = np.diff(chunks.row_starts)[self.chunk_order]
        row_ends = np.concatenate([[0], np.cumsum(rows_in_order)])
        firsts = np.arange(0, num_chunks, chunks.chunks_per_window)
        self.window_starts = row_ends[np.append(firsts, num_chunks)]
        """int64 [windows + 1]: the first position of each window."""
        self._windows: dict[int, np.ndarray] = {}  # the latest

    def windows_of(self, positions: np.ndarray) -> np.ndarray:
        """Returns the window that each position lies in."""
        return np.searchsorted(self.window_starts, positions, side="right") - 1

    def chunks_of_window(self, window: int) -> np.ndarray:
        """Returns the chunks of a window, in reading order."""
        first = window * self._chunks.chunks_per_window
        return self.chunk_order[first : first + self._chunks.chunks_per_window]

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows at positions j of the segment: int64, 0 <= j < number of rows."""
        rows = np.empty(len(positions), dtype=np.int64)
        windows = self.windows_of(positions)
        for window in np.unique(windows):
            of_window = windows == window
            inside = positions[of_window] - self.window_starts[window]
            rows[of_window] = self._rows_of_window(int(window))[inside]
        return rows

    def _rows_of_window(self, window: int) -> np.ndarray:
        """Returns the permuted rows of a window; caches the latest windows."""
        rows = self._windows.pop(window, None)
        if rows is None:
            rows = self._permuted_window(window)
        self._windows[window] = rows
        while len(self._windows) > _KEPT_WINDOWS:
            del self._windows[next(iter(self._windows))]
        return rows

    def _permuted_window(self, window: int) -> np.ndarray:
        starts = self._chunks.row_starts
        chunks = self.chunks_of_window(window)
        spans = zip(starts[chunks].tolist(), starts[chunks + 1].tolist(), strict=True)
        small = int(starts[-1]) < 2**31  # int32 halves the largest part of the memory
        dtype = np.int32 if small else np.int64
        rows = np.concatenate([np.arange(first, end, dtype=dtype) for first, end in spans])
        return rows[permutation(len(rows), derive_key(self._key, "rows", window))]


class EndOfSourceError(Exception):
    """Says that a source has no row `index`: it has `num_known`, and more may come if `growing`."""

    def __init__(self, source: str, index: int, num_known: int, growing: bool):
        super().__init__(source, index, num_known, growing)
        self.source, self.index, self.num_known, self.growing = source, index, num_known, growing


@dataclass(frozen=True)
class SourceRows:
    """Counts the rows of a source's sealed segments."""

    segment_rows: tuple[int, ...]
    complete: bool  # whether no more segments will come
    max_epochs: int = 0  # 0: no limit


@dataclass(frozen=True)
class RowRefs:
    """Names n rows: int64 arrays [n]."""

    sources: np.ndarray
    epochs: np.ndarray
    segments: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class SampleOrder:
    """Maps the global sample numbers of a run to rows.

    Args:
        mixture: deals rows to sources.
        sources: the row counts of the mixture's sources, by name.
        chunks_of: (source, segment) to the segment's chunks; called only for segments that are reached.
        seed: the seed of every shuffle.
    """

    def __init__(
        self,
        mixture: SourceMixture,
        sources: Mapping[str, SourceRows],
        chunks_of: Callable[[str, int], ChunkTable],
        *,
        seed: int,
    ):
        self.mixture = mixture
        self._chunks_of, self._seed = chunks_of, seed
        self._sources = {name: _CountedSource(name, sources[name], seed) for name in mixture.names}
        self.segment_order = functools.lru_cache(maxsize=2 * len(mixture.names) + 2)(
            self._segment_order
        )
        """(source number, epoch, segment) to SegmentOrder; caches the latest."""

    def extend(self, sources: Mapping[str, SourceRows]) -> None:
        """Adds segments sealed since; the order of earlier ones does not change."""
        for name, rows in sources.items():
            self._sources[name] = _CountedSource(name, rows, self._seed)

    def check(self, start: int, count: int) -> None:
        """Checks that the samples start, …, start + count − 1 exist.

        Raises:
            EndOfSourceError: a source has too few rows, for now or for good.
        """
        numbers, indices = self.mixture.rows_at(start, count)
        for number in np.unique(numbers).tolist():
            last = int(indices[numbers == number].max())
            self._sources[self.mixture.names[number]].check(last)

    def refs_at(self, start: int, count: int) -> RowRefs:
        """Returns the rows of the global samples start, …, start + count − 1.

        Raises:
            EndOfSourceError: a source has too few rows, for now or for good.
        """
        numbers, indices = self.mixture.rows_at(start, count)
        epochs, segments, positions, rows = np.zeros((4, count), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            source = self._sources[self.mixture.names[number]]
            epochs[here], segments[here], positions[here] = source.locate(indices[here])
            for epoch, segment, places in group_pairs(epochs[here], segments[here]):
                mine = here[places]
                rows[mine] = self.segment_order(number, epoch, segment).rows_at(positions[mine])
        return RowRefs(numbers, epochs, segments, rows)

    def _segment_order(self, number: int, epoch: int, segment: int) -> SegmentOrder:
        name = self.mixture.names[number]
        return SegmentOrder(
            self._chunks_of(name, segment), derive_key(self._seed, "era", name, epoch, segment)
        )


class _CountedSource:
    """Finds a source's rows by their number i, over its segments and epochs."""

    def __init__(self, name: str, rows: SourceRows, seed: int):
        self._name, self._rows, self._seed = name, rows, seed
        self._ends = np.cumsum(np.array(rows.segment_rows, dtype=np.int64))
        self._num_rows = int(self._ends[-1]) if len(self._ends) else 0
        self._later_epoch = functools.lru_cache(maxsize=4)(self._order_of_segments)

    def check(self, index: int) -> None:
        """Raises EndOfSourceError if there is no row `index`."""
        if index < self._num_rows:
            return
        known = self._num_rows
        if self._rows.complete:
            if self._num_rows and not self._rows.max_epochs:
                return
            known *= self._rows.max_epochs
            if index < known:
                return
        raise EndOfSourceError(self._name, index, known, growing=not self._rows.complete)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (epochs, segments, positions in them) of ascending row numbers i."""
        self.check(int(indices[-1]))
        epochs, inside = np.divmod(indices, self._num_rows)
        segments, positions = np.empty_like(indices), np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            order, ends = self._segments_in_order(epoch)
            places = np.searchsorted(ends, inside[mine], side="right")
            segments[mine] = order[places]
            starts = np.concatenate([[0], ends[:-1]])
            positions[mine] = inside[mine] - starts[places]
        return epochs, segments, positions

    def _segments_in_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the segments in an epoch's order, and the exclusive ends of their rows."""
        if epoch == 0:
            return np.arange(len(self._ends)), self._ends
        return self._later_epoch(epoch)

    def _order_of_segments(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        # "eras" and "era" are part of the keys: other words would give another order
        order = permutation(len(self._ends), derive_key(self._seed, "eras", self._name, epoch))
        return order, np.cumsum(np.diff(self._ends, prepend=0)[order])


def group_pairs(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields each distinct pair of values (int64, below 2**31) and its places.

    Pairs come in order of appearance, so that a reader finishes one segment before the next.
    """
    if not len(first):
        return
    if (first == first[0]).all() and (second == second[0]).all():  # the usual case
        yield int(first[0]), int(second[0]), np.arange(len(first))
        return
    pairs = (first << 32) | second
    found, firsts = np.unique(pairs, return_index=True)
    for pair in found[np.argsort(firsts)].tolist():
        yield pair >> 32, pair & 0xFFFFFFFF, np.flatnonzero(pairs == pair)


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Returns how many rows of S+1 tokens, S apart, fit into a stream; up to S tokens are left over."""
    return max(0, (num_tokens - 1) // seq_len)
