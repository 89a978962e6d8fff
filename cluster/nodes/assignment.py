"""Defines what a node is told to run in one generation, and what it reports back: plain values."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...data_pipeline.files import write_atomically
from ...train.record.untrusted import read_text
from ..job import Launch
from ..watch.heartbeats import folder_of

REPORT = "report.json"


@dataclass(frozen=True)
class Assignment:
    """Tells one node what to run in one generation of a job."""

    launch: Launch
    generation: int
    node_rank: int
    master_address: str  # of node 0, where the agents' store listens
    master_port: int
    address: str  # at which other nodes reach this one
    # known only to this generation's agents; empty if all nodes are on one machine
    secret: str = field(default="", repr=False)

    @property
    def log_dir(self) -> Path:
        """Returns the log folder of this node in this generation, inside the run folder."""
        logs = Path(self.launch.run_dir) / "logs"
        return logs / f"g{self.generation:03d}" / f"node{self.node_rank}"

    @property
    def heartbeats(self) -> Path:
        """Returns the folder in this machine's memory with the heartbeats of the node's ranks."""
        return folder_of(self.launch.run_dir, self.generation, self.node_rank)

    @property
    def ranks(self) -> range:
        """Returns the global ranks of this node."""
        first = self.node_rank * self.launch.ranks_per_node
        return range(first, first + self.launch.ranks_per_node)

    def save(self, path: Path) -> None:
        """Writes everything except secrets as JSON; ranks inherit the agent's environment."""
        plain = asdict(self)
        for key in ("environment", "configuration", "source"):
            del plain["launch"][key]
        del plain["secret"]
        write_atomically(path, json.dumps(plain, indent=1))

    @classmethod
    def load(cls, path: Path) -> "Assignment":
        """Reads an assignment that `save` wrote."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        launch = plain.pop("launch")
        launch["command"] = tuple(launch["command"])
        return cls(launch=Launch(**launch), **plain)


@dataclass(frozen=True)
class RankFailure:
    """Describes a rank with a nonzero exit code."""

    rank: int
    exit_code: int
    time: float  # seconds since the epoch, in whole seconds
    error: str | None = None  # last line of the traceback
    where: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class AgentReport:
    """Describes how one node's part of a generation ended."""

    ok: bool  # every rank of this node exited 0
    failures: tuple[RankFailure, ...] = ()
    message: str = ""  # why the agent itself failed
    exit_code: int | None = None  # of an agent that left no report
    log_dir: str = field(default="", compare=False)  # in which the agent wrote it

    @classmethod
    def load(cls, log_dir: Path, *, of: Path | None = None) -> "AgentReport | None":
        """Reads the report in a folder; None if there is none, a damaged one, or another agent's.

        Args:
            of: the agent's log folder; None: this folder.
        """
        try:
            plain = json.loads(read_text(log_dir / REPORT) or "")
            failures = tuple(RankFailure(**failure) for failure in plain["failures"])
            report = cls(**{**plain, "failures": failures})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return report if report.log_dir == str(of or log_dir) else None

    def save(self, log_dir: Path, *, otherwise: Path | None = None) -> None:
        """Writes the report as JSON, or into another folder if the first one's disk is full."""
        text = json.dumps(asdict(replace(self, log_dir=str(log_dir))), indent=1)
        try:
            write_atomically(log_dir / REPORT, text)
        except OSError:
            if otherwise is None:
                raise
            write_atomically(otherwise / REPORT, text)
