"""Keyed permutations are bijections, and the same ones as a slow loop over Python's integers makes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.read.mixture import derive_key, permutation, permutations

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), key=KEYS)
def test_permutation_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def _permuted_slowly(size: int, key: int, number: int) -> list[int]:
    """Splitmix64's outputs with their low bits replaced by the index, sorted."""
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


def test_keys_and_numbers_give_unrelated_permutations():
    every = [*permutations(np.arange(4), 500, 7), permutation(500, 8), np.arange(500)]
    for i, one in enumerate(every):
        for other in every[:i]:
            assert (one == other).mean() < 0.05
    assert np.array_equal(permutations(np.arange(4), 500, 7)[0], permutation(500, 7))


def test_every_place_goes_everywhere_about_equally_often():
    counts = np.zeros((5, 5))
    for found in permutations(np.arange(20_000), 5, 3):
        counts[np.arange(5), found] += 1
    assert np.abs(counts / 4000 - 1).max() < 0.07


def test_a_key_depends_on_every_part_and_their_order():
    keys = {derive_key(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", "2", ""), (1, 2, 0)]}
    assert len(keys) == 5
