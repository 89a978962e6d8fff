"""Deals rows to sources in exact proportions, as a pure function of the global sample number.

Weights count rows, which are equally long, and so count tokens. They become integers
c_1 + … + c_k = P, the rows of each source in a period of P rows. The integers are exact for weights
with a common denominator up to 2**20, and are otherwise rounded to 2**-20.

Rows are dealt in blocks of L. After every block, each source has had floor or ceil of its exact share.
Inside a block the sources come in a keyed random order, so that no place in a batch, and no rank,
belongs to one source. L is 256 or a little more, a multiple or a divisor of P. The counts therefore
repeat after P/L blocks, and a table of at most 4,096 lines finds any sample's source in constant time.

Remainders are dealt by deadline. A source's row may first come in the block at whose end ceil of the
share allows it, and must come by the block at whose end floor requires it. Earliest deadline first
finds a schedule if one exists, and the weights prove that one does (Tijdeman's chairman assignment, in
steps of a block).

A later stage with other weights starts at the end of a block of the previous stage.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..errors import DataError

SMALLEST_BLOCK = 256
_LARGEST_BLOCK = 4096
_LARGEST_PERIOD = 2**20


@dataclass(frozen=True)
class WeightStage:
    """Gives the weights by source from row `start_row` on; omitted sources get no rows."""

    start_row: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class _DealtStage:
    """Deals blocks of `block_rows` rows from global row `start` on.

    Legend: k sources, C blocks after which the counts repeat.
    """

    start: int
    dealt_before_k: np.ndarray  # int64: rows of each source in earlier stages
    block_rows: int
    dealt_Ck: np.ndarray  # int64 [C + 1, k]: rows of each source before each block of a cycle

    def dealt(self, blocks: np.ndarray) -> np.ndarray:
        """Returns each source's rows before these blocks, over all stages: int64 [n, k]."""
        cycles, inside = np.divmod(blocks, len(self.dealt_Ck) - 1)
        return self.dealt_before_k + cycles[:, None] * self.dealt_Ck[-1] + self.dealt_Ck[inside]


