"""Tests what a watcher reports about its ranks, with fake nodes."""

import threading
from typing import Any

import pytest
from jobs import wait_for

from moebius.cluster.nodes.provider import NodeLost
from moebius.cluster.watch import watcher
from moebius.cluster.watch.evidence import Evidence
from moebius.cluster.watch.heartbeats import RankState
from moebius.cluster.watch.watcher import RankWatcher, read_limits
from moebius.train.config.job_config import PhaseLimits
from moebius.train.record.heartbeat import WINDOW

LIMITS = {"step_s": 5.0, "phase_s": None}


class PretendedNode:
    def __init__(self, *states: RankState, evidence: tuple[Evidence, ...] | None = ()) -> None:
        self.states = list(states)
        self.evidence = evidence

    def describe(self) -> dict[str, Any]:
        return {"host": "hostess"}

    def heartbeats(self) -> list[RankState]:
        return self.states

    def gather_evidence(self) -> list[Evidence]:
        if self.evidence is None:
            raise NodeLost("gone")
        return list(self.evidence)


@pytest.fixture
def watch(monkeypatch):
    """Returns a function that makes a watcher, and the watcher's notes."""
    monkeypatch.setattr(watcher, "LOOK_S", 0.0)
    notes: list[tuple[str, dict[str, Any]]] = []

    def make(*nodes: Any, world_size: int = 2) -> RankWatcher:
        return RankWatcher(
            nodes,
            world_size=world_size,
            limits=LIMITS,
            stall_dir="logs/g001/stall",
            note=lambda reason, **details: notes.append((reason, details)),
        )

    return make, notes


@pytest.mark.fault("F12")
def test_a_stall_ends_the_generation_with_rank_operation_and_place(watch):
    make, notes = watch
    members = {"group": "gloo:0", "description": "world", "members": [0, 1]}
    waits = members | {"issued": 9, "pending": [9, "all_reduce", "4"]}
    one = PretendedNode(RankState(0, "step", 3, 6.0), evidence=(Evidence(0, "S", "", [waits]),))
    hangs = Evidence(1, "S", "loader.py:7 in read", [members | {"issued": 8, "pending": None}])
    two = PretendedNode(RankState(1, "step", 3, 6.5), evidence=(hangs,))
    cause = make(one, two).look()
    assert cause is not None
    assert cause.summary == (
        "rank 1 on node 1 hangs: in phase step of step 3 for 6.5 s (limit 5 s), at loader.py:7 in "
        "read, the others wait in all_reduce no. 9 of group 'world' (4); stacks in logs/g001/stall"
    )
    assert (cause.rank, cause.node, cause.where) == (1, 1, "loader.py:7 in read")
    assert cause.error == "rank 1 on node 1 hangs in phase step"
    assert cause.log == "logs/g001/stall/rank1.txt"
    assert notes == []


def test_a_node_that_is_lost_meanwhile_says_nothing_and_its_rank_is_behind(watch):
    make, _ = watch
    waits = {"group": "g", "description": "world", "members": [0, 1], "issued": 2}
    waits |= {"pending": [2, "broadcast", "4"]}
    one = PretendedNode(RankState(0, "step", 3, 6.0), evidence=(Evidence(0, "S", "", [waits]),))
    cause = make(one, PretendedNode(RankState(1, "step", 3, 6.0), evidence=None)).look()
    assert cause is not None
    assert cause.rank == 1


def test_as_long_as_a_rank_has_not_begun_nothing_is_judged(watch):
    make, _ = watch
    node = PretendedNode(RankState(0, "step", 3, 1e6))
    ranks = make(node)
    assert ranks.look() is None
    assert not ranks.all_have_started
    node.states.append(RankState(1, "start", 0, 1e6))
    assert ranks.look() is None
    assert not ranks.all_have_started
    node.states[1] = RankState(1, "compile", 1, 1.0)
    assert ranks.look() is None
    assert ranks.all_have_started


def test_a_wait_for_data_is_told_ever_more_rarely_and_never_ended(watch):
    make, notes = watch
    node = PretendedNode()
    ranks = make(node)
    for seconds in range(0, 1000, 10):
        waiting = RankState(1, "data_wait", 4, float(seconds))
        node.states = [RankState(0, "step", 5, float(seconds)), waiting]
        assert ranks.look() is None
    assert [details["data_wait"]["seconds"] for _, details in notes] == [60, 120, 240, 480, 960]
    assert notes[0][0] == "rank 1 on node 0 has waited 60 s for the data of step 5"


