"""Tests heartbeats: a jumping clock misleads nobody, and silence is reported."""

import os
import threading
import time
from pathlib import Path

import pytest

from moebius.cluster import liveness as life
from moebius.cluster.job import Journal, State, read_status
from moebius.cluster.liveness import LivenessWatch, beat, silence_s
from moebius.cluster.nodes.node import Watchdog
from moebius.cluster.report import live as watch


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    Journal(tmp_path).append(State.RUNNING, generation=1, reason="first step")
    beat(tmp_path)
    return tmp_path


def grow_old(run_dir: Path, seconds: float) -> None:
    age(run_dir / "heartbeat", seconds)
    age(run_dir / "journal.jsonl", seconds)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.fault("F30")
def test_a_clock_that_jumped_since_the_last_beat_deceives_nobody(run_dir, monkeypatch):
    grow_old(run_dir, 60)  # what a jump by a minute makes of a beat that has just been
    monkeypatch.setattr(life.time, "sleep", lambda seconds: beat(run_dir))  # meanwhile
    assert silence_s(run_dir) == 0.0


def test_the_time_is_the_file_system_s(run_dir, monkeypatch):
    fast = time.time() + 500
    monkeypatch.setattr(life.time, "time", lambda: fast)
    assert read_status(run_dir).state is State.RUNNING


@pytest.mark.fault("F30")
def test_who_watches_judges_by_change_alone(run_dir):
    clock = Clock()
    watching = LivenessWatch(run_dir, clock=clock)
    clock.now = 25.0
    assert watching.silent_s() == pytest.approx(25.0, abs=1.0)
    age(run_dir / "heartbeat", 300)  # touched, with a time of long ago
    assert watching.silent_s() == 0.0
    clock.now = 25.0 + life.GIVEN_UP_AFTER_S + 1
    assert watching.is_given_up()
    beat(run_dir)
    assert not watching.is_given_up()


def test_who_comes_late_knows_how_long_it_has_been_silent(run_dir):
    grow_old(run_dir, 5 * 3600)
    assert LivenessWatch(run_dir).is_given_up()


def test_a_lost_job_can_come_back_while_it_is_watched(run_dir, monkeypatch):
    monkeypatch.setattr(life, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    looks = watch._looks(watch.View(run_dir), lambda status: False)
    texts = [event.text for event in next(looks)]
    monkeypatch.setattr(life, "LOST_AFTER_S", 0.02)

    def until(word: str) -> None:
        deadline = time.monotonic() + 60
        while not any(word in text for text in texts) and time.monotonic() < deadline:
            texts.extend(event.text for event in next(looks))

    until("LOST: was RUNNING")
    monkeypatch.setattr(life, "LOST_AFTER_S", 60.0)  # however late this process looks
    beat(run_dir)
    until("RUNNING: the supervisor is back")
    Journal(run_dir).append(State.SUCCEEDED, generation=1, reason="finished")
    texts += [event.text for events in looks for event in events]
    assert "LOST: was RUNNING" in texts[1]
    assert texts[2:] == ["RUNNING: the supervisor is back", "SUCCEEDED: finished"]


def test_a_node_acts_when_its_supervisor_is_silent_and_only_then():
    acted = threading.Event()
    watchdog = Watchdog(0.05, acted.set, tick_s=0.01)
    assert acted.wait(60)
    watchdog.end()
    heard = threading.Event()
    watchdog = Watchdog(3600, heard.set, tick_s=0.001)
    watchdog.reset()
    watchdog.end()
    assert not heard.is_set()
