"""Tests that want a GPU, run in several processes: all of them run once, and failures are told."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parallel_tests import ROOT, gpu_tests

TESTS = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(5))
def test_one(number):
    Path(__file__).with_name(f"ran_{{number}}").touch(exist_ok=False)
    {body}
"""


def run(folder: Path, body: str, *words: str) -> subprocess.CompletedProcess[str]:
    file = folder / "test_made.py"
    file.write_text(TESTS.format(body=body))
    return subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu.parallel_tests", str(file)),
            *("--processes", "2", "--out", str(folder / "logs"), *words),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(("body", "status"), [("pass", 0), ("assert number != 3", 1)])
def test_every_test_runs_once(body: str, status: int, tmp_path: Path) -> None:
    ended = run(tmp_path, body)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert len(list(tmp_path.glob("ran_*"))) == 5
    assert ("test_one[3]" in ended.stdout) == bool(status)


def test_late_processes_are_ended(tmp_path: Path) -> None:
    ended = run(tmp_path, "time.sleep(60 * (number == 0))", "--seconds", "5")
    assert ended.returncode == 1
    assert "1 processes were ended" in ended.stdout
    assert "2 passed" in ended.stdout


def test_what_asks_for_a_gpu_is_found() -> None:
    names = {Path(file).name for file in gpu_tests()}
    assert {"test_gpu.py", "test_sends_gpu.py", "test_norm_gpu.py", "test_grouped_mm.py"} <= names
