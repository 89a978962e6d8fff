"""Which nodes do not reach each other: pretended nodes, and the same with machines of their own."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from moebius.cluster.job import Launch, RootCause
from moebius.cluster.nodes.provider import NodeLost
from moebius.cluster.recovery.doors import Door, knock
from moebius.cluster.supervise.budgets import Budgets
from moebius.cluster.supervise.network import blame_network, find_cuts, spell_cuts


class PretendedNode:
    """Reaches every door but those of some addresses."""

    def __init__(self, number: int, *walls: int, is_lost: bool = False) -> None:
        self.number, self.walls, self.is_lost = number, walls, is_lost

    def describe(self) -> dict[str, Any]:
        return {"door": _door(self.number)}

    def unreached(self, doors: Sequence[Door]) -> list[int]:
        if self.is_lost:
            raise NodeLost("gone")
        walls = [_door(wall) for wall in self.walls]
        return [place for place, door in enumerate(doors) if door in walls]


def _door(number: int) -> Door:
    return f"10.0.0.{number}", 6379


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([PretendedNode(0), PretendedNode(1)], ""),
        ([PretendedNode(0)], ""),
        (
            [PretendedNode(0, 1), PretendedNode(1, 0), PretendedNode(2)],
            "node 0 (10.0.0.0) and node 1 (10.0.0.1) do not reach each other",
        ),
        (
            [PretendedNode(0), PretendedNode(1), PretendedNode(2, 1)],
            "node 2 (10.0.0.2) does not reach node 1 (10.0.0.1)",
        ),
        ([PretendedNode(0, 1, is_lost=True), PretendedNode(1)], ""),
    ],
)
def test_who_does_not_reach_whom_is_named(nodes, words):
    assert spell_cuts(find_cuts(nodes), nodes) == words


def test_a_network_that_fails_three_times_at_one_step_does_not_end_the_job(tmp_path):
    hang = RootCause("all ranks hang", error="all ranks hang in phase step")
    blamed = blame_network(hang, "node 0 and node 1 do not reach each other")
    budgets = Budgets(Launch(str(tmp_path)))
    verdicts = [budgets.charge(blamed, 7) for _ in range(4)]
    assert {verdict.charged_to for verdict in verdicts} == {"infrastructure"}
    assert not any(verdict.given_up for verdict in verdicts)
    assert blamed.summary.startswith("node 0 and node 1 do not reach each other over the network")
    assert blamed.summary.endswith("all ranks hang")


def test_a_door_is_closed_where_nobody_listens():
    with listener() as door, listener() as gone:
        pass
    with listener() as door:
        assert knock([gone, door, gone]) == [0, 2]
    assert knock([]) == []


@contextlib.contextmanager
def listener() -> Iterator[Door]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]
