"""Runs the agent of one node in one generation: torchrun's elastic agent, in its own process.

    python -m moebius.cluster.nodes.agent LOG_DIR      (or a fork of the node's template)

1. It binds itself to its parent, the node, and reads the generation's secret from a pipe.
2. It runs torchrun's elastic agent with a given rendezvous (rendezvous.py): the supervisor has chosen the
   node's rank and a port on node 0. `max_restarts` is 0, so every failure ends the generation, and only the
   supervisor starts another, with a new run id and port. (An agent that retries by itself finds a store full
   of old keys: pytorch#135712, #147064.)
3. It forks the ranks (ranks.py), or starts the user's command through `processes.main`. Each rank has
   its own log: logs/g001/node0/rank0.log.
4. When the ranks have ended, it writes logs/g001/node0/report.json and exits.

The agent is a process and not a thread of the Ray actor, because torch replaces signal handlers in the main
thread and cannot be stopped from another one. Cost per generation: 0.1 s with forks; as programs, 1-2 s of
one core per agent and 3-4 s per rank.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.config.resize import CONFIG_VARIABLE, MESH_VARIABLE
from ...train.record.heartbeat import FOLDER
from ...train.record.process_log import keep_log
from ...train.record.redaction import redact
from ..report.tracebacks import last_traceback, read_tail, summarise
from . import processes
from .assignment import AgentReport, Assignment, RankFailure

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from .ranks import ForkedRank

# The supervisor ends a start that takes too long. It excuses time without a CPU, which agents cannot see.
MEETING_S = 86400.0
LOG_TAIL_BYTES = 64 * 1024  # searched for a traceback


def _read_secret() -> str:
    """Reads the secret from standard input, and leaves it empty for the ranks."""
    secret = sys.stdin.readline().strip()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return secret


def main(log_dir: Path, *, forks_ranks: bool = False) -> int:
    """Runs one generation's ranks on this node and writes a report.

    Args:
        log_dir: of this node in this generation.
        forks_ranks: this process has imported what ranks need and has one thread. In a fork, this function
            returns when the rank has ended.
    """
    processes.bind_to_parent()
    os.environ[processes.PARENT] = str(os.getpid())  # for the ranks
    assignment, forked = Assignment.load(log_dir / "assignment.json"), None
    if assignment.log_dir != log_dir:
        sys.exit(f"{log_dir}/assignment.json is of another run: it says {assignment.log_dir}")
    os.environ[FOLDER] = str(assignment.heartbeats)  # a fork inherits the template's environment
    if forks_ranks:
        from .ranks import WaitingRank, fork_ranks

        # before there is a secret or a second thread
        forked = fork_ranks(assignment.ranks, log_dir, assignment.launch.run_dir)
        if isinstance(forked, WaitingRank):
            return forked.run()
    assignment = replace(assignment, secret=_read_secret())
    keep_log()
    try:
        report = _run_elastic_agent(assignment, forked)
    except Exception as error:  # noqa: BLE001 - the supervisor must get a report of any failure
        report = AgentReport(ok=False, message=f"{type(error).__name__}: {error}")
    report.save(log_dir, otherwise=assignment.heartbeats)  # in memory: a full disk hides no cause
    return 0 if report.ok else 1


def _run_elastic_agent(
    assignment: Assignment, forked: "Sequence[ForkedRank] | None"
) -> AgentReport:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from .ranks import RankAgent, forks, programs
    from .rendezvous import Meeting, NodeRendezvous

    launch = assignment.launch
    os.environ[MESH_VARIABLE] = json.dumps(launch.mesh)
    os.environ[CONFIG_VARIABLE] = launch.config_file
    meeting = Meeting(
        name=f"{launch.name}-g{assignment.generation}",
        node_rank=assignment.node_rank,
        num_nodes=launch.num_nodes,
        address=assignment.master_address,
        port=assignment.master_port,
        secret=assignment.secret,
        timeout_s=MEETING_S,
    )
    _choose_interface(assignment, on_one_machine=meeting.is_on_one_machine)
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.ranks_per_node,
        entrypoint="rank",  # a name for torch's log: `start_rank` starts it
        rdzv_handler=NodeRendezvous(meeting),
        max_restarts=0,
        local_addr=assignment.address,
    )
    start_rank = programs(assignment.log_dir, launch.rank_command())
    if forked is not None:
        start_rank = forks(forked)
    result: Any = RankAgent(spec, start_rank).run()
    failures = tuple(
        _describe_failure(assignment, rank, failure)
        for rank, failure in sorted(result.failures.items())
    )
    return AgentReport(ok=not result.is_failed(), failures=failures)


def _choose_interface(assignment: Assignment, *, on_one_machine: bool) -> None:
    """Makes Gloo listen on the interface that the job's nodes share, unless the user has chosen one.

    Gloo's default is the interface of the host's name. NCCL gets the interface only if it is the loopback: in
    a cluster it may know a faster network.
    """
    from ...distributed.process.store import LOOPBACK

    interface = interface_of(LOOPBACK if on_one_machine else assignment.address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if on_one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address; None if there is none."""
    import psutil

    from ...distributed.process.store import is_loopback, loopback_interface

    if is_loopback(address):  # psutil does not list 127.0.0.2 and so on
        return loopback_interface()
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _describe_failure(assignment: Assignment, rank: int, failure: "ProcessFailure") -> RankFailure:
    tail = read_tail(assignment.log_dir / f"rank{rank}.log", LOG_TAIL_BYTES)
    traceback = redact(last_traceback(tail))  # the agent has the ranks' environment
    error, where = summarise(traceback)
    return RankFailure(
        rank, failure.exitcode, float(failure.timestamp), error, where, traceback or None
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
