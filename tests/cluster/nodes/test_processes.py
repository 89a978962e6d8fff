"""Tests how a run's processes are found and ended, also without Linux's calls."""

import os
import signal
import subprocess
import sys

import pytest

from moebius.cluster.job import JobError
from moebius.cluster.nodes import processes
from moebius.cluster.places import simulated


def sleeper(run_dir: str, generation: int) -> subprocess.Popen[bytes]:
    marks = {processes.MARK: run_dir, processes.MARK_GENERATION: str(generation)}
    return subprocess.Popen(["sleep", "100"], env=os.environ | marks)


@pytest.mark.parametrize("is_linux", [True, False])
def test_processes_are_found_by_their_mark_and_ended(tmp_path, monkeypatch, is_linux):
    monkeypatch.setattr(processes, "IS_LINUX", is_linux)
    first, second = sleeper(str(tmp_path), 1), sleeper(str(tmp_path), 2)
    try:
        assert set(processes.find(str(tmp_path))) == {first.pid, second.pid}
        assert set(processes.find(str(tmp_path), generation=2)) == {second.pid}
        assert set(processes.find(str(tmp_path), before=2)) == {first.pid}
        assert set(processes.descendants(os.getpid())) >= {first.pid, second.pid}
        assert processes.end([first.pid]) == []  # a zombie until its parent asks, and yet ended
        assert first.wait(timeout=60) == -signal.SIGKILL
        assert not processes.kill(first.pid)
        assert set(processes.find(str(tmp_path))) == {second.pid}
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


BIND_ELSEWHERE = """
import sys
from moebius.cluster.nodes import processes

def missing(*_):
    raise AssertionError("there is no prctl here")

processes.IS_LINUX, processes._prctl = False, missing
processes.adopt_orphans()
processes.bind_to_parent()
print("goes on")
"""


@pytest.mark.parametrize("parent_lives", [True, False])
def test_elsewhere_only_a_parent_that_has_ended_is_noticed(parent_lives):
    parent = os.getpid() if parent_lives else 1 << 22
    ended = subprocess.run(
        [sys.executable, "-c", BIND_ELSEWHERE],
        env=os.environ | {processes.PARENT: str(parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode == 0) == parent_lives
    assert ("goes on" in ended.stdout) == parent_lives
    assert ("has already ended" in ended.stderr) != parent_lives


def test_a_simulated_cluster_says_which_address_is_missing(monkeypatch):
    monkeypatch.setattr(simulated, "node_address", lambda number: "203.0.113.9")
    with pytest.raises(JobError, match=r"needs the address 203.0.113.9 on this machine"):
        simulated.check_possible(2)
