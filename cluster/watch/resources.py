"""Records what a node and its ranks use, every EVERY_S seconds: logs/g001/node0/resources.jsonl.

One JSON object per line:

* `time`: seconds since the epoch; `seconds`: length of the interval over which rates are averaged
* `cpu_percent`: of the machine, 100 is one processor; `cpus`: number of processors
* `memory_bytes`, `memory_total_bytes`: used and total memory of the machine
* `received_bytes_per_s`, `sent_bytes_per_s`: of the machine's network interfaces without the loopback
* `gpus`: list of `gpu` (the driver's number), `percent` (time in which a kernel ran), `memory_bytes`,
  `memory_total_bytes`, for the GPUs in $CUDA_VISIBLE_DEVICES; empty without NVIDIA's driver
* `ranks`: list of `rank`, `phase`, `step`, `step_s` (median of the last steps; 0: none yet), `cpu_percent`,
  `memory_bytes` (resident)

The node's process writes it when it reads the heartbeats (node.py), without a thread. A file of MAX_BYTES is
renamed resources.1.jsonl. Cost: 1 ms and 300 bytes plus 130 per rank, each time.
"""

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .heartbeats import RankState

FILE = "resources.jsonl"
EVERY_S = 10.0
MAX_BYTES = 4 << 20
_LOOPBACKS = ("lo", "lo0")
_NAME_BYTES = 96


@dataclass(frozen=True)
class _Counts:
    """Counters that only grow, at one moment."""

    time_s: float
    cpu_s: float
    received: int
    sent: int
    rank_cpu_s: Mapping[int, float]  # by process


class ResourceLog:
    """Writes the resource file of one node in one generation."""

    def __init__(self, log_dir: Path) -> None:
        self._path = log_dir / FILE
        self._gpus = Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._last = _count([])
        self._due_s = self._last.time_s + EVERY_S

    def write_if_due(self, states: Iterable[RankState]) -> None:
        """Appends a line if the last one is old enough; a full disk costs only the line."""
        if time.monotonic() < self._due_s:
            return
        states = list(states)
        now = _count([state.pid for state in states])
        record = self._record(now, states)
        self._last, self._due_s = now, now.time_s + EVERY_S
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size >= MAX_BYTES:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _record(self, now: _Counts, states: Iterable[RankState]) -> dict[str, Any]:
        seconds = max(now.time_s - self._last.time_s, 1e-3)
        memory = psutil.virtual_memory()
        return {
            "time": round(time.time(), 3),
            "seconds": round(seconds, 3),
            "cpu_percent": round(100 * (now.cpu_s - self._last.cpu_s) / seconds, 1),
            "cpus": os.cpu_count(),
            "memory_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "received_bytes_per_s": round((now.received - self._last.received) / seconds),
            "sent_bytes_per_s": round((now.sent - self._last.sent) / seconds),
            "gpus": self._gpus.read(),
            "ranks": [self._rank(state, now, seconds) for state in states],
        }

    def _rank(self, state: RankState, now: _Counts, seconds: float) -> dict[str, Any]:
        before_s, now_s = self._last.rank_cpu_s.get(state.pid), now.rank_cpu_s.get(state.pid)
        percent = None
        if before_s is not None and now_s is not None:
            percent = round(100 * (now_s - before_s) / seconds, 1)
        return {
            "rank": state.rank,
            "phase": state.phase,
            "step": state.step,
            "step_s": round(state.median_step_s, 5),
            "cpu_percent": percent,
            "memory_bytes": _resident(state.pid),
        }


@dataclass(frozen=True)
class Gpu:
    """Describes one of a node's GPUs, whether or not a rank may use it."""

    name: str
    free_bytes: int
    total_bytes: int


class Gpus:
    """Reads NVIDIA's GPUs through the driver's library (NVML), if it is installed."""

    def __init__(self, visible: str | None) -> None:
        """Takes the value of $CUDA_VISIBLE_DEVICES; None: all GPUs of the machine."""
        self._nvml: Any = None
        self._handles: dict[int, ctypes.c_void_p] = {}
        with contextlib.suppress(OSError):
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if self._nvml is not None and self._nvml.nvmlInit_v2() == 0:
            self._handles = self._open(visible)

    def read(self) -> list[dict[str, int]]:
        """Returns the use of every visible GPU, without those that the driver has lost."""
        found = []
        for number, handle in self._handles.items():
            use, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
            failed = self._nvml.nvmlDeviceGetUtilizationRates(handle, use)
            if failed or self._nvml.nvmlDeviceGetMemoryInfo(handle, memory):
                continue
            total, _, used = memory
            found.append(
                {
                    "gpu": number,
                    "percent": int(use[0]),
                    "memory_bytes": int(used),
                    "memory_total_bytes": int(total),
                }
            )
        return found

    def describe(self) -> tuple[str, list[Gpu]]:
        """Returns the driver's version and all GPUs; "" and none without a driver."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        if not self._handles or self._nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES):
            return "", []
        driver, found, memory = text.value.decode(), [], (ctypes.c_ulonglong * 3)()
        for handle in self._handles.values():
            failed = self._nvml.nvmlDeviceGetName(handle, text, _NAME_BYTES)
            if failed or self._nvml.nvmlDeviceGetMemoryInfo(handle, memory):
                continue  # it has fallen off the bus
            found.append(Gpu(text.value.decode(), int(memory[1]), int(memory[0])))
        return driver, found

    def _open(self, visible: str | None) -> dict[int, ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        handles = {}
        for number in visible_gpus(visible, count.value):
            handle = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
                handles[number] = handle
        return handles


def visible_gpus(visible: str | None, count: int) -> list[int]:
    """Returns the numbers of the GPUs in $CUDA_VISIBLE_DEVICES; all if it names them by UUID."""
    if visible is None:
        return list(range(count))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(name.isdecimal() for name in names):
        return list(range(count))
    return [int(name) for name in names if int(name) < count]


def _count(pids: Iterable[int]) -> _Counts:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts the time of guests twice
    busy_s = sum(times) - idle_s - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    cards = psutil.net_io_counters(pernic=True)
    outside = [card for name, card in cards.items() if name not in _LOOPBACKS]
    return _Counts(
        time_s=time.monotonic(),
        cpu_s=busy_s,
        received=sum(card.bytes_recv for card in outside),
        sent=sum(card.bytes_sent for card in outside),
        rank_cpu_s=_cpu_times(pids),
    )


def _cpu_times(pids: Iterable[int]) -> dict[int, float]:
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found


def _resident(pid: int) -> int | None:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
