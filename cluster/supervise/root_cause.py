"""Finds the root cause of a failed generation in the nodes' reports.

When one rank of a distributed program dies, its peers fail a moment later with "connection reset", and the
agents end the rest with SIGTERM. All reports arrive within a tenth of a second, so their order says little.
Failures are therefore ranked by kind: a rank's own exception or a signal from outside, an early exit with
code 0, a lost connection, a SIGTERM.
"""

import re
from collections.abc import Mapping, Sequence

from ...train.config.errors import EXIT_MISTAKE
from ..job import RootCause, signal_name
from ..nodes.assignment import AgentReport, RankFailure

_LOST_CONNECTION = re.compile(
    r"connection (reset|closed|refused|was)|broken pipe|timed out|timeout|gloo|nccl|"
    r"DistBackendError|DistStoreError|DistNetworkError|"
    r"socket|store->get|TCPStore|remote process exited|peer",
    re.IGNORECASE,
)
_KILLED = re.compile(r"ended with exit code -\d")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


def port_was_taken(reports: Mapping[int, AgentReport]) -> bool:
    """Returns whether another process took the port before it was used; another port will do."""
    return any(
        not report.ok and not report.failures and _PORT_TAKEN.search(report.message)
        for report in reports.values()
    )


def is_certain(reports: Mapping[int, AgentReport]) -> bool:
    """Returns whether the root cause is among these reports, whatever the other nodes say.

    A killed process is a cause. SIGTERM (from the agents) and SIGABRT (from a library that lost its peers)
    may be consequences.
    """
    failures = [failure for report in reports.values() for failure in report.failures]
    codes = [failure.exit_code for failure in failures]
    codes += [report.exit_code for report in reports.values() if report.exit_code is not None]
    return any(signal_name(code) not in (None, "SIGTERM", "SIGABRT") for code in codes)


def find_root_cause(
    reports: Mapping[int, AgentReport],
    *,
    left_early: Sequence[int],
    ranks_per_node: int,
    generation: int,
) -> RootCause:
    """Returns the first failure of a generation.

    Args:
        reports: by node; nodes whose agent still ran are absent.
        left_early: ranks that exited with code 0 before others failed.
    """
    failures = [failure for report in reports.values() for failure in report.failures]
    failures.sort(key=lambda failure: (_kind(failure), failure.time, failure.rank))
    if failures and (_kind(failures[0]) == _OWN_FAULT or not left_early):
        return _of_rank(failures[0], generation=generation, ranks_per_node=ranks_per_node)
    if left_early:
        return left_early_cause(left_early, generation=generation, ranks_per_node=ranks_per_node)
    node, report = next((node, report) for node, report in sorted(reports.items()) if not report.ok)
    log = f"{_log_dir(generation, node)}/agent.log"
    return RootCause(
        summary=f"the agent of node {node} failed: {report.message}",
        node=node,
        # a killed agent leaves no error that could be the same twice
        error=None if _KILLED.search(report.message) else report.message,
        log=log,
        infrastructure=True,
    )


def left_early_cause(ranks: Sequence[int], *, generation: int, ranks_per_node: int) -> RootCause:
    """Returns the cause for ranks that exited with code 0 before the run was finished."""
    rank = min(ranks)
    node = rank // ranks_per_node
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
    return RootCause(
        summary=f"{who} exited with code 0 before the run was finished",
        rank=rank,
        node=node,
        exit_code=0,
        log=f"{_log_dir(generation, node)}/rank{rank}.log",
    )


_OWN_FAULT, _CONSEQUENCE, _ENDED_BY_AGENT = range(3)


def _kind(failure: RankFailure) -> int:
    if signal_name(failure.exit_code) == "SIGTERM":
        return _ENDED_BY_AGENT
    if failure.exit_code == EXIT_MISTAKE:
        return _OWN_FAULT  # whatever its message contains: "train.timeout_s must be …"
    if failure.exit_code > 0 and _LOST_CONNECTION.search(failure.error or ""):
        return _CONSEQUENCE
    return _OWN_FAULT


def _of_rank(failure: RankFailure, *, generation: int, ranks_per_node: int) -> RootCause:
    node = failure.rank // ranks_per_node
    by_signal = signal_name(failure.exit_code)
    how = f"was killed by {by_signal}" if by_signal else f"exited with code {failure.exit_code}"
    # other signals leave no last words
    error = failure.error if by_signal in (None, "SIGABRT") else None
    return RootCause(
        summary=f"rank {failure.rank} on node {node} {how}" + (f": {error}" if error else ""),
        rank=failure.rank,
        node=node,
        exit_code=failure.exit_code,
        error=error,
        where=failure.where if error else None,
        traceback=failure.traceback,
        log=f"{_log_dir(generation, node)}/rank{failure.rank}.log",
    )


def _log_dir(generation: int, node: int) -> str:
    return f"logs/g{generation:03d}/node{node}"
