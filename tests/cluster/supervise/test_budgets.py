"""Tests the two restart budgets."""

from typing import Any

from moebius.cluster.job import JournalEntry, Launch, RootCause, State, as_details
from moebius.cluster.supervise.budgets import FAILURES, INFRASTRUCTURE, RestartBudgets

LOST = RootCause("node 1 was lost", infrastructure=True)


def crash(error: str = "ValueError: bad") -> RootCause:
    return RootCause(f"rank 0 failed: {error}", rank=0, error=error)


def budgets(**values: Any) -> RestartBudgets:
    return RestartBudgets(Launch("/run", **values))


def test_lost_nodes_and_failures_are_counted_apart():
    counts = budgets(max_restarts=1, max_node_losses=2)
    assert counts.charge(LOST, 3).details == {"charged_to": INFRASTRUCTURE, "left": 1}
    assert counts.charge(crash("A"), 4).details == {"charged_to": FAILURES, "left": 0}
    assert not counts.charge(LOST, 5).given_up
    assert counts.charge(LOST, 6).given_up
    verdict = counts.charge(crash("B"), 7)
    assert verdict.given_up
    assert (verdict.words, verdict.details["left"]) == ("max_restarts=1 used up", 0)


def test_failures_are_forgotten_after_so_many_new_steps():
    counts = budgets(max_restarts=1, reset_restarts_after_steps=100)
    assert not counts.charge(crash("A"), 50).given_up
    assert not counts.charge(crash("B"), 150).given_up, "100 steps later"
    assert counts.charge(crash("C"), 249).given_up, "99 steps later"


def test_steps_that_are_made_again_are_not_new():
    counts = budgets(max_restarts=1, reset_restarts_after_steps=100)
    counts.charge(crash("A"), 150)
    assert counts.charge(crash("B"), 100).given_up


def test_an_earlier_supervisor_s_journal_counts():
    def entry(cause: RootCause, step: int | None) -> JournalEntry:
        details = {"root_cause": as_details(cause), "step": step}
        return JournalEntry(0.0, State.RECOVERING, 1, "", details)

    drill = RootCause("fault drill", on_purpose=True)
    entries = [entry(LOST, 5), entry(crash("A"), 6), entry(drill, 7)]
    counts = RestartBudgets.from_journal(Launch("/run", max_restarts=1), entries)
    assert counts.used == {INFRASTRUCTURE: 1, FAILURES: 1}
    assert counts.charge(crash("B"), 8).given_up