class SourceMixture:
    """Deals the rows of a run to its sources, in stages of constant weights.

    Args:
        names: the sources; results are indices into it.
        stages: at least one, ascending, the first from row 0 on.
        seed: the seed of the order inside blocks.

    Raises:
        DataError: two stages begin in the same row.
    """

    def __init__(self, names: Sequence[str], stages: Sequence[WeightStage], *, seed: int):
        starts = [stage.start_row for stage in stages]
        if starts != sorted({*starts}):
            raise DataError(
                f"the stages of a mixture start at rows {starts}: each must start later than the "
                "one before"
            )
        self.names = tuple(names)
        self._seed = seed
        self._stages: list[_DealtStage] = []
        for wanted in stages:
            weights = [Fraction(str(wanted.weights.get(name, 0.0))) for name in self.names]
            self._stages.append(self._stage(wanted.start_row, weights))

    @property
    def starts(self) -> tuple[int, ...]:
        """Returns the row at which each stage starts, rounded up to the end of a block."""
        return tuple(stage.start for stage in self._stages)

    def block_at(self, row: int) -> tuple[int, int]:
        """Returns the first row and the length of a global row's block."""
        stage = self._stages[self._stage_of(row)]
        return row - (row - stage.start) % stage.block_rows, stage.block_rows

    def rows_at(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sources, indices), int64 [count], of the global rows start, start + 1, ...

        `indices` count each source's rows from 0, in ascending order.
        """
        if len(self.names) == 1:
            return np.zeros(count, np.int64), np.arange(start, start + count, dtype=np.int64)
        parts = []
        row, end = start, start + count
        while row < end:
            stage = self._stage_of(row)
            until = min(end, self._end_of(stage))
            parts.append(self._rows_of_stage(stage, row, until))
            row = until
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        sources, indices = zip(*parts, strict=True)
        return np.concatenate(sources), np.concatenate(indices)

    def rows_before(self, row: int) -> np.ndarray:
        """Returns each source's share of the rows before a global row: int64 [k]."""
        stage = self._stages[self._stage_of(row)]
        first, _ = self.block_at(row)
        dealt_k = stage.dealt(np.array([(first - stage.start) // stage.block_rows]))[0]
        sources, _ = self.rows_at(first, row - first)
        return dealt_k + np.bincount(sources, minlength=len(self.names))

    def _stage(self, start_row: int, weights: Sequence[Fraction]) -> _DealtStage:
        counts = _integer_counts(weights)
        block_rows = _block_rows(sum(counts))
        dealt = _deal_cycle(tuple(counts), block_rows)
        if not self._stages:
            return _DealtStage(0, np.zeros(len(weights), np.int64), block_rows, dealt)
        last = self._stages[-1]
        blocks = max(0, -(-(start_row - last.start) // last.block_rows))
        start = last.start + blocks * last.block_rows
        return _DealtStage(start, last.dealt(np.array([blocks]))[0], block_rows, dealt)

    def _stage_of(self, row: int) -> int:
        number = 0
        while number + 1 < len(self._stages) and row >= self._stages[number + 1].start:
            number += 1
        return number

    def _end_of(self, stage: int) -> int:
        """Returns the row at which the next stage starts; the last stage ends beyond all rows."""
        return self._stages[stage + 1].start if stage + 1 < len(self._stages) else 2**62

    def _rows_of_stage(self, number: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sources, indices) of rows within one stage."""
        stage = self._stages[number]
        length = stage.block_rows
        first_block, last_block = (start - stage.start) // length, (end - 1 - stage.start) // length
        blocks = np.arange(first_block, last_block + 1)
        dealt_nk = stage.dealt(np.arange(first_block, last_block + 2))
        counts_nk = np.diff(dealt_nk, axis=0)
        num_sources = len(self.names)
        sorted_nL = np.repeat(np.tile(np.arange(num_sources), len(blocks)), counts_nk.reshape(-1))
        order_nL = permutations(blocks, length, derive_key(self._seed, "mixture", number))
        sources_nL = np.take_along_axis(sorted_nL.reshape(-1, length), order_nL, axis=1)
        indices_nL = _numbered(sources_nL, dealt_nk[:-1], counts_nk)
        skip = start - stage.start - first_block * length
        cut = slice(skip, skip + end - start)
        return sources_nL.reshape(-1)[cut], indices_nL.reshape(-1)[cut]


def _numbered(sources_nL: np.ndarray, first_nk: np.ndarray, counts_nk: np.ndarray) -> np.ndarray:
    """Numbers each source's rows in order of appearance, from first_nk on: int64 [n, L]."""
    num_blocks, length = sources_nL.shape
    by_source_nL = np.argsort(sources_nL, axis=1, kind="stable")
    starts_nk = np.cumsum(counts_nk, axis=1) - counts_nk
    places_nL = np.arange(length) + np.repeat(
        (first_nk - starts_nk).reshape(-1), counts_nk.reshape(-1)
    ).reshape(num_blocks, length)
    indices_nL = np.empty_like(places_nL)
    np.put_along_axis(indices_nL, by_source_nL, places_nL, axis=1)
    return indices_nL


def _integer_counts(weights: Sequence[Fraction]) -> list[int]:
    """Returns the rows of each source in one period."""
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LARGEST_PERIOD and _block_rows(period) <= _LARGEST_BLOCK:
        return [int(share * period) for share in shares]
    exact = [share * _LARGEST_PERIOD for share in shares]
    counts = [max(math.floor(rows), 1 if rows else 0) for rows in exact]
    missing = _LARGEST_PERIOD - sum(counts)
    by_remainder = sorted(range(len(counts)), key=lambda s: (counts[s] - exact[s], s))
    for source in by_remainder[: max(0, missing)]:
        counts[source] += 1
    # tiny sources, rounded up to one row per period, take it from the largest
    counts[max(range(len(counts)), key=lambda s: counts[s])] += min(0, missing)
    return counts


def _block_rows(period: int) -> int:
    """Returns L: the smallest multiple, or the smallest divisor, of the period that is >= 256."""
    if period < SMALLEST_BLOCK:
        return period * -(-SMALLEST_BLOCK // period)
    small = [d for d in range(1, math.isqrt(period) + 1) if period % d == 0]
    divisors = small + [period // d for d in small]
    return min(d for d in divisors if d >= SMALLEST_BLOCK)


@functools.lru_cache(maxsize=64)
def _deal_cycle(counts: tuple[int, ...], block_rows: int) -> np.ndarray:
    """Returns each source's rows before each block, until the counts repeat: int64 [C + 1, k]."""
    period = max(sum(counts), block_rows)
    counts_k = np.array(counts, dtype=np.int64) * (period // sum(counts))
    ends = np.arange(period // block_rows + 1, dtype=np.int64) * block_rows
    floor_Ck, remainder_Ck = np.divmod(ends[:, None] * counts_k, period)
    ceil_Ck = floor_Ck + (remainder_Ck > 0)
    dealt_Ck = np.zeros_like(floor_Ck)
    for block in range(1, len(ends)):
        due_k = np.maximum(dealt_Ck[block - 1], floor_Ck[block])
        remaining = block * block_rows - int(due_k.sum())
        if remaining:
            open_k = np.flatnonzero(ceil_Ck[block] > due_k)
            # by deadline: the block at whose end floor of the share requires one more row
            deadlines = -(-(due_k[open_k] + 1) * period // counts_k[open_k])
            urgent = np.argsort(-(-deadlines // block_rows), kind="stable")
            due_k[open_k[urgent[:remaining]]] += 1
        dealt_Ck[block] = due_k
    dealt_Ck.flags.writeable = False
    return dealt_Ck


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step: 2**64 over the golden ratio


def derive_key(*parts: object) -> int:
    """Derives a 64-bit key from names and numbers."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def mixed(values: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finalizer to uint64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permutation(size: int, key: int) -> np.ndarray:
    """Returns the permutation of [0, size) that `key` selects: int64 [size]."""
    return permutations(np.zeros(1, dtype=np.int64), size, key)[0]


def permutations(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns one permutation of [0, size) per number, keyed by `key`: int64 [len(numbers), size]."""
    inside = np.arange(size, dtype=np.uint64)
    counters = numbers.astype(np.uint64)[:, None] * np.uint64(size) + inside
    words = mixed(counters * _GOLDEN + np.uint64(key))
    index_bits = np.uint64(max(1, (size - 1).bit_length()))
    words = (words >> index_bits << index_bits) | inside
    words.sort(axis=1)
    return (words & ((np.uint64(1) << index_bits) - np.uint64(1))).astype(np.int64)
