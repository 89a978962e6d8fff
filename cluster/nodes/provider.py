"""Where a job's nodes come from, and what the supervision asks of a node.

A cluster gives them (supervisor.py), or this machine alone is the one node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..job import Launch
from ..watch.evidence import Evidence
from ..watch.heartbeats import RankState
from .assignment import AgentReport, Assignment
from .node import Address, Node
from .node_check import NodeCheck


class NodeLost(Exception):
    """Says that a node does not answer: its actor, its machine or the network to it is gone."""


class NodesUnavailable(Exception):
    """Says that the nodes which the launch needs cannot be had, ever, and what is missing."""


@dataclass(frozen=True)
class Capacity:
    """Says how many nodes could take their part of the job."""

    could: int  # live ones that are large enough, whoever uses them
    free: int  # of these, the job's own and those that nobody uses
    what: str = "room"  # what a node must have
    have: str = ""  # what the cluster's nodes have
    leaving: tuple[str, ...] = ()  # the job's own that will be taken away; in none of the counts


class NodeHandle(Protocol):
    """Declares what the supervision asks of a node; every call may raise NodeLost (agent.Node)."""

    def describe(self) -> dict[str, Any]: ...
    def check(self, wanted: NodeCheck) -> str: ...
    def unkillable(self, run_dir: str) -> str: ...
    def free_port(self) -> int: ...
    def start(self, assignment: Assignment) -> None: ...
    def poll(self) -> AgentReport | None: ...
    def heartbeats(self) -> list[RankState]: ...
    def gather_evidence(self) -> list[Evidence]: ...
    def unreachable(self, others: Sequence[Address]) -> list[int]: ...
    def running_ranks(self) -> list[int]: ...
    def kill_rank(self, rank: int) -> bool: ...
    def stop(self) -> None: ...


class NodeProvider(Protocol):
    """Declares where a job's nodes come from."""

    def capacity(self) -> Capacity:
        """Returns what the cluster has for the job now."""
        ...

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns so many live nodes, in the order of their ranks.

        Replaces those that were lost.

        Args:
            while_waiting: called several times a second with what is being waited for; its
                exceptions end the waiting.

        Raises:
            NodesUnavailable: the cluster cannot hold the job.
        """
        ...

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns the living nodes of an earlier supervisor of this job, in the order of their ranks.

        Called at most once, before nodes are asked for.
        """
        ...

    def exclude(self, node: NodeHandle, why: str) -> None:
        """Uses a node no more.

        Raises:
            NodesUnavailable: there is no other.
        """
        ...

    def release(self) -> None:
        """Ends everything on the nodes and gives them back."""
        ...


class ThisMachine:
    """Provides one node: this machine."""

    def __init__(self, launch: Launch | None = None) -> None:
        """Starts what `launch` can be started from soon (agent.Node); None: nothing."""
        self._node = Node(launch=launch)

    def capacity(self) -> Capacity:
        """Returns that there is one node."""
        return Capacity(1, 1, have="this machine")

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns this machine, at once."""
        return [self._node]

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns none: what ran here has ended with who supervised it."""
        return ()

    def exclude(self, node: NodeHandle, why: str) -> None:
        """Raises NodesUnavailable: there is no other machine."""
        raise NodesUnavailable(
            f"{why}, and the job has no other machine: reboot this one (or repair the file "
            "system or driver that the process waits for), then run `moebius resume`"
        )

    def release(self) -> None:
        """Ends the agent, its ranks and the template process on this machine."""
        self._node.end()
