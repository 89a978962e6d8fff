"""Tests when ranks hang and whom the others wait for, with made-up states and answers."""

from typing import Any

import pytest

from moebius.cluster.watch.evidence import Evidence
from moebius.cluster.watch.heartbeats import GONE, RankState
from moebius.cluster.watch.stalls import find_behind, is_stalled, limit_of
from moebius.train.config.job_config import PhaseLimits

DEFAULTS = PhaseLimits().model_dump()


def state(rank: int = 0, phase: str = "step", age_s: float = 100.0, **values) -> RankState:
    return RankState(rank, phase, **({"step": 7, "median_step_s": 1.0} | values), age_s=age_s)


@pytest.mark.parametrize(
    ("found", "limit_s"),
    [
        (state(median_step_s=1.0), 60.0),
        (state(median_step_s=20.0), 200.0),
        (state(median_step_s=0.0), 3600.0),  # none was made yet: as long as one that compiles
        (state(phase="compile"), 3600.0),
        (state(phase="ckpt"), 3600.0),
        (state(phase="eval"), 3600.0),
        (state(phase="end"), 300.0),
        (state(phase="data_wait"), None),
        (state(phase="start"), None),  # job.start_timeout_s
    ],
)
def test_the_limit_of_a_phase(found, limit_s):
    assert limit_of(found, DEFAULTS) == limit_s


def test_every_limit_can_be_set():
    limits = PhaseLimits(step_s=5, phase_s=7).model_dump()
    assert limit_of(state(median_step_s=20.0), limits) == 5
    assert limit_of(state(phase="eval"), limits) == 7
    assert limit_of(state(phase="data_wait"), limits) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([state(0), state(1)], True),
        ([state(0), state(1, age_s=59.0)], False),
        # one writes a checkpoint, and the other waits for it in a step
        ([state(0, "ckpt", 1000.0), state(1, age_s=999.0)], False),
        ([state(0, "ckpt", 3601.0), state(1, age_s=3600.0)], True),
        ([state(0, "data_wait", 1e6), state(1, age_s=1e6)], False),
        # one is ready but gets no CPU: neither it nor the rank that waits for it hangs
        ([state(0), state(1, starved_s=50.0)], False),
        ([state(0), state(1, starved_s=30.0)], True),
        ([], False),
    ],
)
def test_ranks_hang_when_all_are_over_their_limits(states, expected):
    assert is_stalled(states, DEFAULTS) is expected


def position(
    members: list[int], issued: int, pending: int | None = None, group: str = "0"
) -> dict[str, Any]:
    return {
        "group": f"gloo:{group}",
        "description": {"0": "world", "1": "mesh_ep", "2": "mesh_dp"}[group],
        "members": members,
        "issued": issued,
        "pending": [pending, "all_reduce", "4 × 3"] if pending else None,
    }


def behind(*answers: list[dict[str, Any]] | None, processes: str = "", **states):
    """Returns whom the others wait for, if rank i gives the i-th answer."""
    letters = processes or "S" * len(answers)
    evidence = {
        rank: Evidence(rank, GONE if letter == "G" else letter, positions=answer)
        for rank, (answer, letter) in enumerate(zip(answers, letters, strict=True))
    }
    ranks = {rank: state(rank, **states.get(f"r{rank}", {})) for rank in range(len(answers))}
    stall = find_behind(ranks, evidence)
    return list(stall.behind), stall.waiting_in


def test_who_has_not_come_to_the_collective_is_behind():
    waits, hangs = position([0, 1, 2], 9, 9), position([0, 1, 2], 8)
    assert behind([waits], [hangs], [waits]) == ([1], "all_reduce no. 9 of group 'world' (4 × 3)")


def test_a_rank_that_waits_itself_is_not_to_blame():
    """0 waits for 1 in the world, 1 waits for 2 in their EP group, 2 hangs outside of both."""
    answers = (
        [position([0, 1, 2], 9, 9)],
        [position([0, 1, 2], 8), position([1, 2], 5, 5, group="1")],
        [position([0, 1, 2], 8), position([1, 2], 4, group="1")],
    )
    assert behind(*answers) == ([2], "all_reduce no. 9 of group 'world' (4 × 3)")


@pytest.mark.parametrize("letter", ["T", "G"])
def test_a_process_that_is_stopped_or_gone_is_behind(letter):
    waits = position([0, 1], 9, 9)
    assert behind([waits], None, processes=f"S{letter}")[0] == [1]


def test_a_rank_that_cannot_answer_is_behind_where_others_wait_for_it():
    assert behind([position([0, 1], 9, 9)], None)[0] == [1]


def test_without_an_open_collective_the_lowest_step_is_behind():
    done = [position([0, 1], 9)]
    assert behind(done, done, r1={"step": 6}) == ([1], "")
    assert behind([]) == ([0], "")  # a world of one


def test_where_every_rank_came_nobody_is_behind():
    waits = [position([0, 1], 9, 9)]
    assert behind(waits, waits) == ([], "")
