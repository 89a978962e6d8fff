"""Pools report the outcome of every task, and leave no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from poison import keep_what_does_no_harm

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.pools import (
    LocalPool,
    SerialPool,
    TaskFailedError,
    WorkerDiedError,
    WorkerKilledError,
)


def _double(item: int) -> int:
    return 2 * item


def _fail(item: str) -> None:
    raise InputError(item)


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
    """Also what would end this process ends the task only."""
    pool = SerialPool()
    tasks = [
        pool.submit(_double, 3),
        pool.submit(_fail, "bad file"),
        pool.submit(keep_what_does_no_harm, "POISON SYSTEMEXIT"),
        pool.submit(keep_what_does_no_harm, "POISON PANIC"),
    ]
    assert pool.wait() == (tasks[0], 6)
    for task, kind, said in (
        (tasks[1], InputError, "bad file"),
        (tasks[2], TaskFailedError, "SystemExit: 5"),
        (tasks[3], TaskFailedError, "PanicError: panicked at 3:4"),
    ):
        number, error = pool.wait()
        assert (number, type(error), str(error)) == (task, kind, said)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_pool_tells_how_each_task_ended_and_leaves_nothing_behind():
    """Kills are distinguished from crashes; errors that cannot be unpickled become messages."""
    before = _semaphores(os.getpid())
    with LocalPool(3) as pool:
        numbers = {pool.submit(keep_what_does_no_harm, f"POISON {word}"): word for word in _ENDS}
        found = dict(pool.wait() for _ in numbers)
        asked: list[tuple[Any, Any]] = [(_fail, "x"), (_double, 4), (_process, 0)]
        for function, item in asked:
            numbers[pool.submit(function, item)] = function.__name__
        found |= dict(pool.wait() for _ in range(3))
        outcomes = {numbers[number]: outcome for number, outcome in found.items()}
        assert _semaphores(os.getpid()) <= before, "a kill would leave them"
        assert not _semaphores(outcomes["_process"])
    for word, (kind, said) in _ENDS.items():
        assert type(outcomes[word]) is kind
        assert said in str(outcomes[word])
    assert isinstance(outcomes["_fail"], InputError)
    assert outcomes["_double"] == 8
    assert outcomes["_process"] != os.getpid()
    _await_end(outcomes["_process"])


def _semaphores(process: int) -> set[str]:
    """Returns the semaphores that a process has open; /dev/shm also has other programs'."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split()[5] for line in maps if "/dev/shm/sem." in line}


_ENDS = {
    "KILL": (WorkerKilledError, "was killed (SIGKILL)"),
    "EXIT": (WorkerDiedError, "exit code 3"),
    "HOMEMADE": (TaskFailedError, "HomemadeError: homemade 3 4"),
}


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_waits_is_replaced_and_leaving_ends_one_at_work():
    with LocalPool(1) as pool:
        pool.submit(_process, 0)
        os.kill(pool.wait()[1], signal.SIGKILL)
        pool._idle[0].process.join()
        number = pool.submit(_with_a_process_of_its_own, 3)
        assert pool.wait() == (number, 3)
        pool.submit(_process, 0)
        _, process = pool.wait()
        pool.submit(_process, 600)
        assert _is_alive(process)
    _await_end(process)


def _with_a_process_of_its_own(exit_code: int) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(exit_code,))
    process.start()
    process.join()
    return process.exitcode


_PROGRAM = """
import os, time
from moebius.data_pipeline.make.pools import LocalPool

def work(seconds):
    print(os.getpid(), flush=True)
    time.sleep(seconds)
"""


@pytest.mark.slow
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
    """Its workers cannot start, which is not the tasks' fault."""
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
    assert "PrepareError: a worker process could not start" in ended.stderr
    assert '`if __name__ == "__main__":`' in ended.stderr
