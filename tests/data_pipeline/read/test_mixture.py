"""Mixtures have exact proportions, for any order of queries, as in a simple deal; keyed permutations
equal those of a slow loop over Python's integers.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.read.mixture import (
    SMALLEST_BLOCK,
    SourceMixture,
    WeightStage,
    permutations,
)

NAMES = ("a", "b", "c", "d", "e", "f", "g")


def make(*stages: tuple[int, dict[str, float]], seed: int = 0, names=None) -> SourceMixture:
    names = names or tuple(dict.fromkeys(name for _, weights in stages for name in weights))
    return SourceMixture(names, [WeightStage(row, weights) for row, weights in stages], seed=seed)


def shares(mixture: SourceMixture) -> list[Fraction]:
    """Returns the rounded proportions of the first stage, from a whole cycle."""
    dealt_k = mixture._stages[0].dealt_Ck[-1].tolist()
    return [Fraction(dealt, sum(dealt_k)) for dealt in dealt_k]


WEIGHTS = st.lists(
    st.one_of(
        st.integers(1, 12).map(float),
        st.integers(1, 1000).map(lambda n: n / 1000),
        st.floats(1e-5, 1.0),
    ),
    min_size=1,
    max_size=len(NAMES),
).map(lambda weights: dict(zip(NAMES, weights, strict=False)))


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 99), first_block=st.integers(0, 10**7))
def test_no_source_is_wrong_by_a_row_at_the_end_of_any_block(weights, seed, first_block):
    mixture = make((0, weights), seed=seed)
    row, length = mixture.block_at(first_block * SMALLEST_BLOCK)
    sources, indices = mixture.rows_at(row, 3 * length)
    assert len(sources) == 3 * length
    for source, share in enumerate(map(float, shares(mixture))):
        had = indices[sources == source]
        assert np.array_equal(had, np.arange(len(had)) + (had[0] if len(had) else 0))
        if len(had):
            assert abs(had[0] - row * share) <= 1 + 1e-6
        for block in range(1, 4):
            count = (sources[: block * length] == source).sum()
            assert abs(count - block * length * share) < 2 + 1e-6  # both ends may deviate


@pytest.mark.parametrize(
    ("weights", "expected", "length"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, ("7/10", "1/5", "1/10"), 260),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, ("1/3", "1/3", "1/3"), 258),
        ({"a": 30, "b": 10}, ("3/4", "1/4"), 256),
        ({"a": 0.9999, "b": 0.0001}, ("9999/10000", "1/10000"), 400),
        ({"a": 0.999999, "b": 0.000001}, ("999999/1000000", "1/1000000"), 320),
        ({"a": 1e9, "b": 1e-9}, (f"{2**20 - 1}/{2**20}", f"1/{2**20}"), 256),
        ({"a": 1.0, "b": 0.0}, ("1", "0"), 256),
    ],
)
def test_weights_that_are_decimals_are_exact(weights, expected, length):
    mixture = make((0, weights))
    assert shares(mixture) == list(map(Fraction, expected))
    assert mixture.block_at(10**9)[1] == length


@settings(max_examples=30, deadline=None)
@given(
    weights=WEIGHTS,
    start=st.integers(0, 10**12),
    count=st.integers(0, 900),
    cut=st.floats(0, 1),
)
def test_any_way_of_asking_gives_the_same_rows(weights, start, count, cut):
    mixture = make((0, weights), (5000, {"a": 1.0, "b": 3.0}), names=NAMES)
    whole = np.stack(mixture.rows_at(start, count))
    middle = int(count * cut)
    first = np.stack(mixture.rows_at(start, middle))
    second = np.stack(mixture.rows_at(start + middle, count - middle))
    assert np.array_equal(whole, np.concatenate([first, second], axis=1))


@settings(max_examples=20, deadline=None)
@given(weights=WEIGHTS, second=WEIGHTS, third=WEIGHTS, rows=st.tuples(*[st.integers(1, 4000)] * 2))
def test_stages_begin_where_a_block_ends_and_every_source_goes_on(weights, second, third, rows):
    stages = [(0, weights), (rows[0], second), (rows[0] + rows[1], third)]
    mixture = make(*stages, names=NAMES)
    total = mixture.starts[2] + 5000
    sources, indices = mixture.rows_at(0, total)
    for source in range(len(NAMES)):
        had = indices[sources == source]
        assert np.array_equal(had, np.arange(len(had)))  # each exactly once
    for number, (wanted, weights_now) in enumerate(stages):
        start = mixture.starts[number]
        end = mixture.starts[number + 1] if number < 2 else total
        assert 0 <= start - wanted < 4096 + 4096
        assert {NAMES[s] for s in np.unique(sources[start:end])} <= set(weights_now)


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, second=WEIGHTS, row=st.integers(0, 7000))
def test_rows_before_counts_what_was_dealt(weights, second, row):
    mixture = make((0, weights), (3000, second), names=NAMES)
    counted = np.bincount(mixture.rows_at(0, row)[0], minlength=len(NAMES))
    assert np.array_equal(mixture.rows_before(row), counted)


def test_the_mixture_of_order_version_2_is_this_one():
    """Runs are resumed by it. If this fails on purpose, raise ORDER_VERSION."""
    mixture = make((0, {"a": 0.5, "b": 0.3, "c": 0.2}), (10**6, {"c": 1.0, "a": 2.0}), seed=7)
    assert mixture.starts == (0, 1_000_220)
    sources, indices = mixture.rows_at(1_000_214, 8)
    assert sources.tolist() == [1, 0, 0, 0, 0, 2, 0, 2]
    assert (indices - 200_000).tolist() == [
        *(100_065, 300_106, 300_107, 300_108, 300_109, 43, 300_110, 44)
    ]


def test_stages_that_begin_in_the_same_row_are_refused():
    with pytest.raises(DataError, match=r"rows \[0, 9, 9\]"):
        make((0, {"a": 1.0}), (9, {"a": 1.0}), (9, {"a": 1.0}))


# ---- permutations

KEYS = st.integers(0, 2**64 - 1)


def _permuted_slowly(size: int, key: int, number: int) -> list[int]:
    """Sorts splitmix64's outputs with their low bits replaced by the index."""
    word = 2**64 - 1
    bits = max(1, (size - 1).bit_length())
    words = []
    for index in range(size):
        value = ((number * size + index) * 0x9E3779B97F4A7C15 + key) & word
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        value ^= value >> 31
        words.append((value >> bits << bits) | index)
    return [value % (1 << bits) for value in sorted(words)]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 70), key=KEYS, number=st.integers(0, 2**40))
def test_permutations_equal_the_slow_loop(size, key, number):
    found = permutations(np.array([number]), size, key)
    assert found.tolist() == [_permuted_slowly(size, key, number)]


def test_no_place_of_a_batch_belongs_to_one_source_and_seeds_order_blocks_differently():
    one, two = (make((0, {"a": 0.5, "b": 0.5}), seed=n).rows_at(0, 400 * 16)[0] for n in (1, 2))
    assert np.abs((one.reshape(400, 16) == 0).mean(axis=0) - 0.5).max() < 0.12
    assert 0.4 < (one == two).mean() < 0.6
    assert one[:2560].sum() == two[:2560].sum() == 1280
