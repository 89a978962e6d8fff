"""The node agent's working half: torchrun's elastic agent in a process of its own, and the hand
that holds it.

One attempt of a job (a *generation*) on one node runs like this:

1. `Node.start` ends what earlier generations left on this machine and lets its template fork a
   child (warm/). A node without a template starts `python -m moebius.cluster.nodes.agent`.
2. The child binds itself to its parent and runs torch's LocalElasticAgent. Its rendezvous
   (rendezvous.py) is given: the supervisor has chosen the node's rank, a port on node 0 and, for
   several machines, a secret, which the child reads from a pipe. `max_restarts` is 0: whatever goes
   wrong ends the generation; only the supervisor starts another one, with a new run id and a
   new port (an agent that retries by itself meets a store full of the last attempt's keys:
   pytorch#135712, #147064).
3. The agent forks the ranks (warm/spares.py), or starts a command of the user's through
   `moebius.cluster.nodes.rank`. Each has its log: logs/g001/node0/rank0.log.
4. When the ranks have ended the child writes logs/g001/node0/report.json and exits; `Node.poll`
   returns the report.

The agent is a child process, not a thread of the Ray actor: torch replaces signal handlers in the
main thread and cannot be stopped from another one. Cost of a generation's processes: 0.1 s by
forks; as programs 1-2 s of one core for each agent and 3-4 s for each rank.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...train.config.resize import MESH_VARIABLE
from ...train.record.heartbeat import FOLDER
from ...train.record.process_log import LOG, LogLimits, keep_log
from ...train.record.redaction import redact, redact_values
from ..job import Launch, write_atomically
from ..recovery.deadman import Deadman
from ..recovery.unkillable import unkillable
from ..report.tracebacks import last_traceback, read_tail, summarise
from ..watch.heartbeats import folder_of
from ..watching.node import WatchingNode
from . import processes
from .node_check import NodeCheck
from .template_process import AgentProcess, Template, start_program

if TYPE_CHECKING:
    from .spares import Spare

EXIT_BARRIER_S = (
    60.0  # how long an agent whose ranks are done waits for the agents of the other nodes
)
LOG_TAIL_BYTES = 64 * 1024  # where a traceback is looked for

# Ray gives its workers OMP_NUM_THREADS=1 and its own credentials; the ranks are not Ray's and get
# neither.
_RAY_ONLY = ("RAY_", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Attempt:
    """Says what one node must know of one generation of a job."""

    launch: Launch
    generation: int
    node_rank: int
    master_address: str  # of node 0, where the agents' store listens
    master_port: int
    address: str  # of this node, as the others reach it
    # Which agents of the job know; of this generation. Empty where all nodes are on one machine.
    secret: str = field(default="", repr=False)

    @property
    def log_dir(self) -> Path:
        """Returns the folder of this node's logs in this generation, below the run folder."""
        return (
            Path(self.launch.run_dir) / "logs" / f"g{self.generation:03d}" / f"node{self.node_rank}"
        )

    @property
    def heartbeats(self) -> Path:
        """Returns the folder, in this machine's memory, where the node's ranks say where they are."""
        return folder_of(self.launch.run_dir, self.generation, self.node_rank)

    @property
    def ranks(self) -> range:
        """Returns the global ranks that live on this node."""
        first = self.node_rank * self.launch.ranks_per_node
        return range(first, first + self.launch.ranks_per_node)

    def save(self, path: Path) -> None:
        """Writes all but secrets as JSON; ranks inherit their environment from the agent."""
        plain = asdict(self)
        del plain["launch"]["environment"], plain["secret"]
        write_atomically(path, json.dumps(plain, indent=1))

    @classmethod
    def load(cls, path: Path, *, secret: str = "") -> "Attempt":
        """Reads what `save` wrote; the secret comes by another way."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        launch = plain.pop("launch")
        launch["command"] = tuple(launch["command"])
        return cls(launch=Launch(**launch), secret=secret, **plain)


@dataclass(frozen=True)
class RankFailure:
    """Describes a rank that ended with something else than exit code 0."""

    rank: int
    exit_code: int
    time: float  # seconds since the epoch, to the second
    error: str | None = None  # last line of the traceback
    where: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class AgentReport:
    """Says how one node's part of a generation ended."""

    ok: bool  # every rank of this node exited 0
    failures: tuple[RankFailure, ...] = ()
    message: str = ""  # what ended the agent itself, if that was it
    exit_code: int | None = None  # of an agent that ended without a report

    @classmethod
    def load(cls, path: Path) -> "AgentReport":
        """Reads a report that an agent left as JSON."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        failures = tuple(RankFailure(**failure) for failure in plain["failures"])
        return cls(**{**plain, "failures": failures})


class Node(WatchingNode):
    """Runs agents on one machine, for the supervision; on another machine as a Ray actor."""

    def __init__(self, address: str = "127.0.0.1", launch: Launch | None = None):
        """Starts the template, if the node is told what it will be needed for.

        Args:
            address: of this node.
            launch: the job; None: agents and ranks are started as programs.
        """
        self._address = address
        self._attempt: Attempt | None = None
        self._agent: AgentProcess | None = None
        self._deadman: Deadman | None = None
        self._warms_for = launch if launch and launch.warm_start and processes.IS_LINUX else None
        self._template: Template | None = None
        self._warm_up()

    def describe(self) -> dict[str, Any]:
        """Returns where this node is and what it runs: every node of a job must run the same."""
        return {
            "address": self._address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": versions(),
            "starts": self._how_agents_start(),
            "runs": self._runs(),
        }

    def check(self, wanted: NodeCheck) -> str:
        """Returns what this node lacks for a job, or ""."""
        return wanted.faults()

    def unkillable(self, run_dir: str) -> str:
        """Returns which processes of a run cannot be ended here, or ""; before ranks are started."""
        return unkillable(run_dir, self._address)

    def free_port(self) -> int:
        """Returns a port of this node's address that is free now.

        It may be taken before it is used, which ends in a new generation.
        """
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return probe.getsockname()[1]

    def start(self, attempt: Attempt) -> None:
        """Starts the agent of a generation, after ending all that earlier ones left on this
        machine.
        """
        self.stop()
        # what cannot be ended is another pretended node's: for its own `unkillable` was asked
        processes.end(processes.find(attempt.launch.run_dir, before=attempt.generation))
        attempt.log_dir.mkdir(parents=True, exist_ok=True)
        attempt.save(attempt.log_dir / "attempt.json")
        self._attempt = attempt
        self.begin_watch(attempt.heartbeats, attempt.ranks, attempt.log_dir)
        self._warm_up()  # the last template may have been killed
        template = self._template
        if template is None:
            self._agent = _execute(attempt)
        else:
            self._agent = template.order(
                attempt.log_dir,
                attempt.generation,
                attempt.secret,
                otherwise=lambda: _execute(attempt, why=template.refusal),
            )
        self._deadman = Deadman(attempt.launch.supervisor_timeout_s, self._agent.kill)

    def poll(self) -> AgentReport | None:
        """Returns the agent's report, or None while the ranks run."""
        assert self._agent is not None, "start comes first"
        assert self._attempt is not None
        if self._deadman is not None:
            self._deadman.hear()
        code = self._agent.poll()
        report = self._attempt.log_dir / "report.json"
        if report.exists():  # the last that an agent does; nobody waits for the end of its process
            return AgentReport.load(report)
        if code is None:
            return None
        tail = read_tail(self._attempt.log_dir / "agent.log", 2000).strip()
        return AgentReport(
            ok=False,
            message=f"the agent process ended with exit code {code}; its last words: {tail}",
            exit_code=code,
        )

    def running_ranks(self) -> list[int]:
        """Returns the global ranks of this node whose process is alive."""
        return sorted(self._rank_pids())

    def kill_rank(self, rank: int) -> bool:
        """Kills one rank (fault drills); returns False when it was not alive."""
        pid = self._rank_pids().get(rank)
        return pid is not None and processes.kill(pid)

    def stop(self) -> None:
        """Ends the agent and its ranks, and waits until they are gone."""
        if self._agent is None or self._attempt is None:
            return
        if self._deadman is not None:
            self._deadman.end()
        if self._agent.poll() is None:
            self._agent.kill()  # its ranks follow: they are bound to it
        self._agent.wait()
        mine = processes.find(self._attempt.launch.run_dir, generation=self._attempt.generation)
        ranks = self._attempt.ranks
        processes.end(
            pid for pid, marks in mine.items() if int(marks.get(processes.RANK, "-1")) in ranks
        )
        self._agent = None
        self.end_watch()

    def end(self) -> None:
        """Ends the agent, its ranks and the template; nothing is left of this node."""
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
        log = (
            Path(launch.run_dir)
            / "logs"
            / "templates"
            / f"{socket.gethostname()}-{os.getpid()}.log"
        )
        self._template = Template(launch, node_environment(os.environ, launch), log)

    def _how_agents_start(self) -> str:
        if self._template is None:
            return "as programs"
        refusal = self._template.refusal
        return f"as programs: {refusal}" if refusal else "as forks"

    def _runs(self) -> list[int]:
        """Returns generation and node rank of what was started here last and not ended since."""
        if self._agent is None or self._attempt is None:
            return []
        return [self._attempt.generation, self._attempt.node_rank]

    def _rank_pids(self) -> dict[int, int]:
        assert self._attempt is not None, "start comes first"
        found = processes.find(self._attempt.launch.run_dir, generation=self._attempt.generation)
        ranks = {
            int(environment["RANK"]): pid
            for pid, environment in found.items()
            if "RANK" in environment
        }
        return {rank: pid for rank, pid in ranks.items() if rank in self._attempt.ranks}


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on every node of a job."""
    return {
        "moebius": __version__,
        "torch": metadata.version("torch").partition("+")[0],
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def node_environment(inherited: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Returns the environment of all that a node starts for a job, whatever the generation."""
    kept = {key: value for key, value in inherited.items() if not key.startswith(_RAY_ONLY)}
    own = {
        processes.MARK: launch.run_dir,
        processes.PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",  # a killed rank's last words must be in its log
        # with the shared store, restarts fail (pytorch#135712)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if launch.gpus_per_node == 0:
        own["CUDA_VISIBLE_DEVICES"] = ""
    return kept | dict(launch.environment) | own


def agent_environment(inherited: Mapping[str, str], attempt: Attempt) -> dict[str, str]:
    """Returns the environment of the agent and, through it, of the ranks."""
    own = {
        processes.MARK_GENERATION: str(attempt.generation),
        FOLDER: str(attempt.heartbeats),
    }
    return node_environment(inherited, attempt.launch) | own


def _execute(attempt: Attempt, *, why: str | None = None) -> AgentProcess:
    return start_program(
        attempt.log_dir, agent_environment(os.environ, attempt), attempt.secret, why=why
    )


def _hear_secret() -> str:
    """Reads the secret from standard input, which the ranks will find empty."""
    secret = sys.stdin.readline().strip()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return secret


def main(log_dir: Path, *, forks_ranks: bool = False) -> int:
    """Runs one generation's ranks on this node and leaves a report: the child process.

    Args:
        log_dir: of this node in this generation.
        forks_ranks: this process has imported what ranks need, and has one thread. In the forks
            this function returns when the rank has ended.
    """
    processes.bind_to_parent()
    os.environ[processes.PARENT] = str(os.getpid())  # for the ranks
    attempt, spares = Attempt.load(log_dir / "attempt.json"), None
    os.environ[FOLDER] = str(attempt.heartbeats)  # a fork has the template's environment
    if forks_ranks:
        from .spares import WaitingRank, fork_ranks

        # before there is a secret or a thread
        spares = fork_ranks(attempt.ranks, log_dir, attempt.launch.run_dir)
        if isinstance(spares, WaitingRank):
            return spares.run()
    attempt = replace(attempt, secret=_hear_secret())
    limits = LogLimits(attempt.launch.log_max_bytes, attempt.launch.log_pieces)
    keep_log(log_dir / "agent.log", limits)
    os.environ[LOG] = limits.for_ranks(log_dir)
    try:
        report = _run_elastic_agent(attempt, spares)
    except Exception as error:  # noqa: BLE001 - the supervisor must get a report of whatever it is
        report = AgentReport(ok=False, message=f"{type(error).__name__}: {error}")
    write_atomically(log_dir / "report.json", json.dumps(asdict(report), indent=1))
    return 0 if report.ok else 1


def _run_elastic_agent(attempt: Attempt, spares: "Sequence[Spare] | None") -> AgentReport:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from .rendezvous import Meeting, NodeRendezvous

    launch = attempt.launch
    os.environ[MESH_VARIABLE] = json.dumps(launch.mesh)
    meeting = Meeting(
        name=f"{launch.name}-g{attempt.generation}",
        node_rank=attempt.node_rank,
        num_nodes=launch.num_nodes,
        address=attempt.master_address,
        port=attempt.master_port,
        secret=attempt.secret,
        timeout_s=launch.start_timeout_s,
    )
    _choose_interface(attempt, on_one_machine=meeting.is_on_one_machine)
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.ranks_per_node,
        entrypoint=sys.executable,
        args=("-m", f"{__package__}.rank", str(attempt.log_dir), *launch.rank_command()),
        rdzv_handler=NodeRendezvous(meeting),
        max_restarts=0,
        local_addr=attempt.address,
    )
    make: Callable[..., LocalElasticAgent] = LocalElasticAgent
    if spares is not None:
        from .spares import WarmElasticAgent

        make = partial(WarmElasticAgent, spares=spares)
    result: Any = make(spec, _stable_logs(attempt), exit_barrier_timeout=EXIT_BARRIER_S).run()
    failures = tuple(
        _describe_failure(attempt, rank, failure)
        for rank, failure in sorted(result.failures.items())
    )
    return AgentReport(ok=not result.is_failed(), failures=failures)


