"""The nodes of a Ray cluster, each with an actor that looks at it (probe.py).

The actors take no processor of what others use, and are tied to their nodes; they end with the
connection. A call has its limit: a node that hangs becomes `NodeSilent`, a node that cannot do what
it is asked for `NodeFault`.
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

_MARGIN_S = 10.0  # for a call beyond what it may wait itself


class RemoteProbe:
    """Stands for the probe on another node; any call may raise NodeSilent or NodeFault."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Returns what calls this method of `Probe` on the other node."""
        return partial(self._call, method)

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
    """Returns what went wrong in a line: Ray's own texts are pages, whose last line says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1] if isinstance(error, RayError) and lines else " ".join(lines)
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


@contextlib.contextmanager
def probes(limit_s: float) -> Iterator[tuple[Mapping[str, RemoteProbe], Mapping[str, str]]]:
    """Yields a probe on every node of the cluster that this process is connected to, by address;
    and why nodes do not begin to answer within `limit_s`.
    """
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
