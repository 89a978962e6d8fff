"""Spread over seeds, differences that are paired by seed, and the rule by which a claim is judged.

Arms of one seed have the same data in the same order, so the difference of their losses is paired:
what the seed does to both cancels. The rule: with at least three seeds, a claim *holds* if every
seed's number is on the claimed side of the bound, *does not hold* if every seed's is on the other
side, and is *undecided* otherwise, or where a number does not exist. Were there nothing in a claim,
n fair coins would still let it hold in one case of 2ⁿ: read the numbers, not only the word.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["holds", "does not hold", "undecided"]
Side = Literal["at most", "above", "below"]
FEWEST_SEEDS = 3


def is_met(value: float, side: Side, bound: float) -> bool:
    """Returns whether a number is on the claimed side of a bound."""
    if side == "at most":
        return value <= bound
    return value > bound if side == "above" else value < bound


def verdict(values: Sequence[float], side: Side, bound: float) -> Verdict:
    """Returns what one number per seed says of a claim, by the rule in the head of this module."""
    if len(values) < FEWEST_SEEDS or any(math.isnan(value) for value in values):
        return "undecided"
    met = [is_met(value, side, bound) for value in values]
    return "holds" if all(met) else "undecided" if any(met) else "does not hold"


@dataclass(frozen=True)
class Spread:
    """Sums up one number per seed."""

    mean: float
    deviation: float  # standard deviation of a sample; nan for a single seed
    least: float
    most: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Sums up at least one number; one that is not finite makes the mean and deviation nan."""
    if not all(math.isfinite(value) for value in values):
        return Spread(math.nan, math.nan, math.nan, math.nan, len(values))
    deviation = stdev(values) if len(values) > 1 else math.nan
    return Spread(fmean(values), deviation, min(values), max(values), len(values))


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Returns ours − theirs by seed, for the seeds that both have, in order."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def shared_points(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> tuple[list[int], list[list[float]]]:
    """Returns the steps that all curves have, and every curve's values there."""
    by_step = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(curve) for curve in by_step)))
    return steps, [[curve[step] for step in steps] for curve in by_step]
