"""Which rank makes all others wait? By the time that each needs for its own part of a step.

Ranks wait for each other in collectives, so all steps take equally long, and only what a rank does
between its collectives tells it from the others: forward and backward passes without the waits for
exchanges (`own_step_s` of a heartbeat, the median of the last steps; train/loop.py measures it, on
CPUs: a GPU's work is not seen by the host's clock). A rank is named if for two windows of steps

* it needs more than RATIO × the median of the others, and
* that is worth naming: more than a tenth of the whole step.

Once per rank and generation.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ...train.record.heartbeat import WINDOW
from .heartbeats import RankState

RATIO = 1.5
_PART_OF_STEP = 0.1


@dataclass(frozen=True)
class Straggler:
    """A slow rank."""

    rank: int
    own_s: float  # per step
    ratio: float  # of that and the others' median


class Stragglers:
    """Remembers who has been slow, and who was named."""

    def __init__(self) -> None:
        self._slow_since: dict[int, int] = {}  # the step, by rank
        self._named: set[int] = set()

    def find_new(self, states: Mapping[int, RankState]) -> list[Straggler]:
        """Returns the ranks that have been slow for long enough and were not named before."""
        slow = {each.rank: each for each in slow_ranks(states)}
        self._slow_since = {rank: self._slow_since.get(rank, states[rank].step) for rank in slow}
        new = [
            each
            for rank, each in slow.items()
            if rank not in self._named and states[rank].step - self._slow_since[rank] >= WINDOW
        ]
        self._named |= {each.rank for each in new}
        return new


def slow_ranks(states: Mapping[int, RankState]) -> list[Straggler]:
    """Returns the ranks that need much longer for their own part of a step than the others."""
    if len(states) < 2 or any(state.own_step_s <= 0 for state in states.values()):
        return []
    found = []
    for rank, state in states.items():
        others = [other.own_step_s for each, other in states.items() if each != rank]
        median_s = statistics.median(others)
        is_worth_it = state.own_step_s - median_s > _PART_OF_STEP * state.median_step_s
        if state.own_step_s > RATIO * median_s and is_worth_it:
            found.append(Straggler(rank, state.own_step_s, state.own_step_s / median_s))
    return found
