"""What a node uses: the lines that are written, how often, and how many at most."""

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.watch import resources
from moebius.cluster.watch.heartbeats import RankState
from moebius.cluster.watch.resources import FILE, Gpu, Gpus, ResourceLog, visible_gpus

ME = RankState(3, "step", 7, 0.5, median_step_s=0.25, pid=os.getpid())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(resources.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds_with_all_of_it(tmp_path, clock):
    log = ResourceLog(tmp_path)
    log.write_if_due([ME])
    assert not (tmp_path / FILE).exists()
    for _ in range(21):
        clock[0] += 1.0
        log.write_if_due([ME])
    first, second = lines(tmp_path)
    assert first["seconds"] == 10.0
    assert first["cpu_percent"] >= 0
    assert 0 < first["memory_bytes"] < first["memory_total_bytes"]
    assert first["cpus"] == os.cpu_count()
    assert min(first["received_bytes_per_s"], first["sent_bytes_per_s"]) >= 0
    [rank] = first["ranks"]
    assert (rank["rank"], rank["phase"], rank["step"], rank["step_s"]) == (3, "step", 7, 0.25)
    assert rank["cpu_percent"] is None  # not known before the second line
    assert rank["memory_bytes"] > 1 << 20
    assert second["ranks"][0]["cpu_percent"] >= 0


def test_a_rank_that_has_ended_has_no_figures(tmp_path, clock):
    log = ResourceLog(tmp_path)
    clock[0] += 11.0
    log.write_if_due([RankState(0, "end", 7, 0.5, pid=2**22 + 1)])
    [rank] = lines(tmp_path)[0]["ranks"]
    assert (rank["cpu_percent"], rank["memory_bytes"]) == (None, None)


def test_the_files_are_bounded(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(resources, "MAX_BYTES", 3000)
    log = ResourceLog(tmp_path)
    for _ in range(40):
        clock[0] += 11.0
        log.write_if_due([ME])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resources.1.jsonl", FILE]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3000 * 2 + 2000


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1, 2, 3]), ("2, 0", [2, 0]), ("", []), ("7", []), ("GPU-1a2b", [0, 1, 2, 3])],
)
def test_which_gpus_are_a_nodes_own(visible, expected):
    assert visible_gpus(visible, 4) == expected


class PretendedDriver:
    """NVML of two GPUs, the second of which does not answer."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle) -> int:
        handle._obj.value = number + 1
        return 0

    def nvmlSystemGetDriverVersion(self, text, size) -> int:
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetName(self, handle, text, size) -> int:
        text.value = b"H100"
        return 0 if handle.value == 1 else 15

    def nvmlDeviceGetUtilizationRates(self, handle, use) -> int:
        use[0], use[1] = 90, 40
        return 0 if handle.value == 1 else 15

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        memory[0], memory[1], memory[2] = 100, 70, 30
        return 0


def test_the_gpus_as_the_driver_tells_them(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: PretendedDriver())
    found = {"gpu": 0, "percent": 90, "memory_bytes": 30, "memory_total_bytes": 100}
    assert Gpus(None).read() == [found]
    assert Gpus(None).describe() == ("580.1", [Gpu("H100", free_bytes=70, total_bytes=100)])
