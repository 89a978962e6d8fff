"""Tests which nodes are found not to reach each other."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from moebius.cluster.job import Launch, RootCause
from moebius.cluster.nodes.node import Address, Node, can_connect
from moebius.cluster.nodes.provider import NodeLost
from moebius.cluster.supervise.budgets import RestartBudgets
from moebius.cluster.supervise.generation import Outcome
from moebius.cluster.supervise.network import NetworkWatch, find_cuts, spell_cuts


class PretendedNode:
    """Reaches every node except some."""

    def __init__(self, number: int, *cut_off: int, is_lost: bool = False) -> None:
        self.number, self.cut_off, self.is_lost = number, cut_off, is_lost

    def describe(self) -> dict[str, Any]:
        return {"listens_at": address_of(self.number)}

    def unreachable(self, others: Sequence[Address]) -> list[int]:
        if self.is_lost:
            raise NodeLost("gone")
        cut_off = [address_of(number) for number in self.cut_off]
        return [place for place, address in enumerate(others) if address in cut_off]


def address_of(number: int) -> Address:
    return f"10.0.0.{number}", 6379


BOTH_WAYS: Any = [PretendedNode(0, 1), PretendedNode(1, 0), PretendedNode(2)]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([PretendedNode(0), PretendedNode(1)], ""),
        ([PretendedNode(0)], ""),
        (BOTH_WAYS, "node 0 (10.0.0.0) and node 1 (10.0.0.1) cannot reach each other"),
        (
            [PretendedNode(0), PretendedNode(1), PretendedNode(2, 1)],
            "node 2 (10.0.0.2) cannot reach node 1 (10.0.0.1)",
        ),
        ([PretendedNode(0, 1, is_lost=True), PretendedNode(1)], ""),
    ],
)
def test_who_does_not_reach_whom_is_named(nodes, words):
    assert spell_cuts(find_cuts(nodes), nodes) == words


def test_a_network_that_fails_three_times_at_one_step_does_not_end_the_job(tmp_path):
    hang = RootCause("all ranks hang", error="all ranks hang in phase step")
    blamed = NetworkWatch().explain(Outcome("failed", hang, 7), BOTH_WAYS).cause
    assert blamed is not None
    assert "cannot reach each other over the network: all ranks hang" in blamed.summary
    budgets = RestartBudgets(Launch(str(tmp_path)))
    verdicts = [budgets.charge(blamed, 7) for _ in range(4)]
    assert {verdict.charged_to for verdict in verdicts} == {"infrastructure"}
    assert not any(verdict.given_up for verdict in verdicts)


def test_a_node_is_unreachable_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[:2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_ = server.getsockname()[:2]
        assert Node().unreachable([closed, open_, closed]) == [0, 2]
        assert can_connect(open_)
    assert Node().unreachable([]) == []
