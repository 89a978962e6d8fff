"""The pytest fixture, and cleanup when the command is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LAYERS = Path(__file__).with_name("layers.py")
HANGING = ["--ranks", "2", "--only", "a rank without tokens", "--limit", "600"]
TEST = f"""
import sys
sys.path.insert(0, {str(LAYERS.parent)!r})
import layers


def test_right(conform):
    conform(layers.bare, only=["even"])


def test_wrong(conform):
    conform(layers.times_ranks, only=["even"])
"""


@pytest.mark.slow
def test_the_fixture_fails_a_test_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["moebius_conform.plugin"]\n')
    (tmp_path / "test_layers.py").write_text(TEST)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:dash", "--conform-ranks", "2", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "experts.w_up: is 2 (the number of ranks) times the correct value" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the command", "the process that forks ranks"])
def test_nothing_outlives_a_kill(tmp_path: Path, victim: str) -> None:
    command = psutil.Popen(
        [sys.executable, "-m", "moebius_conform", f"{LAYERS}:hangs", *HANGING],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        family = _wait_for_ranks(command)
        killed = command if victim == "the command" else command.children()[0]
        os.kill(killed.pid, signal.SIGKILL)
        command.wait(120)
        _, alive = psutil.wait_procs(family, timeout=120)
        assert not alive
        assert not list(tmp_path.glob("conform-*"))
    finally:
        for process in [command, *command.children(recursive=True)] if command.is_running() else ():
            process.kill()


def _wait_for_ranks(command: psutil.Popen) -> list[psutil.Process]:
    """Waits for the process that forks and two ranks, one of which hangs; a world of one rank came
    before.
    """
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        family = command.children(recursive=True)
        if len(family) == 3:
            return family
        time.sleep(0.05)
    raise AssertionError(f"no ranks came: {command.children(recursive=True)}")
