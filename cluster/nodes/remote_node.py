"""A node agent as the supervisor calls it: a Ray actor on another machine, behind a network."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..liveness import beat
from ..recovery.doors import Door
from ..recovery.term import ReplacedError
from ..watch.evidence import Evidence
from ..watch.heartbeats import RankState
from .agent import AgentReport, Attempt
from .node_check import NodeCheck
from .provider import NodeLost

# of a call to a node: it answers within milliseconds, or within seconds when processes resist
CALL_TIMEOUT_S = 30.0
BEAT_EVERY_S = 5.0  # while an answer is waited for


class RemoteNode:
    """Stands for a node agent; every failure of actor, node or network is NodeLost."""

    def __init__(self, actor: Any, term: int, run_dir: Path):
        self._actor = actor
        self._term = term
        self._run_dir = run_dir
        self._address = ""
        self._ready = actor.serve.remote(term, "describe")
        self.is_dead = False
        self.node_id = ""  # in the cluster, once it is up

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

    def describe(self) -> dict[str, Any]:
        """Calls `Node.describe` there."""
        return self._call("describe")

    def check(self, wanted: NodeCheck) -> str:
        """Calls `Node.check` there."""
        return self._call("check", wanted)

    def unkillable(self, run_dir: str) -> str:
        """Calls `Node.unkillable` there."""
        return self._call("unkillable", run_dir)

    def free_port(self) -> int:
        """Calls `Node.free_port` there."""
        return self._call("free_port")

    def start(self, attempt: Attempt) -> None:
        """Calls `Node.start` there."""
        self._call("start", attempt)

    def poll(self) -> AgentReport | None:
        """Calls `Node.poll` there."""
        return self._call("poll")

    def heartbeats(self) -> list[RankState]:
        """Calls `Node.heartbeats` there."""
        return self._call("heartbeats")

    def gather_evidence(self) -> list[Evidence]:
        """Calls `Node.gather_evidence` there."""
        return self._call("gather_evidence")

    def unreached(self, doors: Sequence[Door]) -> list[int]:
        """Calls `Node.unreached` there."""
        return self._call("unreached", doors)

    def running_ranks(self) -> list[int]:
        """Calls `Node.running_ranks` there."""
        return self._call("running_ranks")

    def kill_rank(self, rank: int) -> bool:
        """Calls `Node.kill_rank` there."""
        return self._call("kill_rank", rank)

    def stop(self) -> None:
        """Calls `Node.stop` there."""
        self._call("stop")

    def end(self) -> None:
        """Ends the ranks, the template and the actor."""
        if self.node_id:  # else the actor waits for its place, and would not answer
            with contextlib.suppress(NodeLost):  # then nothing is left to end
                self._call("end")
        self.forget()

    def forget(self) -> None:
        """Lets Ray end the actor, now or when the network to it is back: its place is another's."""
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._await(self._actor.serve.remote(self._term, method, *arguments))
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
        """Waits for an answer, and shows meanwhile that the supervisor lives: where the network to
        a node is cut, Ray says so after a minute only.
        """
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
    """What Ray says, without what its libraries say: that is half a page."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("; last error")[0]
