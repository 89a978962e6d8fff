"""Declares where a job's nodes come from, and what the supervisor asks of a node."""

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
    """Says that a node does not answer: its actor, its machine or its network is gone."""


class NodesUnavailable(Exception):
    """Says that the cluster will never provide the nodes of a launch, and what is missing."""


@dataclass(frozen=True)
class Capacity:
    """Holds how many nodes could take part in the job."""

    could: int  # live and large enough, whoever uses them
    free: int  # of these, the job's own and unused ones
    what: str = "room"  # that a node must have
    have: str = ""  # what the cluster's nodes have
    leaving: tuple[str, ...] = ()  # the job's own that will be taken away; not counted above
    trouble: str = ""  # of the cluster itself, for the journal


class NodeHandle(Protocol):
    """Declares what the supervisor asks of a node; every call may raise NodeLost (node.Node)."""

    def describe(self) -> dict[str, Any]: ...
    def check(self, wanted: NodeCheck) -> str: ...
    def unkillable(self, run_dir: str) -> str: ...
    def free_port(self) -> int: ...
    def start(self, assignment: Assignment) -> None: ...
    def poll(self) -> AgentReport | None: ...
    def heartbeats(self) -> list[RankState]: ...
    def gather_evidence(self) -> list[Evidence]: ...
    def starved_s(self) -> float: ...
    def unreachable(self, others: Sequence[Address]) -> list[int]: ...
    def running_ranks(self) -> list[int]: ...
    def kill_rank(self, rank: int) -> bool: ...
    def stop(self) -> None: ...


class NodeProvider(Protocol):
    """Declares where a job's nodes come from."""

    def capacity(self) -> Capacity:
        """Returns what the cluster can offer the job now."""
        ...

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns `num_nodes` live nodes in rank order, replacing lost ones.

        Args:
            while_waiting: called several times a second with the reason; its exceptions end the waiting.

        Raises:
            NodesUnavailable: the cluster cannot hold the job.
        """
        ...

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns an earlier supervisor's live nodes in rank order; called before nodes are asked for."""
        ...

    def exclude(self, node: NodeHandle, why: str) -> None:
        """Stops using a node.

        Raises:
            NodesUnavailable: there is no other.
        """
        ...

    def release(self) -> None:
        """Ends everything on the nodes and releases them."""
        ...


class ThisMachine:
    """Provides one node: this machine."""

    def __init__(self, launch: Launch | None = None) -> None:
        """Starts the template for `launch`; None: nothing."""
        self._node = Node(launch=launch)

    def capacity(self) -> Capacity:
        """Returns the capacity of one node."""
        return Capacity(1, 1, have="this machine")

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns this machine at once."""
        return [self._node]

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns none: whatever ran here has ended with its supervisor."""
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
