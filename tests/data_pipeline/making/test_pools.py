"""Pools tell what became of every task, and leave no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moebius.data_pipeline.errors import DataError, InputError
from moebius.data_pipeline.making.pools import LocalPool, SerialPool, WorkerDiedError


def _double(item: int) -> int:
    return 2 * item


def _fail(item: str) -> None:
    raise InputError(item)


def _die(item: int) -> None:
    os.kill(os.getpid(), item)


def _process(item: float) -> int:
    time.sleep(item)
    return os.getpid()


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _await_end(process: int, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while _is_alive(process):
        assert time.monotonic() < deadline, f"process {process} is still there"
        time.sleep(0.02)


def test_a_serial_pool_returns_results_and_exceptions_in_order():
    pool = SerialPool()
    first, second = pool.submit(_double, 3), pool.submit(_fail, "bad file")
    assert pool.wait() == (first, 6)
    number, error = pool.wait()
    assert number == second
    assert isinstance(error, InputError)
    assert str(error) == "bad file"


def test_a_local_pool_tells_a_result_an_error_and_a_death_apart():
    with LocalPool(2) as pool:
        numbers = {pool.submit(_die, signal.SIGKILL): "dies", pool.submit(_fail, "x"): "fails"}
        found = dict(pool.wait() for _ in range(2))
        numbers |= {pool.submit(_double, 4): "works", pool.submit(_process, 0): "works elsewhere"}
        found |= dict(pool.wait() for _ in range(2))
    outcomes = {numbers[number]: outcome for number, outcome in found.items()}
    assert isinstance(outcomes["dies"], WorkerDiedError)
    assert isinstance(outcomes["fails"], InputError)
    assert outcomes["works"] == 8
    assert outcomes["works elsewhere"] != os.getpid()
    _await_end(outcomes["works elsewhere"])


def test_leaving_a_pool_ends_a_task_that_is_at_work():
    with LocalPool(1) as pool:
        pool.submit(_process, 0)
        _, process = pool.wait()
        pool.submit(_process, 600)
        assert _is_alive(process)
    _await_end(process)


def test_a_pool_of_nobody_is_refused():
    with pytest.raises(DataError, match="a pool of 0 workers: at least 1"):
        LocalPool(0)


_PROGRAM = """
import os, time
from moebius.data_pipeline.making.pools import LocalPool

def work(seconds):
    print(os.getpid(), flush=True)
    time.sleep(seconds)
"""


def test_workers_end_with_a_process_that_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        _PROGRAM
        + """
if __name__ == "__main__":
    with LocalPool(1) as pool:
        pool.submit(work, 600)
        pool.wait()
"""
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        assert _is_alive(worker)
        program.kill()
        _await_end(worker)


def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path):
    """Its workers cannot start; that is no fault of the tasks."""
    script = tmp_path / "script.py"
    script.write_text(
        _PROGRAM
        + """
with LocalPool(1) as pool:
    pool.submit(work, 0)
    pool.wait()
"""
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "PrepareError: a worker process could not be started" in ended.stderr
    assert '`if __name__ == "__main__":`' in ended.stderr
