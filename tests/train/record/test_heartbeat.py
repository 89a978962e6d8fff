"""A rank's page: what it publishes, and how others read it during writes."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moebius.train.record import heartbeat
from moebius.train.record.heartbeat import (
    FOLDER,
    PAGE_BYTES,
    WINDOW,
    Heartbeat,
    Phase,
    page_of,
    read_page,
    started_ticks,
)


@pytest.fixture
def page(tmp_path) -> tuple[Heartbeat, Path]:
    """Returns a heartbeat on a file, and the file."""
    path = page_of(tmp_path, 0)
    path.write_bytes(bytes(PAGE_BYTES))
    with open(path, "r+b") as file:
        return Heartbeat(mmap.mmap(file.fileno(), PAGE_BYTES)), path


def read(path: Path) -> heartbeat.Beat:
    beat = read_page(path)
    assert beat is not None
    return beat


def test_phases_follow_each_other_and_nested_ones_come_back(page):
    beats, path = page
    assert read(path).phase is Phase.START
    beats.begin_step(7)
    assert (read(path).phase, read(path).step) == (Phase.COMPILE, 7)
    beats.end_step()
    beats.begin_step(8)
    began = read(path).since_s
    with beats.during(Phase.CKPT):
        assert (read(path).phase, read(path).step) == (Phase.CKPT, 8)
    assert read(path).phase is Phase.STEP
    assert began <= read(path).since_s <= time.monotonic()
    assert (read(path).pid, read(path).started_ticks) == (os.getpid(), started_ticks(os.getpid()))


def test_medians_leave_out_the_first_step_and_wait_for_a_window(page, monkeypatch):
    beats, path = page
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    for step, seconds in enumerate([50.0] + [1.0, 2.0, 3.0] * 7):
        beats.begin_step(step)
        now[0] += seconds
        beats.end_step(own_s=seconds / 2)
        if step in (0, 1, 2, WINDOW - 1):
            expected = {0: 0.0, 1: 1.0, 2: 1.5, WINDOW - 1: 2.0}[step]
            assert (read(path).median_step_s, read(path).own_step_s) == (expected, 0.0)
    assert (read(path).median_step_s, read(path).own_step_s) == (2.0, 1.0)


@pytest.mark.fault("F30")
def test_the_clock_on_the_wall_does_not_matter(page, monkeypatch):
    beats, path = page
    monkeypatch.setattr(time, "time", lambda: 0.0)
    beats.enter(Phase.EVAL)
    assert time.monotonic() - read(path).since_s < 60


def test_what_is_no_page_yet_is_none(tmp_path):
    path = page_of(tmp_path, 0)
    assert read_page(path) is None
    for content in (b"", b"x" * (PAGE_BYTES - 1), bytes(PAGE_BYTES)):
        path.write_bytes(content)
        assert read_page(path) is None


def test_a_reader_never_sees_half_a_write(page):
    """The step is written before its time, so a torn page would mix two writes."""
    beats, path = page
    done = threading.Event()

    def write() -> None:
        for step in range(1, 4000):
            beats._step, beats._since_s = step, float(step)
            beats._write()
        done.set()

    threading.Thread(target=write).start()
    torn = 0
    while not done.is_set():
        beat = read(path)
        torn += beat.step != 0 and beat.step != beat.since_s
    assert torn == 0
    assert read(path).step == 3999


def test_without_a_supervisor_the_page_is_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    heartbeat.open_heartbeat().enter(Phase.STEP)
    assert list(tmp_path.iterdir()) == []


RANK = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("heartbeat", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["heartbeat"] = module
spec.loader.exec_module(module)
module._recorded_calls = lambda: [{"group": "gloo:0"}]
def hangs_here():
    print("up", flush=True)
    time.sleep(60)
beats = module.open_heartbeat()
hangs_here()
"""


def test_a_hanging_rank_shows_its_stacks_and_its_collectives(tmp_path):
    environment = os.environ | {FOLDER: str(tmp_path), "RANK": "3"}
    command = [sys.executable, "-c", RANK, heartbeat.__file__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        path = page_of(tmp_path, 3)
        assert read(path).pid == rank.pid
        path.with_suffix(".ask").touch()
        os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not path.with_suffix(".calls").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        rank.kill()
    assert "in hangs_here" in path.with_suffix(".stacks").read_text()
    assert path.with_suffix(".calls").read_text() == '[{"group": "gloo:0"}]'
    assert not path.with_suffix(".ask").exists()
