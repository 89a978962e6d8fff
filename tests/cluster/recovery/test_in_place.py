"""When dead ranks are replaced in place, and what follows when they are not."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moebius.cluster.job import Launch, RootCause, State
from moebius.cluster.nodes.agent import AgentReport, RankFailure
from moebius.cluster.recovery.in_place import Circumstances, RoundDirector, why_not_in_place
from moebius.cluster.recovery.round_of_node import RoundsNode
from moebius.cluster.supervise.budgets import Budgets
from moebius.cluster.warm.replacing import Replacements
from moebius.train.in_place.orders import (
    RoundOrder,
    read_order,
    read_readiness,
    write_order,
    write_readiness,
)

RUNNING = Circumstances(step=7, ranks_end=False, is_drill=False, round_is_under_way=False)


def held(*ranks: int, error: str | None = None, exit_code: int = -9) -> AgentReport:
    failures = tuple(RankFailure(rank, exit_code, 1.0, error) for rank in ranks)
    return AgentReport(ok=False, failures=failures, holds=True)


@pytest.mark.parametrize(
    ("reports", "changes", "why_not"),
    [
        ({0: held(1)}, {}, ""),
        ({0: held(1), 1: held(2)}, {}, ""),
        ({0: held(1, error="RuntimeError: a bug", exit_code=1)}, {}, ""),
        ({0: held(1)}, {"step": None}, "no step was made yet"),
        ({0: held(1)}, {"ranks_end": True}, "the ranks were asked to end"),
        ({0: held(1)}, {"is_drill": True}, "the drill rehearses a restart"),
        (
            {0: held(1)},
            {"round_is_under_way": True},
            "another rank has died before the last recovery in place was done",
        ),
        (
            {0: held(1), 1: AgentReport(ok=False, not_in_place="no spare")},
            {},
            "no spare",
        ),
        ({0: AgentReport(ok=False, message="killed")}, {}, "the agent of node 0 has ended"),
        (
            {0: held(1, error="moebius.data_pipeline.errors.PreparationFailedError: x")},
            {},
            "it was a PreparationFailedError",
        ),
    ],
)
def test_what_is_recovered_in_place(reports, changes, why_not):
    now = Circumstances(**{**vars(RUNNING), **changes})
    assert why_not_in_place(reports, now) == why_not


class Orders:
    def __init__(self) -> None:
        self.orders: list[RoundOrder] = []

    def order_round(self, order: RoundOrder) -> None:
        self.orders.append(order)


class Directed:
    """A director with two nodes, and what it has written."""

    def __init__(self, *, timeout_s: float = 60.0, **launch: Any) -> None:
        self.nodes = [Orders(), Orders()]
        self.lines: list[tuple[State, str, dict[str, Any]]] = []
        self.budgets = Budgets(Launch("/run", **launch))
        self.director = RoundDirector(
            self.nodes,
            charge=self.charge,
            log=lambda state, reason, **details: self.lines.append((state, reason, details)),
            timeout_s=timeout_s,
            ranks_per_node=2,
            generation=1,
        )

    def charge(self, cause: RootCause, step: int | None):
        return self.budgets.charge(cause, step)


def test_a_round_is_ordered_everywhere_and_journalled():
    directed = Directed()
    assert directed.director.answer({1: held(3)}, RUNNING) == {}
    assert directed.director.is_under_way
    for node in directed.nodes:
        assert node.orders == [RoundOrder(1, (3,))]
    line = {"round": 1, "step": 6, "restored_from": "memory", "phases_s": {}}
    assert not directed.director.hear(line | {"round": 0})
    assert not directed.director.awaits_step
    assert directed.director.hear(line)
    assert directed.director.awaits_step
    directed.director.first_step({"step": 7}, {"load": 0.1})
    assert not directed.director.is_under_way
    (lost, reason, details), (state, told, first) = directed.lines
    assert (lost, state) == (State.RECOVERING, State.RUNNING)
    assert reason.startswith("rank 3 on node 1 was killed by SIGKILL (at step 7, 2 restart(s) left")
    assert details["in_place"] == first["in_place"] == {"round": 1, "ranks": [3]}
    assert (details["charged_to"], details["left"]) == ("failures", 2)
    assert told.startswith("rank 3 was replaced in place, from memory: first step (7)")
    assert (first["restored_step"], first["phases_s"]) == (6, {"load": 0.1})


def test_a_supervisor_that_takes_over_counts_on():
    """Agents and ranks have seen the order of its predecessor, and obey a later one only."""
    directed = Directed()
    nodes = [Orders()]
    director = RoundDirector(
        nodes,
        charge=directed.charge,
        log=lambda *_, **__: None,
        timeout_s=60.0,
        ranks_per_node=2,
        generation=1,
        last_round=3,
    )
    director.answer({0: held(1)}, RUNNING)
    assert nodes[0].orders == [RoundOrder(4, (1,))]


def test_who_waits_is_told_that_there_is_no_round():
    directed = Directed(max_restarts=0)
    reports = {0: held(1)}
    assert directed.director.answer(reports, RUNNING) == reports
    assert directed.director.why_not == "no restarts allowed"
    assert directed.nodes[1].orders == [RoundOrder(1, refused="no restarts allowed")]
    assert not directed.lines


def test_a_round_that_takes_too_long_is_a_failure():
    directed = Directed(timeout_s=0.0)
    assert directed.director.overdue() is None
    directed.director.answer({0: held(0)}, RUNNING)
    cause = directed.director.overdue()
    assert cause is not None
    assert cause.summary == (
        "the recovery in place of rank 0 was not done: no step within 0 s of the order"
    )


def test_a_failure_that_is_only_tried_does_not_count():
    counts = Budgets(Launch("/run"))
    counts.copy().charge(RootCause("rank 0 failed", rank=0, error="a"), 3)
    assert not counts.used
    assert not counts.seen


class Agent:
    """The ranks 4 and 5 of a node, and two spares."""

    def __init__(self, folder: Path, spares: Sequence[str] = ("first", "second")) -> None:
        self.folder = folder
        self.replacements = Replacements(folder, [4, 5], spares, self.describe)
        self.node = RoundsNode()
        self.node.begin_rounds(folder)
        for rank in (4, 5):
            write_readiness(folder, rank)

    def describe(self, rank: int, failure: Any) -> dict[str, Any]:
        return asdict(RankFailure(rank, failure.exitcode, 1.0))

    def died(self, *local_ranks: int, exit_code: int = -9) -> Any:
        """What torch knows of dead ranks; each has left an error file."""
        found = {}
        for each in local_ranks:
            file = self.folder / f"error{each}.json"
            file.write_text("{}")
            found[each] = SimpleNamespace(exitcode=exit_code, error_file=str(file))
        return found


def test_an_agent_holds_its_ranks_and_releases_a_spare(tmp_path):
    agent = Agent(tmp_path)
    assert agent.replacements.look({}) == {}
    assert agent.node.held() is None
    assert agent.replacements.look(dead := agent.died(1)) == {}
    assert [failure["rank"] for failure in agent.node.held() or ()] == [5]
    agent.node.order_round(RoundOrder(1, (5,)))
    assert agent.node.held() is None, "the order deals with it"
    assert agent.replacements.look(dead) == {1: "second"}
    assert read_readiness(tmp_path, 5) is None, "the new process has not begun"
    assert not (tmp_path / "error1.json").exists()
    assert agent.replacements.look({}) == {}

    write_readiness(tmp_path, 5)
    assert agent.replacements.look(agent.died(0)) == {}
    assert [failure["rank"] for failure in agent.node.held() or ()] == [4]


def test_a_death_that_crosses_an_order_is_told_again(tmp_path):
    """The order is for a rank of another node; here it comes when rank 4 has just died."""
    agent = Agent(tmp_path)
    agent.replacements.look(dead := agent.died(0))
    agent.node.order_round(RoundOrder(1, (0,)))
    assert agent.node.held() is None
    assert agent.replacements.look(dead) == {}
    assert [failure["rank"] for failure in agent.node.held() or ()] == [4]


def test_a_refusal_ends_the_holding(tmp_path):
    agent = Agent(tmp_path)
    agent.replacements.look(dead := agent.died(0))
    write_order(tmp_path, RoundOrder(1, refused="the drill rehearses a restart"))
    assert agent.replacements.look(dead) is None
    assert agent.replacements.why_not == "the drill rehearses a restart"
    assert read_order(tmp_path) == RoundOrder(1, refused="the drill rehearses a restart")
    assert agent.node.held() is not None, "until the agent's own report is there"


@pytest.mark.parametrize(
    ("prepare", "why_not"),
    [
        ({"exit_code": 78}, "no restart mends the error"),
        ({"spares": ()}, "1 rank(s) have died, and 0 spare(s) are left"),
        ({"both": True}, "no rank of the node lives"),
        ({"said": "there is only one rank"}, "there is only one rank"),
        ({"said": None}, "rank 4 was not among its steps"),
    ],
)
def test_an_agent_does_not_hold_in_vain(tmp_path, prepare, why_not):
    agent = Agent(tmp_path, spares=prepare.get("spares", ("one", "two")))
    if "said" in prepare:
        (tmp_path / "rank4.in_place").unlink()
        if prepare["said"]:
            write_readiness(tmp_path, 4, prepare["said"])
    ranks = (0, 1) if prepare.get("both") else (1,)
    dead = agent.died(*ranks, exit_code=prepare.get("exit_code", -9))
    assert agent.replacements.look(dead) is None
    assert agent.replacements.why_not == why_not
    assert not (tmp_path / "lost.json").exists()


def test_what_an_agent_says_of_held_ranks_is_a_report(tmp_path):
    agent = Agent(tmp_path)
    agent.replacements.look(agent.died(1))
    report = AgentReport.of_held(agent.node.held() or [])
    assert report == AgentReport(ok=False, failures=(RankFailure(5, -9, 1.0),), holds=True)
    saved = tmp_path / "report.json"
    saved.write_text(json.dumps({"ok": False, "failures": [], "not_in_place": "no spare"}))
    assert AgentReport.load(saved).not_in_place == "no spare"
