"""Pools report the outcome of every task, and leave no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_how_a_process_ended_is_told_and_no_exception_takes_it_down():
    """Kills are distinguished from crashes; errors that cannot be unpickled become messages."""
    with LocalPool(3) as pool:
        numbers = {pool.submit(keep_what_does_no_harm, f"POISON {word}"): word for word in _ENDS}
        found = dict(pool.wait() for _ in numbers)
    outcomes = {numbers[number]: outcome for number, outcome in found.items()}
    for word, (kind, said) in _ENDS.items():
        assert type(outcomes[word]) is kind
        assert said in str(outcomes[word])


_ENDS = {
    "KILL": (WorkerKilledError, "was killed (SIGKILL)"),
    "EXIT": (WorkerDiedError, "exit code 3"),
    "HOMEMADE": (TaskFailedError, "HomemadeError: homemade 3 4"),
}


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_waits_for_work_is_replaced():
    with LocalPool(1) as pool:
        pool.submit(_process, 0)
        _, process = pool.wait()
        os.kill(process, signal.SIGKILL)
        pool._idle[0].process.join()
        number = pool.submit(_double, 5)
        assert pool.wait() == (number, 10)


@pytest.mark.slow
def test_leaving_a_pool_ends_a_task_that_is_at_work():
    with LocalPool(1) as pool:
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


def test_a_task_may_start_processes():
    with LocalPool(1) as pool:
        number = pool.submit(_with_a_process_of_its_own, 3)
        assert pool.wait() == (number, 3)


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


def _semaphores(process: int) -> set[str]:
    """Returns the semaphores that a process has open; /dev/shm also has other programs'."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split()[5] for line in maps if "/dev/shm/sem." in line}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_pool_has_no_semaphore_that_a_kill_would_leave_behind():
    before = _semaphores(os.getpid())
    with LocalPool(2) as pool:
        pool.submit(_process, 0)
        pool.submit(_process, 0)
        workers = [pool.wait()[1], pool.wait()[1]]
        assert _semaphores(os.getpid()) <= before
        assert not any(map(_semaphores, workers))


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