def _choose_interface(attempt: Attempt, *, on_one_machine: bool) -> None:
    """Lets Gloo listen where the job's nodes reach each other, and not where the host's name points
    to; unless the user has said where.

    NCCL listens there too if that is the loopback. In a cluster it may know a faster network.
    """
    from ...distributed.process.store import LOOPBACK

    interface = interface_of(LOOPBACK if on_one_machine else attempt.address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if on_one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has an address; None if none has."""
    import psutil

    from ...distributed.process.store import is_loopback, loopback_interface

    if is_loopback(address):  # 127.0.0.2 and so on are nowhere listed
        return loopback_interface()
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _stable_logs(attempt: Attempt) -> Any:
    """Torch's log specification for our paths: it opens no files (the ranks do), and places the
    error files.
    """
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.api import LogsDest

    class StableLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(attempt.log_dir)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for environment in envs.values():
                environment["TORCHELASTIC_ERROR_FILE"] = str(
                    error_file(attempt, int(environment["RANK"]))
                )
            files = {
                local_rank: environment["TORCHELASTIC_ERROR_FILE"]
                for local_rank, environment in envs.items()
            }
            agents_own = dict.fromkeys(envs, "")
            return LogsDest(stdouts=agents_own, stderrs=dict(agents_own), error_files=files)

    return StableLogs(str(attempt.log_dir))


def error_file(attempt: Attempt, rank: int) -> Path:
    """Returns where a rank whose main function carries torch's @record leaves its exception."""
    return attempt.log_dir / f"rank{rank}.error.json"


def _describe_failure(attempt: Attempt, rank: int, failure: Any) -> RankFailure:
    _redact_file(error_file(attempt, rank))  # it is in nobody's way, and stays
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
    else:
        traceback = last_traceback(read_tail(attempt.log_dir / f"rank{rank}.log", LOG_TAIL_BYTES))
    traceback = redact(traceback)  # this process has the ranks' environment
    error, where = summarise(traceback)
    return RankFailure(
        rank, failure.exitcode, float(failure.timestamp), error, where, traceback or None
    )


def _redact_file(path: Path) -> None:
    """Blots secrets out of a file of JSON, if it is there."""
    with contextlib.suppress(OSError, ValueError):
        plain = redact_values(json.loads(path.read_text(encoding="utf-8")))
        write_atomically(path, json.dumps(plain))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
