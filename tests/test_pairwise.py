"""The chosen combinations cover every pair, and are few."""

from itertools import combinations, product

import pytest
from pairwise import every_pair, parametrize_pairs


@pytest.mark.parametrize("sizes", [(3,), (4, 5), (10, 5, 2, 5), (2, 2, 2)], ids=str)
def test_any_two_values_meet_in_few_combinations(sizes: tuple[int, ...]) -> None:
    factors = [[f"{factor}{place}" for place in range(size)] for factor, size in enumerate(sizes)]
    chosen = every_pair(*factors)
    met = {pair for combination in chosen for pair in combinations(combination, 2)}
    for one, other in combinations(factors, 2):
        assert set(product(one, other)) <= met
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * largest[0] * largest[-1]


def test_every_combination_is_a_test_and_those_that_are_not_needed_are_slow() -> None:
    mark = parametrize_pairs({"x": [1, 2], ("y", "z"): [(3, 4), (5, 6)], "w": [7, 8]}).mark
    names, params = mark.args
    assert names == ["x", "y", "z", "w"]
    assert params[1].values == (1, 3, 4, 8)
    assert (len(params), sum(not param.marks for param in params)) == (8, 4)
