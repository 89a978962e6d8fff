"""Finds out when ranks hang and which rank the others wait for, in pure functions.

The ranks of a generation move in step: one that stands still stops all others in a collective within a step
or two. A generation hangs when every rank is over the limit of its phase. The ranks that the others wait for are,
in this order:

1. a rank whose process is stopped or gone;
2. a rank that others blame and that waits for none. Every rank reports the collective it waits in, and
   blames the members of the group that have not reached it. (If A waits for B and B for C, it is C.)
3. the ranks at the lowest step, unless that is all of them.

If none applies, every rank arrived but no data does: the network failed, or all ranks hang alike.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...train.record.heartbeat import WINDOW
from .evidence import Evidence
from .heartbeats import GONE, STOPPED, RankState

STEP_S = 60.0  # least limit of a step, unless job.limits sets one
STEP_MEDIANS = 10.0
END_S = 300.0  # to leave the process group after the last step


@dataclass(frozen=True)
class Stall:
    """Describes a hang: no rank makes progress."""

    state: RankState  # of the rank behind the others, or of the one that waits longest
    behind: tuple[int, ...] = ()
    waiting_in: str = ""  # the collective in which others wait for a rank behind


def limit_of(state: RankState, limits: Mapping[str, float | None]) -> float | None:
    """Returns how many seconds a rank may stay in its phase; None: forever.

    Args:
        limits: `PhaseLimits` as plain values.
    """
    if state.phase == "step" and limits["step_s"] is not None:
        return limits["step_s"]
    if state.phase == "step" and state.median_step_s:
        return max(STEP_S, STEP_MEDIANS * state.median_step_s)
    if state.phase == "end":
        return END_S
    # a slow store is not a hang, and `job.start_timeout_s` limits the start
    return None if state.phase in ("start", "data_wait") else limits["phase_s"]


def is_stalled(
    states: Iterable[RankState], limits: Mapping[str, float | None], *, forgive_starved: bool = True
) -> bool:
    """Returns whether every rank is over its limit, not counting time without a CPU.

    A rank without a CPU delays all others, so its starved time is subtracted for every rank.
    """
    states = list(states)
    starved_s = max((state.starved_s for state in states), default=0.0) if forgive_starved else 0.0
    allowed = [limit_of(state, limits) for state in states]
    return bool(states) and all(
        limit is not None and state.age_s - starved_s > limit
        for state, limit in zip(states, allowed, strict=True)
    )


def find_behind(states: Mapping[int, RankState], evidence: Mapping[int, Evidence]) -> Stall:
    """Returns which ranks the others wait for, and in which collective.

    Args:
        states: of every rank.
        evidence: of the ranks that could be examined.
    """
    dead = [rank for rank, found in evidence.items() if found.process in (GONE, *STOPPED)]
    blamed = {rank: _blamed_by(rank, evidence) for rank in states}
    culprits = set().union(*blamed.values())
    roots = [rank for rank in culprits if not blamed.get(rank)]
    lowest = min(state.step for state in states.values())
    late = [rank for rank, state in states.items() if state.step == lowest]
    behind = sorted(dead or roots or (late if len(late) < len(states) or len(late) == 1 else []))
    longest = max(states.values(), key=lambda state: state.age_s)
    state = next((states[rank] for rank in behind if rank in states), longest)
    return Stall(state, tuple(behind), _waiting_for(set(behind), blamed, evidence))


def _blamed_by(rank: int, evidence: Mapping[int, Evidence]) -> set[int]:
    """Returns the ranks that a rank waits for."""
    found = evidence.get(rank)
    blamed: set[int] = set()
    for position in (found.positions or []) if found else []:
        if position["pending"] is not None:
            blamed |= _not_come(position["group"], position["pending"][0], position, evidence)
    return blamed - {rank}


def _not_come(
    group: str, number: int, position: Mapping[str, Any], evidence: Mapping[int, Evidence]
) -> set[int]:
    return {
        member for member in position["members"] if _issued(evidence.get(member), group) < number
    }


def _issued(found: Evidence | None, group: str) -> int:
    """Returns the number of a rank's last collective in a group; 0: none, or no answer."""
    positions = (found.positions or []) if found else []
    return max((each["issued"] for each in positions if each["group"] == group), default=0)


def _waiting_for(
    behind: set[int], blamed: Mapping[int, set[int]], evidence: Mapping[int, Evidence]
) -> str:
    """Returns the collective in which a rank waits for one that is behind."""
    for rank, whom in sorted(blamed.items()):
        for position in (evidence[rank].positions or []) if whom & behind else []:
            if position["pending"] is None:
                continue
            number, operation, sizes = position["pending"]
            if _not_come(position["group"], number, position, evidence) & behind:
                group = position["description"]
                return f"{operation} no. {number} of group {group!r} ({sizes})"
    return ""


RATIO = 1.5
_PART_OF_STEP = 0.1


@dataclass(frozen=True)
class Straggler:
    """Describes a rank whose own part of a step takes much longer than the others'."""

    rank: int
    own_s: float  # per step
    ratio: float  # to the median of the others


class Stragglers:
    """Remembers which ranks were slow, and which were reported."""

    def __init__(self) -> None:
        self._slow_since: dict[int, int] = {}  # the step, by rank
        self._named: set[int] = set()

    def find_new(self, states: Mapping[int, RankState]) -> list[Straggler]:
        """Returns ranks that have been slow for WINDOW steps and were not reported before."""
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
    """Returns the ranks whose own part of a step takes much longer than the others'."""
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
