"""Runs a node of a job: starts agents on its machine and answers the supervisor's questions.

`Node` ends what earlier generations left on this machine, makes its template fork an agent
(template_process.py; without a template, it runs `python -m moebius.cluster.nodes.agent`), and reads the
agent's report. On another machine it is a Ray actor (ray_nodes.py).
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ..job import Launch
from ..report.tracebacks import read_tail
from ..watch.evidence import Evidence, gather
from ..watch.heartbeats import RankState, WatchedRanks
from . import processes
from .assignment import AgentReport, Assignment
from .node_check import NodeCheck
from .template_process import AgentProcess, Template, start_program

WATCHDOG_TICK_S = 1.0
CONNECT_S = 4.0  # Linux resends lost SYNs after 1 s and 3 s
_AT_ONCE = 32

# Ray sets OMP_NUM_THREADS=1 and its credentials for its own workers; ranks get neither.
_RAY_ONLY = ("RAY_", "OMP_NUM_THREADS")

Address = tuple[str, int]  # host and port at which a node listens for the others


class Watchdog:
    """Calls `act` once, from a thread, if it is not reset for `limit_s`.

    A supervisor that is gone or cut off restarts the job elsewhere, so ranks here must not hold devices that
    nobody knows of. (The generation's number fences their checkpoints in any case.)

    Silence is counted in ticks of this process, not by a clock: a process that was itself stopped (SIGSTOP, a
    sleeping machine) could not have heard anything.
    """

    def __init__(self, limit_s: float, act: Callable[[], None], *, tick_s: float = WATCHDOG_TICK_S):
        self._limit_s, self._act, self._tick_s = limit_s, act, tick_s
        self._silent_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def reset(self) -> None:
        """Restarts the count of silence."""
        self._silent_s = 0.0

    def end(self) -> None:
        """Ends the watchdog thread without calling `act`."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._tick_s):
            self._silent_s += self._tick_s
            if self._silent_s >= self._limit_s:
                return self._act()


@dataclass(frozen=True)
class _Part:
    """Holds this node's part of a generation."""

    assignment: Assignment
    agent: AgentProcess
    ranks: WatchedRanks
    watchdog: Watchdog

    def marked(self) -> dict[int, Mapping[str, str]]:
        """Returns the processes of this node's ranks, with what their marks say."""
        assignment = self.assignment
        found = processes.find(assignment.launch.run_dir, generation=assignment.generation)
        return {
            pid: marks
            for pid, marks in found.items()
            if int(marks.get(processes.RANK, "-1")) in assignment.ranks
        }


class Node:
    """Runs agents on one machine, for the supervisor."""

    def __init__(self, address: str = "127.0.0.1", launch: Launch | None = None):
        """Starts the template, if the job is known.

        Args:
            address: of this node.
            launch: the job; None: agents and ranks start as programs.
        """
        self._address = address
        self._running: _Part | None = None
        self._warms_for = launch if launch and launch.warm_start and processes.IS_LINUX else None
        self._template: Template | None = None
        self._warm_up()

    def describe(self) -> dict[str, Any]:
        """Returns where this node is, its software versions, and what it runs."""
        return {
            "address": self._address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": versions(),
            "starts": self._how_agents_start(),
            "runs": self._runs(),
        }

    def check(self, wanted: NodeCheck) -> str:
        """Returns what this node lacks for a job, or "" if nothing."""
        return wanted.faults()

    def unkillable(self, run_dir: str) -> str:
        """Describes a run's processes here that cannot be killed, or ""; called before ranks start."""
        return processes.unkillable(run_dir, self._address)

    def unreachable(self, others: Sequence[Address]) -> list[int]:
        """Returns the indices of the other nodes that cannot be reached from here."""
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(others)))) as pool:
            found = enumerate(pool.map(can_connect, others))
        return [place for place, is_reached in found if not is_reached]

    def free_port(self) -> int:
        """Returns a port of this node's address that is free now.

        If another process takes it before it is used, a new generation follows.
        """
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return probe.getsockname()[1]

    def start(self, assignment: Assignment) -> None:
        """Starts the agent of a generation, after ending everything of earlier ones here."""
        self.stop()
        # processes that cannot be killed belong to another simulated node: `unkillable` came first
        processes.end(processes.find(assignment.launch.run_dir, before=assignment.generation))
        assignment.log_dir.mkdir(parents=True, exist_ok=True)
        assignment.save(assignment.log_dir / "assignment.json")
        ranks = WatchedRanks(assignment.heartbeats, assignment.ranks)
        ranks.open(assignment.launch.run_dir)
        self._warm_up()  # the last template may have been killed
        template = self._template
        if template is None:
            agent = _run_agent(assignment)
        else:
            agent = template.order(
                assignment.log_dir,
                assignment.generation,
                assignment.secret,
                otherwise=lambda: _run_agent(assignment, why=template.refusal),
            )
        watchdog = Watchdog(assignment.launch.supervisor_timeout_s, agent.kill)
        self._running = _Part(assignment, agent, ranks, watchdog)

    @property
    def _part(self) -> _Part:
        assert self._running is not None, "start comes first"
        return self._running

    def poll(self) -> AgentReport | None:
        """Returns the agent's report, or None while the ranks run."""
        part = self._part
        part.watchdog.reset()
        code, log_dir = part.agent.poll(), part.assignment.log_dir
        in_memory = part.assignment.heartbeats
        report = AgentReport.load(log_dir) or AgentReport.load(in_memory, of=log_dir)
        if report is not None:  # the agent's last act; its process may still be ending
            return report
        if code is None:
            return None
        tail = read_tail(log_dir / "agent.log", 2000).strip()
        return AgentReport(
            ok=False,
            message=f"the agent process ended with exit code {code}; its last output: {tail}",
            exit_code=code,
        )

    def heartbeats(self) -> list[RankState]:
        """Returns where the ranks are; a rank that has not begun to train is absent."""
        return self._part.ranks.look()

    def gather_evidence(self) -> list[Evidence]:
        """Asks hanging ranks where they are, and writes their answers to logs/g001/stall."""
        part = self._part
        stall_dir = part.assignment.log_dir.parent / "stall"
        return gather(part.ranks.folder, part.ranks.beats(), stall_dir)

    def starved_s(self) -> float:
        """Returns how long the processes of the start had to wait for a CPU, from template to ranks."""
        return self._part.ranks.starved_at_start_s()

    def running_ranks(self) -> list[int]:
        """Returns the global ranks of this node that are alive."""
        return sorted(self._rank_pids())

    def kill_rank(self, rank: int) -> bool:
        """Kills one rank for a fault drill; returns False if it was not alive."""
        pid = self._rank_pids().get(rank)
        return pid is not None and processes.kill(pid)

    def stop(self) -> None:
        """Ends the agent and its ranks, and waits for their end."""
        part = self._running
        if part is None:
            return
        part.watchdog.end()
        if part.agent.poll() is None:
            part.agent.kill()  # its ranks are bound to it and follow
        part.agent.wait()
        processes.end(part.marked())
        self._running = None
        part.ranks.close()

    def end(self) -> None:
        """Ends the agent, its ranks and the template."""
        try:
            self.stop()
        finally:
            if self._template is not None:
                self._template.end()
                self._template = None

    def _warm_up(self) -> None:
        if self._warms_for is None or (self._template and self._template.has_not_ended):
            return
        launch = self._warms_for
        folder = Path(launch.run_dir) / "logs" / "templates"
        log = folder / f"{socket.gethostname()}-{os.getpid()}.log"
        self._template = Template(launch, node_environment(os.environ, launch), log)

    def _how_agents_start(self) -> str:
        if self._template is None:
            return "as programs"
        refusal = self._template.refusal
        return f"as programs: {refusal}" if refusal else "as forks"

    def _runs(self) -> list[int]:
        """Returns the generation and node rank of the running agent; empty if it has ended."""
        if self._running is None:
            return []
        assignment = self._running.assignment
        return [assignment.generation, assignment.node_rank]

    def _rank_pids(self) -> dict[int, int]:
        return {int(marks[processes.RANK]): pid for pid, marks in self._part.marked().items()}


def can_connect(address: Address, *, timeout_s: float = CONNECT_S) -> bool:
    """Returns whether something accepts connections at this address."""
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True


def versions() -> dict[str, str]:
    """Returns the versions that must match on all nodes of a job."""
    return {
        "moebius": __version__,
        "torch": metadata.version("torch").partition("+")[0],
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def node_environment(inherited: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Returns the environment of everything that a node starts for a job, in any generation."""
    kept = {key: value for key, value in inherited.items() if not key.startswith(_RAY_ONLY)}
    own = {
        processes.MARK: launch.run_dir,
        processes.PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",  # a killed rank's last words must be in its log
        # with a shared store, restarts fail (pytorch#135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if launch.gpus_per_node == 0:
        own["CUDA_VISIBLE_DEVICES"] = ""
    return kept | dict(launch.environment) | own


def _run_agent(assignment: Assignment, *, why: str | None = None) -> AgentProcess:
    environment = node_environment(os.environ, assignment.launch) | {
        processes.MARK_GENERATION: str(assignment.generation),
    }
    return start_program(assignment.log_dir, environment, assignment.secret, why=why)
