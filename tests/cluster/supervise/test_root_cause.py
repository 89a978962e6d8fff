"""Tests which of many failures is the root cause."""

import signal

import pytest

from moebius.cluster.nodes.assignment import AgentReport, RankFailure
from moebius.cluster.supervise.root_cause import find_root_cause, is_certain, port_was_taken

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33688"


def cause_of(reports: dict[int, AgentReport], *, left_early=()):
    return find_root_cause(reports, left_early=left_early, ranks_per_node=2, generation=3)


def failed(*failures: RankFailure) -> AgentReport:
    return AgentReport(ok=False, failures=failures)


def test_a_killed_rank_comes_before_its_peers_lost_connections_whatever_the_order_of_reports():
    reports = {
        0: failed(RankFailure(0, 1, 100.0, error=RESET), RankFailure(1, -15, 100.0)),
        1: failed(RankFailure(3, -9, 101.0), RankFailure(2, -15, 101.0)),
    }
    cause = cause_of(reports)
    assert (cause.rank, cause.node, cause.exit_code, cause.signal) == (3, 1, -9, "SIGKILL")
    assert cause.summary == "rank 3 on node 1 was killed by SIGKILL"
    assert cause.log == "logs/g003/node1/rank3.log"


BAD = RankFailure(1, 1, 100.0, "ValueError: bad", "x.py:3")
LOST = RankFailure(0, 1, 99.0, error=RESET)


@pytest.mark.parametrize(
    ("failures", "left_early", "rank", "words"),
    [
        ([LOST, BAD], [], 1, "rank 1 on node 0 exited with code 1: ValueError: bad"),
        ([BAD, RankFailure(2, 1, 99.0, "A")], [], 2, "rank 2 on node 1 exited with code 1: A"),
        ([LOST], [2], 2, "rank 2 exited with code 0 before the run was finished"),
        ([BAD], [2], 1, "rank 1 on node 0 exited with code 1: ValueError: bad"),
        ([LOST], [], 0, f"rank 0 on node 0 exited with code 1: {RESET}"),
    ],
)
def test_own_faults_come_before_early_ends_and_those_before_lost_connections(
    failures, left_early, rank, words
):
    cause = cause_of({0: failed(*failures)}, left_early=left_early)
    assert (cause.rank, cause.node, cause.summary) == (rank, rank // 2, words)
    assert cause.where == ("x.py:3" if rank == 1 else None)


def test_an_agent_that_failed_itself_is_named_with_its_log():
    cause = cause_of({1: AgentReport(ok=False, message="RuntimeError: no network")})
    assert (cause.node, cause.rank, cause.log) == (1, None, "logs/g003/node1/agent.log")
    assert "no network" in cause.summary


def test_a_taken_port_is_recognised():
    taken = AgentReport(ok=False, message="DistNetworkError: EADDRINUSE: address already in use")
    assert port_was_taken({0: taken})
    assert not port_was_taken(
        {0: failed(RankFailure(0, 1, 1.0, error="OSError: Address already in use"))}
    )


@pytest.mark.parametrize(
    ("exit_code", "certain"),
    [
        (-signal.SIGKILL, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGTERM, False),
        (-signal.SIGABRT, False),
        (1, False),
    ],
)
def test_only_a_process_that_was_killed_makes_other_reports_superfluous(exit_code, certain):
    """SIGTERM comes from the agents, SIGABRT from libraries that lost a peer."""
    rank = AgentReport(ok=False, failures=(RankFailure(3, exit_code, 1.0),))
    agent = AgentReport(ok=False, message="ended", exit_code=exit_code)
    lost = AgentReport(ok=False, failures=(RankFailure(0, 1, 1.0, "Connection reset by peer"),))
    assert is_certain({0: lost, 1: rank}) == certain
    assert is_certain({0: lost, 1: agent}) == certain
    assert not is_certain({0: lost})
