"""Where a job's nodes come from, and what the supervision asks of a node.

A cluster gives them (supervisor.py), or this machine alone is the one node.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .agent import AgentReport, Attempt, Node
from .job import Launch
from .watching.heartbeats import RankState


class NodeLost(Exception):
    """Says that a node does not answer: its actor, its machine or the network to it is gone."""


class NodesUnavailable(Exception):
    """Says that the nodes which the launch needs cannot be had, ever, and what is missing."""


class NodeHandle(Protocol):
    """Declares what the supervision asks of a node; every call may raise NodeLost (agent.Node)."""

    def describe(self) -> dict[str, Any]: ...
    def free_port(self) -> int: ...
    def start(self, attempt: Attempt) -> None: ...
    def poll(self) -> AgentReport | None: ...
    def heartbeats(self) -> list[RankState]: ...
    def running_ranks(self) -> list[int]: ...
    def kill_rank(self, rank: int) -> bool: ...
    def stop(self) -> None: ...


class NodeProvider(Protocol):
    """Declares where a job's nodes come from."""

    def provide_nodes(self, while_waiting: Callable[[str], None]) -> Sequence[NodeHandle]:
        """Returns as many live nodes as the launch asks for, in the order of their ranks.

        Replaces those that were lost.

        Args:
            while_waiting: called several times a second with what is being waited for; its
                exceptions end the waiting.

        Raises:
            NodesUnavailable: the cluster cannot hold the job.
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

    def provide_nodes(self, while_waiting: Callable[[str], None]) -> Sequence[NodeHandle]:
        """Returns this machine, at once."""
        return [self._node]

    def release(self) -> None:
        """Ends what runs here."""
        self._node.end()