def test_a_rank_without_cpu_is_told_once(watch):
    make, notes = watch
    node = PretendedNode(
        RankState(0, "step", 5, 30.0), RankState(1, "step", 5, 30.0, starved_s=28.0)
    )
    ranks = make(node)
    assert [ranks.look() for _ in range(3)] == [None] * 3
    [(reason, details)] = notes
    assert "rank 1 on node 0 gets no CPU: for 28 of 30 s in step 5, it was ready to run" in reason
    assert details == {"starved": {"rank": 1, "seconds": 28.0}}


def test_a_slow_rank_is_named_once_after_two_windows(watch):
    make, notes = watch
    node = PretendedNode()
    ranks = make(node, world_size=3)
    named_at = []
    for step in range(WINDOW, 4 * WINDOW):
        node.states = [
            RankState(rank, "step", step, 0.1, median_step_s=1.0, own_step_s=own_s)
            for rank, own_s in enumerate([0.4, 0.9, 0.5])
        ]
        assert ranks.look() is None
        named_at += [step] * (len(notes) - len(named_at))
    assert named_at == [2 * WINDOW]
    [(reason, details)] = notes
    assert reason.startswith(
        "rank 1 on node 0 (hostess) is slow: it computes 0.9 s per step, 2.00 ×"
    )
    assert details["straggler"] == {
        "rank": 1, "node": 0, "host": "hostess", "ratio": 2.0, "step": 2 * WINDOW,
    }  # fmt: skip


@pytest.mark.parametrize(
    "own_s",
    [
        [0.4, 0.59],  # not more than 1.5 ×
        [0.04, 0.13],  # more, but not a tenth of the step
        [0.0, 0.9],  # not known of all
        [0.9],
    ],
)
def test_who_is_not_slow_is_not_named(watch, own_s):
    make, notes = watch
    node = PretendedNode()
    ranks = make(node, world_size=len(own_s))
    for step in (WINDOW, 2 * WINDOW, 3 * WINDOW):
        node.states = [
            RankState(rank, "step", step, 0.1, median_step_s=1.0, own_step_s=own)
            for rank, own in enumerate(own_s)
        ]
        ranks.look()
    assert notes == []


def test_limits_are_those_of_the_runs_configuration(tmp_path):
    assert read_limits(tmp_path / "config.json") == PhaseLimits().model_dump()
    saved = tmp_path / "config.json"
    saved.write_text('{"job": {"name": "of an older version"}}')
    assert read_limits(tmp_path / "config.json")["step_s"] is None
    saved.write_text('{"job": {"limits": {"step_s": 7, "phase_s": null}}}')
    assert read_limits(tmp_path / "config.json") == PhaseLimits(step_s=7, phase_s=None).model_dump()


class SlowNode(PretendedNode):
    """Answers when it may, with states or with its loss."""

    def __init__(self, *states: RankState) -> None:
        super().__init__(*states)
        self.may_answer = threading.Event()
        self.is_lost = False
        self.num_asked = 0

    def heartbeats(self) -> list[RankState]:
        self.num_asked += 1
        assert self.may_answer.wait(timeout=120)
        if self.is_lost:
            raise NodeLost("its agent did not answer")
        return self.states


def test_a_node_that_does_not_answer_holds_up_nobody(watch, monkeypatch):
    """The other nodes' answers arrive, nobody is judged before it has answered, and it is asked once."""
    monkeypatch.setattr(watcher, "ANSWER_S", 0.05)
    make, notes = watch
    slow = SlowNode(RankState(0, "step", 3, 60.0))
    waits = PretendedNode(RankState(1, "data_wait", 3, 90.0))
    quick = PretendedNode(RankState(2, "step", 3, 60.0))
    ranks = make(slow, waits, quick, world_size=3)
    for _ in range(3):
        wait_for(lambda: ranks.look() is None and set(ranks.states) == {1, 2}, what="the others")
    assert slow.num_asked == 1
    assert "rank 1 on node 1 has waited 90 s" in notes[0][0]
    slow.may_answer.set()
    wait_for(lambda: ranks.look() is None and len(ranks.states) == 3, what="all three")


def test_a_node_that_is_lost_while_others_answer_is_named(watch, monkeypatch):
    monkeypatch.setattr(watcher, "ANSWER_S", 0.05)
    make, _ = watch
    lost = SlowNode()
    ranks = make(PretendedNode(RankState(0, "step", 3, 1.0)), lost)
    assert ranks.look() is None
    lost.is_lost = True
    lost.may_answer.set()
    with pytest.raises(NodeLost, match="node 1 was lost: its agent did not answer"):
        wait_for(ranks.look, what="the loss")
