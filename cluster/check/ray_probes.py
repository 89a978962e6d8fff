"""Runs a probe (probe.py) as an actor on every node of a Ray cluster.

The actors reserve no CPU, are pinned to their nodes, and end with the connection. Every call has a time
limit.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .probe import NodeFault, NodeSilent, Probe

_MARGIN_S = 10.0  # added to the limit of a call


class RemoteProbe:
    """Stands for the probe on another node; any call may raise NodeSilent or NodeFault."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Returns a function that calls this method of `Probe` on the other node."""
        return partial(self._call, method)

    def await_start(self, deadline: float) -> None:
        """Waits until the actor answers, at most until `deadline` (monotonic clock)."""
        self._get(self._actor.clock.remote(), max(0.1, deadline - time.monotonic()))

    def end(self) -> None:
        """Ends the actor and everything that it started."""
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
    """Describes an error in one line; the last line of Ray's own pages says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1] if isinstance(error, RayError) and lines else " ".join(lines)
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


@contextlib.contextmanager
def probes(limit_s: float) -> Iterator[tuple[Mapping[str, RemoteProbe], Mapping[str, str]]]:
    """Yields a probe per node of the connected cluster, by address, and why others stay silent."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    started = {
        address: RemoteProbe(_start(nodes[address], address), limit_s)
        for address in sorted(nodes, key=_in_order)
    }
    silent, deadline = {}, time.monotonic() + limit_s
    for address, probe in started.items():  # all start at the same time
        try:
            probe.await_start(deadline)
        except (NodeSilent, NodeFault) as error:
            silent[address] = str(error)
    try:
        yield {name: probe for name, probe in started.items() if name not in silent}, silent
    finally:
        for probe in started.values():
            probe.end()


def _start(node_id: str, address: str) -> Any:
    on_the_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": on_the_node}
    return ray.remote(Probe).options(**options).remote(address)


def _in_order(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (address,)
