"""Calls a node on another machine: a Ray actor behind a network."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..liveness import beat
from ..supervise.fencing import ReplacedError
from .node import Node
from .provider import NodeLost

# A node answers within milliseconds, or within seconds if processes are slow to end.
CALL_TIMEOUT_S = 30.0
BEAT_EVERY_S = 5.0  # while waiting for an answer

P = ParamSpec("P")
R = TypeVar("R")


def _remote(
    method: Callable[Concatenate[Node, P], R],
) -> Callable[Concatenate["RemoteNode", P], R]:
    """Returns a method that calls a method of `Node` on the other machine."""

    def call(node: "RemoteNode", *arguments: P.args, **named: P.kwargs) -> R:
        if named:
            raise TypeError(f"{method.__name__} takes arguments by position alone, not {[*named]}")
        return node._call(method.__name__, *arguments)

    return call


class RemoteNode:
    """Stands for a node on another machine; every failure of actor, node or network is NodeLost."""

    def __init__(self, actor: Any, supervisor: int, run_dir: Path):
        self._actor = actor
        self._supervisor = supervisor
        self._run_dir = run_dir
        self._address = ""
        self._ready = actor.serve.remote(supervisor, "describe")
        self.is_dead = False
        self.node_id = ""  # set once it is up

    describe = _remote(Node.describe)
    check = _remote(Node.check)
    unkillable = _remote(Node.unkillable)
    unreachable = _remote(Node.unreachable)
    free_port = _remote(Node.free_port)
    start = _remote(Node.start)
    poll = _remote(Node.poll)
    heartbeats = _remote(Node.heartbeats)
    gather_evidence = _remote(Node.gather_evidence)
    running_ranks = _remote(Node.running_ranks)
    kill_rank = _remote(Node.kill_rank)
    stop = _remote(Node.stop)

    def is_up(self, *, timeout_s: float) -> bool:
        """Returns whether the actor has started; waits at most `timeout_s`."""
        try:
            told: Any = ray.get(self._ready, timeout=timeout_s)
            self.node_id, self._address = told["node_id"], told["address"]
        except GetTimeoutError:
            return False
        except RayError:
            self.is_dead = True
            return False
        return True

    def is_alive(self) -> bool:
        """Returns whether the actor answers."""
        try:
            self.describe()
        except NodeLost:
            return False
        return True

    def end(self) -> None:
        """Ends the ranks, the template and the actor."""
        if self.node_id:  # otherwise the actor waits for its place and would not answer
            with contextlib.suppress(NodeLost):  # nothing is left to end
                self._call("end")
        self.forget()

    def forget(self) -> None:
        """Kills the actor, now or when its network is back, to free its place."""
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._await(self._actor.serve.remote(self._supervisor, method, *arguments))
        except RayTaskError as error:
            if isinstance(error.cause, ReplacedError):
                raise ReplacedError(str(error.cause)) from None
            raise NodeLost(f"its agent failed in {method}: {error.cause!r}") from error
        except GetTimeoutError as error:
            raise NodeLost(
                f"its agent at {self._address} did not answer {method} within "
                f"{CALL_TIMEOUT_S:.0f} s"
            ) from error
        except RayError as error:
            at = f" at {self._address}" if self._address else ""
            raise NodeLost(f"its agent actor died{at} ({_first_line(error)})") from error

    def _await(self, answer: Any) -> Any:
        """Waits for an answer while sending heartbeats: Ray reports a cut network only after a minute."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return ray.get(answer, timeout=max(0.0, min(BEAT_EVERY_S, left_s)))
            except GetTimeoutError:
                if left_s <= BEAT_EVERY_S:
                    raise
                beat(self._run_dir)


def _first_line(error: Exception) -> str:
    """Returns the first line of Ray's message, without half a page from its libraries."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("; last error")[0]
