"""Gathers a node's facts: its software, limits, memory, devices and network interface.

Nothing here imports torch or initialises a device: versions come from the installed packages' metadata, GPUs
from nvidia-smi.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ... import __version__
from ..nodes.agent import interface_of

UNLIMITED = -1
_SHARED_MEMORY = Path("/dev/shm")
_CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # set by the user
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
    open_files: int  # limit per process, or UNLIMITED
    processes: int  # limit per user, or UNLIMITED
    shared_memory_bytes: int | None = None  # free; None: there is no /dev/shm
    interface: str | None = None  # the one with the node's address
    mtu: int | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)  # interfaces, by variable
    interfaces: Sequence[str] = ()
    driver: str = ""  # NVIDIA's
    gpus: Sequence[Gpu] = ()


def gather_facts(address: str) -> NodeFacts:
    """Returns the facts of this machine, which other nodes reach at `address`."""
    memory = psutil.virtual_memory()
    interface = interface_of(address)
    stats = psutil.net_if_stats()
    driver, gpus = gpus_here()
    shm = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    return NodeFacts(
        address=address,
        versions=software(),
        memory_free_bytes=memory.available,
        memory_total_bytes=memory.total,
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        shared_memory_bytes=shm,
        interface=interface,
        mtu=stats[interface].mtu if interface in stats else None,
        chosen={name: os.environ[name] for name in _CHOSEN if os.environ.get(name)},
        interfaces=sorted(stats),
        driver=driver,
        gpus=gpus,
    )


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


def software() -> dict[str, str]:
    """Returns the versions that must match on all nodes; "none" for packages that are missing."""
    found = {"moebius": __version__, "python": platform.python_version()}
    found |= {name: _version_of(name) for name in ("torch", "ray")}
    # torch's wheels bring NCCL as a package named after its CUDA version
    nccl = [_version_of(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11)]
    found["nccl"] = next((version for version in nccl if version != "none"), "none")
    return found


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
