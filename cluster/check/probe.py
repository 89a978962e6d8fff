"""Examines one node for a check: its software, memory, devices, network and folder.

On another machine, `RemoteProbe` calls it as a Ray actor, with a time limit for every call. Facts are gathered
without torch and without initialising a device: versions come from the installed packages' metadata, GPUs from
nvidia-smi.
"""

import contextlib
import importlib.metadata
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ..nodes.node import Address, Node, versions
from ..nodes.node_check import NodeCheck
from .exchange import Exchange, run_ranks

_SHARED_MEMORY = Path("/dev/shm")
_LIMITS_S = {"run_ranks": 180.0}
_SMI_LIMIT_S = 60.0  # a machine with eight GPUs may take seconds to wake its driver


@dataclass(frozen=True)
class Gpu:
    """Describes one of a node's GPUs, whether or not a rank may use it."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """Holds the facts of one node as plain values, since they travel between machines."""

    address: str
    versions: Mapping[str, str]
    memory_free_bytes: int
    memory_total_bytes: int
    shared_memory_bytes: int | None = None  # free; None: there is no /dev/shm
    driver: str = ""  # NVIDIA's
    gpus: Sequence[Gpu] = ()
    port: int = 0  # on which it accepts connections


@dataclass(frozen=True)
class Trial:
    """Holds how one node reaches the others and the shared folder."""

    unreached: Sequence[str] = ()  # the other nodes' names
    fault: str = ""  # why the folder cannot be used; "": it can
    free_bytes: int = 0


class NodeFault(Exception):
    """Says why a node cannot be reached, does not answer, or cannot do what it is asked."""


class Probe(Node):
    """Examines the machine it runs on, and runs ranks there."""

    def facts(self) -> NodeFacts:
        """Returns the facts of this node."""
        memory, (driver, gpus) = psutil.virtual_memory(), gpus_here()
        shm = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
        return NodeFacts(
            address=self._address,
            versions=_software(),
            memory_free_bytes=memory.available,
            memory_total_bytes=memory.total,
            shared_memory_bytes=shm,
            driver=driver,
            gpus=gpus,
            port=self._listen(),
        )

    def _listen(self) -> int:
        """Accepts connections on a free port, which it returns, until this process ends."""
        server = socket.create_server((self._address, 0), backlog=256)
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def attempt(self, others: Sequence[Address], wanted: NodeCheck) -> Trial:
        """Connects to other nodes, reads the file that every node must see, and creates one beside it."""
        unreached = [others[place][0] for place in self.unreachable(others)]
        folder, fault = Path(wanted.token_file).parent, wanted.faults()
        try:
            if not fault:
                tempfile.TemporaryFile(dir=folder).close()
                return Trial(unreached, "", shutil.disk_usage(folder).free)
        except OSError as error:
            fault = f"{folder} cannot be written ({error.strerror})"
        return Trial(unreached, fault)

    def run_ranks(self, exchange: Exchange, node: int) -> tuple[bool, float]:
        """Runs this node's ranks of the self-test (exchange.py)."""
        return run_ranks(exchange, node, self._address)


def _accept(server: socket.socket) -> None:
    while True:
        server.accept()[0].close()


class RemoteProbe:
    """Stands for the probe on another node; any call may raise NodeFault."""

    def __init__(self, actor: Any, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Returns a function that calls this method of `Probe` on the other node."""
        return partial(self._call, method)

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        limit_s = _LIMITS_S.get(method, self._limit_s)
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_s)
        except GetTimeoutError:
            raise NodeFault(f"no answer within {limit_s:.0f} s") from None
        except RayTaskError as error:
            raise NodeFault(_one_line(error.cause or error)) from None
        except RayError as error:
            raise NodeFault(_one_line(error)) from None


def _one_line(error: BaseException) -> str:
    """Describes an error by the last line of its message, which says most in Ray's own pages."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"


@contextlib.contextmanager
def probes(limit_s: float) -> Iterator[Mapping[str, RemoteProbe]]:
    """Yields a probe per node of the connected cluster, by address.

    The probes are actors that reserve no CPU, are pinned to their nodes, and end with the connection.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors: dict[str, Any] = {}
    for node in sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"]):
        if node["Alive"]:
            on_the_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            probe = ray.remote(Probe).options(
                num_cpus=0, max_concurrency=4, scheduling_strategy=on_the_node
            )
            address = node["NodeManagerAddress"]
            actors[address] = probe.remote(address)
    try:
        yield {address: RemoteProbe(actor, limit_s) for address, actor in actors.items()}
    finally:
        for actor in actors.values():
            ray.kill(actor)


def gpus_here() -> tuple[str, list[Gpu]]:
    """Returns the driver's version and all GPUs by nvidia-smi; "" and none without a working driver."""
    fields = "driver_version,name,memory.free,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "", []
    driver, found = "", []
    for line in done.stdout.splitlines():
        driver, name, *sizes = line.split(", ")
        free, total = (int(size) << 20 if size.isdecimal() else 0 for size in sizes)  # in MiB
        found.append(Gpu(name, free, total))
    return driver, found


def _software() -> dict[str, str]:
    """Returns the versions that must match on all nodes; "none" for packages that are missing."""
    found = versions() | {"ray": _version_of("ray")}
    # torch's wheels bring NCCL as a package named after its CUDA version
    nccl = [_version_of(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11)]
    found["nccl"] = next((version for version in nccl if version != "none"), "none")
    return found


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
