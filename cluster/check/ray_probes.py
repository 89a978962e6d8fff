"""The nodes of a Ray cluster, each with an actor that looks at it (probe.py).

The actors take no processor of what others use, and are tied to their nodes; they end with the
connection. A call has its limit: a node that hangs becomes `NodeSilent`, a node that cannot do what
it is asked for `NodeFault`.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .facts import NodeFacts
from .folder import Seen, Written
from .probe import NodeFault, NodeSilent, Probe, Reached

_MARGIN_S = 10.0  # for a call beyond what it may wait itself


class RemoteProbe:
    """Stands for the probe on another node."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s

    def facts(self) -> NodeFacts:
        """Calls `Probe.facts` there."""
        return self._call("facts")

    def clock(self) -> float:
        """Calls `Probe.clock` there."""
        return self._call("clock")

    def listen(self) -> int:
        """Calls `Probe.listen` there."""
        return self._call("listen")

    def connect(self, address: str, port: int, limit_s: float) -> Reached:
        """Calls `Probe.connect` there."""
        return self._call("connect", address, port, limit_s)

    def publish(self, path: str, text: str) -> Written:
        """Calls `Probe.publish` there."""
        return self._call("publish", path, text)

    def await_text(self, path: str, text: str, limit_s: float, before: str | None = None) -> Seen:
        """Calls `Probe.await_text` there."""
        return self._call("await_text", path, text, limit_s, before)

    def claim(self, path: str) -> bool:
        """Calls `Probe.claim` there."""
        return self._call("claim", path)

    def clean(self, path: str, token: str) -> None:
        """Calls `Probe.clean` there."""
        self._call("clean", path, token)

    def free_port(self) -> int:
        """Calls `Probe.free_port` there."""
        return self._call("free_port")

    def start_exchange(self, attempt: Any) -> None:
        """Calls `Probe.start_exchange` there."""
        self._call("start_exchange", attempt)

    def exchange_report(self) -> Any:
        """Calls `Probe.exchange_report` there."""
        return self._call("exchange_report")

    def exchange_result(self) -> str:
        """Calls `Probe.exchange_result` there."""
        return self._call("exchange_result")

    def end_exchange(self) -> None:
        """Calls `Probe.end_exchange` there."""
        self._call("end_exchange")

    def await_start(self, deadline: float) -> None:
        """Waits until the actor answers; `deadline` is of the monotonic clock."""
        self._get(self._actor.clock.remote(), max(0.1, deadline - time.monotonic()))

    def end(self) -> None:
        """Ends the actor, and with it all that it has started."""
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(*arguments), self._limit_s + _MARGIN_S)

    def _get(self, answer: Any, limit_s: float) -> Any:
        try:
            return ray.get(answer, timeout=limit_s)
        except GetTimeoutError:
            raise NodeSilent(f"no answer within {limit_s:.0f} s") from None
        except RayTaskError as error:
            raise NodeFault(_words(error.cause or error)) from None
        except RayError as error:
            raise NodeSilent(_words(error)) from None


def _words(error: BaseException) -> str:
    """What went wrong in a line: Ray's own texts are pages, whose last line tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1] if isinstance(error, RayError) and lines else " ".join(lines)
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


@contextlib.contextmanager
def probes(limit_s: float) -> Iterator[tuple[Mapping[str, RemoteProbe], Mapping[str, str]]]:
    """Yields a probe on every node of the cluster that this process is connected to, by address.

    And beside them the nodes that have none after `limit_s`, with the reason.
    """
    addresses = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]
    }
    started = {
        address: RemoteProbe(_start(node_id, address), limit_s)
        for node_id, address in sorted(addresses.items(), key=lambda item: _in_order(item[1]))
    }
    silent = _await_all(started, time.monotonic() + limit_s)
    try:
        yield {name: node for name, node in started.items() if name not in silent}, silent
    finally:
        for node in started.values():
            node.end()


def _start(node_id: str, address: str) -> Any:
    return (
        ray.remote(Probe)
        .options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(address)
    )


def _await_all(nodes: Mapping[str, RemoteProbe], deadline: float) -> dict[str, str]:
    """Returns which nodes do not begin to answer, and why; all start at the same time."""
    silent = {}
    for name, node in nodes.items():
        try:
            node.await_start(deadline)
        except (NodeSilent, NodeFault) as error:
            silent[name] = str(error)
    return silent


def _in_order(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (address,)
