"""Spread, paired differences and verdicts, against numbers computed by hand."""

import math

import pytest

from moebius_science.compare.statistics import (
    interval,
    paired_differences,
    shared_points,
    spread,
    verdict,
)


def test_differences_are_paired_by_seed_and_their_spread_is_that_of_a_sample():
    ours, theirs = {0: 2.0, 2: 2.5, 1: 2.2}, {1: 2.1, 0: 1.7, 2: 2.3, 7: 9.0}
    differences = paired_differences(ours, theirs)
    assert list(differences) == [0, 1, 2]
    assert list(differences.values()) == pytest.approx([0.3, 0.1, 0.2])
    found = spread(list(differences.values()))
    # mean 0.2; squares of 0.1, -0.1 and 0 over 2: a variance of 0.01
    assert (found.mean, found.deviation) == pytest.approx((0.2, 0.1))
    assert (found.least, found.most, found.count) == (pytest.approx(0.1), pytest.approx(0.3), 3)


def test_a_single_seed_has_no_deviation_and_a_lost_run_no_mean():
    assert math.isnan(spread([1.5]).deviation)
    assert spread([1.5]).mean == 1.5
    assert math.isnan(spread([1.5, math.nan]).mean)


@pytest.mark.parametrize(
    ("values", "side", "bound", "expected"),
    [
        ([-0.1, -0.2, -0.3, -0.2, -0.1], "below", 0.0, "holds"),
        ([0.1, 0.2, 0.3, 0.2, 0.1], "below", 0.0, "does not hold"),
        ([-0.1, 0.2, 0.3, 0.2, 0.1], "below", 0.0, "undecided"),
        ([-0.001, -0.9, -0.002, -0.003, -0.001], "below", 0.0, "undecided"),  # one seed says it all
        ([-0.2, -0.2, -0.2, -0.2], "below", 0.0, "too few seeds"),
        ([-0.1, -0.2, -0.1, -0.2, math.nan], "below", 0.0, "undecided"),
        ([0.0] * 5, "below", 0.0, "does not hold"),
        ([0.0] * 5, "at most", 0.0, "holds"),
        ([0.0] * 5, "above", 0.0, "does not hold"),
        ([0.2, 0.3, 0.4, 0.3, 0.2], "above", 0.1, "holds"),
    ],
)
def test_the_rule(values: list[float], side: str, bound: float, expected: str):
    assert verdict(values, side, bound) == expected  # pyright: ignore[reportArgumentType]


def test_the_interval_is_student_s_and_grows_with_the_number_of_claims():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]  # mean 3, deviation 1.5811, error of the mean 0.7071
    # t of 4 degrees of freedom: 2.7764 for 95 %, 4.6041 for 99 % (any table)
    assert interval(values) == pytest.approx((3 - 2.7764 * 0.70711, 3 + 2.7764 * 0.70711), abs=1e-4)
    assert interval(values, claims=5) == pytest.approx(
        (3 - 4.6041 * 0.70711, 3 + 4.6041 * 0.70711), abs=1e-4
    )
    assert interval([1.0]) is interval([1.0, math.inf]) is None
    assert verdict(values, "above", 0.5) == "holds"
    assert verdict(values, "above", 0.5, claims=5) == "undecided"


def test_curves_meet_where_all_have_points():
    often, seldom = [(0, 6.0), (1, 5.0), (2, 4.0), (4, 3.0)], [(0, 6.5), (2, 4.5), (4, 3.5)]
    steps, values = shared_points([often, seldom])
    assert steps == [0, 2, 4]
    assert values == [[6.0, 4.0, 3.0], [6.5, 4.5, 3.5]]
    assert shared_points([often]) == ([0, 1, 2, 4], [[6.0, 5.0, 4.0, 3.0]])
