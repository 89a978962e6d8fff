"""Computes spread over seeds, differences paired by seed, and verdicts on claims.

Arms of one seed have the same data in the same order, so the difference of their losses is paired:
the seed's effect on both cancels. The mean of one number per seed has a confidence interval by
Student's t. If several claims are judged together, each interval is widened so that all cover their
means with 95 % (Bonferroni's correction).

The rule: a claim *holds* if its whole interval is on the claimed side of the bound, *does not hold*
if all of it is on the other side, and is *undecided* otherwise, or if a number does not exist.
Fewer than five seeds give figures but no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["holds", "does not hold", "undecided", "too few seeds"]
Side = Literal["at most", "above", "below"]
FEWEST_SEEDS = 5
CONFIDENCE = 0.95


def is_met(value: float, side: Side, bound: float) -> bool:
    """Tells whether a number is on the claimed side of a bound."""
    if side == "at most":
        return value <= bound
    return value > bound if side == "above" else value < bound


def interval(values: Sequence[float], *, claims: int = 1) -> tuple[float, float] | None:
    """Returns the two-sided confidence interval of the mean of one number per seed.

    Args:
        values: one number per seed.
        claims: number of means judged together, including this one.

    Returns:
        Its two ends; None for fewer than two numbers, or if one is not finite.
    """
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import

    freedom = len(values) - 1
    quantile = float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / claims / 2))
    reach = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - reach, fmean(values) + reach


def verdict(values: Sequence[float], side: Side, bound: float, *, claims: int = 1) -> Verdict:
    """Returns the verdict on a claim from one number per seed, by this module's rule.

    Args:
        values: one number per seed.
        side: of the bound on which the mean is claimed to be.
        bound: in the unit of the values.
        claims: number of claims judged together, including this one.
    """
    if len(values) < FEWEST_SEEDS:
        return "too few seeds"
    ends = interval(values, claims=claims)
    if ends is None:
        return "undecided"
    met = [is_met(end, side, bound) for end in ends]
    return "holds" if all(met) else "undecided" if any(met) else "does not hold"


@dataclass(frozen=True)
class Spread:
    """Summarizes one number per seed."""

    mean: float
    deviation: float  # standard deviation of a sample; nan for a single seed
    least: float
    most: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Summarizes at least one number; a non-finite one makes mean and deviation NaN."""
    if not all(math.isfinite(value) for value in values):
        return Spread(math.nan, math.nan, math.nan, math.nan, len(values))
    deviation = stdev(values) if len(values) > 1 else math.nan
    return Spread(fmean(values), deviation, min(values), max(values), len(values))


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Returns ours − theirs by seed, for seeds that both have, in order."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def shared_points(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> tuple[list[int], list[list[float]]]:
    """Returns the steps common to all curves, and every curve's values there."""
    by_step = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(curve) for curve in by_step)))
    return steps, [[curve[step] for step in steps] for curve in by_step]
