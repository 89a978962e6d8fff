"""Looks at this machine: what is installed, its disk, its memory, its ports and its GPUs."""

import importlib.util
import os
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ..nodes.node import versions
from .findings import (
    Finding,
    judge_disk,
    judge_fsync,
    judge_gpus,
    judge_shared_memory,
    judge_versions,
)

_FSYNCS = 20
_SHARED_MEMORY = Path("/dev/shm")
_SIDE = 256  # of the matrices that GPUs multiply


def look_at_machine(folder: Path) -> list[Finding]:
    """Returns what is found here, with `folder` as the place of run folders.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    missing = [name for name in ("ray",) if importlib.util.find_spec(name) is None]
    return [
        judge_versions(missing, versions()),
        judge_disk(shutil.disk_usage(folder).free, str(folder)),
        judge_fsync(_fsync_s(folder), str(folder)),
        judge_shared_memory(memory),
        _look_at_ports(),
        judge_gpus(*_gpus()),
    ]


def _fsync_s(folder: Path) -> float:
    """Returns the median seconds that 4 KiB take to the disk."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_FSYNCS):
            file.write(os.urandom(4096))
            started_s = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _look_at_ports() -> Finding:
    """Listens and connects on the loopback and on the address of this machine's name."""
    refused = []
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.create_server((host, 0)) as server:
                socket.create_connection((host, server.getsockname()[1]), timeout=5.0).close()
        except OSError as error:
            refused.append(f"{host}: {error.strerror or error}")
    if not refused:
        return Finding("ports", "ok", "a free port was found and reached, by loopback and by name")
    is_loopback = refused[0].startswith("127.")
    advice = "ranks cannot meet" if is_loopback else "give the name an address of this machine"
    return Finding("ports", "fail" if is_loopback else "warn", "; ".join(refused), advice)


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """Returns the GPUs that torch sees, and what is wrong with one."""
    import torch

    devices = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            free, total = torch.cuda.mem_get_info(number)
            ones = torch.ones(_SIDE, _SIDE, device=f"cuda:{number}")
            if not bool(((ones @ ones) == _SIDE).all()):
                return devices, f"GPU {number} gives wrong numbers"
        except RuntimeError as error:
            return devices, f"GPU {number}: {str(error).splitlines()[0]}"
        name = torch.cuda.get_device_name(number)
        devices.append({"name": name, "free_bytes": free, "total_bytes": total})
    return devices, ""
