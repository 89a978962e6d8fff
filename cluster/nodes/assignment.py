"""What a node is told to run in one generation of a job, and what it reports back: plain values."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..job import Launch, write_atomically
from ..watch.heartbeats import folder_of


@dataclass(frozen=True)
class Assignment:
    """Tells one node what to run in one generation of a job."""

    launch: Launch
    generation: int
    node_rank: int
    master_address: str  # of node 0, where the agents' store listens
    master_port: int
    address: str  # of this node, as the others reach it
    # Known to the agents of this generation alone; empty where all nodes are on one machine.
    secret: str = field(default="", repr=False)

    @property
    def log_dir(self) -> Path:
        """Returns the folder of this node's logs in this generation, below the run folder."""
        logs = Path(self.launch.run_dir) / "logs"
        return logs / f"g{self.generation:03d}" / f"node{self.node_rank}"

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
    def load(cls, path: Path, *, secret: str = "") -> "Assignment":
        """Reads what `save` wrote; the secret comes by another way."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        launch = plain.pop("launch")
        launch["command"] = tuple(launch["command"])
        return cls(launch=Launch(**launch), secret=secret, **plain)


@dataclass(frozen=True)
class RankFailure:
    """Describes a rank that ended with another exit code than 0."""

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
        """Reads the report that an agent left as JSON."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        failures = tuple(RankFailure(**failure) for failure in plain["failures"])
        return cls(**{**plain, "failures": failures})
