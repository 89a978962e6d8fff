"""Where tasks run: in this process, or in processes of this machine.

A pool takes functions of one item, runs them in any order and tells which one is done. It never
decides what a failure means: `wait` returns an exception as it returns a result. A process that
dies is one such failure, of exactly the task that it was at, and is replaced. Whether it was killed
from outside is told apart from a crash: the first is no fault of what it was at.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, cast

from ..errors import DataError, PrepareError

T = TypeVar("T")

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM}


class WorkerDiedError(Exception):
    """Says that the process of a task ended before the task did."""


class WorkerKilledError(WorkerDiedError):
    """Says that somebody ended the process of a task: a person, or the system for its memory."""


class TaskFailedError(Exception):
    """Stands for an exception that cannot travel or is none of Python's `Exception`s."""


def run_task(function: Callable[[T], object], item: T) -> object:
    """Runs a task so that its exception can be told from the end of its process.

    Raises:
        Exception: that of the task. What would end this process (`sys.exit`, a panic of a library
            in Rust) or cannot be pickled comes as a `TaskFailedError`.
    """
    try:
        return function(item)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if _travels(error):
            raise
        raise TaskFailedError(f"{type(error).__name__}: {error}") from error


def _travels(error: BaseException) -> bool:
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), Exception)
    except Exception:  # noqa: BLE001 (an exception's own code may do anything)
        return False


def import_tasks(_: object = None) -> None:
    """Imports what most tasks need: for a process that has none yet."""
    import_module(f"{__package__}.tasks")


class TaskPool(Protocol):
    """Runs functions of one item, anywhere."""

    @property
    def capacity(self) -> int:
        """Returns how many tasks may be out at a time; with more, some would only wait."""
        ...

    def expect(self, num_tasks: int) -> None:
        """Says that at least so many tasks will come: processes may start for them meanwhile."""
        ...

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Hands out a task and returns its number."""
        ...

    def wait(self) -> tuple[int, Any]:
        """Waits until some task has ended; returns its number and its result or exception."""
        ...


class SerialPool:
    """Runs tasks one after another in this process."""

    capacity = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Callable[[Any], object], object]] = deque()
        self._submitted = 0

    def expect(self, num_tasks: int) -> None:
        """Implements `TaskPool.expect`: there is nothing to start."""

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Implements `TaskPool.submit`."""
        self._submitted += 1
        self._waiting.append((self._submitted, function, item))
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Implements `TaskPool.wait`."""
        number, function, item = self._waiting.popleft()
        try:
            return number, run_task(function, item)
        except Exception as error:  # noqa: BLE001 (judged by whoever waits)
            return number, error


class LocalPool:
    """Runs tasks in processes of this machine. Use it as a context manager.

    Leaving it ends the processes, whatever they are at. So does the end of this process, however it
    ends: each of them holds one end of a pipe.
    """

    def __init__(self, num_workers: int):
        """Starts nothing yet: a process is started with the first task that needs or expects it.

        Raises:
            DataError: fewer than one worker.
        """
        if num_workers < 1:
            raise DataError(f"a pool of {num_workers} workers: at least 1")
        self.capacity = num_workers
        # One pool per process: when one breaks, it is known which task it was at.
        self._idle: list[_Worker] = []
        self._out: dict[Future[Any], tuple[int, _Worker]] = {}
        self._submitted = 0
        self._life, self._life_of_workers = cast("tuple[Any, Any]", multiprocessing.Pipe())

    def expect(self, num_tasks: int) -> None:
        """Implements `TaskPool.expect`."""
        while len(self._idle) + len(self._out) < min(num_tasks, self.capacity):
            worker = self._start()
            worker.executor.submit(import_tasks)
            self._idle.append(worker)

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Implements `TaskPool.submit`."""
        worker = self._idle.pop() if self._idle else self._start()
        try:
            future = worker.executor.submit(run_task, function, item)
        except BrokenProcessPool:  # it was killed while it had nothing to do
            worker.check_began()
            worker = self._start()
            future = worker.executor.submit(run_task, function, item)
        self._submitted += 1
        self._out[future] = (self._submitted, worker)
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Implements `TaskPool.wait`."""
        done, _ = wait(self._out, return_when=FIRST_COMPLETED)
        # of several the one that was handed out first
        future = min(done, key=lambda one: self._out[one][0])
        number, worker = self._out.pop(future)
        try:
            result = future.result()
        except BrokenProcessPool:
            worker.check_began()
            return number, worker.end()
        except Exception as error:  # noqa: BLE001 (judged by whoever waits)
            result = error
        self._idle.append(worker)
        return number, result

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self._life.close()
        for worker in [*self._idle, *(worker for _, worker in self._out.values())]:
            worker.executor.shutdown(wait=True, cancel_futures=True)
        self._life_of_workers.close()

    def _start(self) -> "_Worker":
        executor = ProcessPoolExecutor(
            max_workers=1,
            # not fork: this process may have threads, and locks that they hold
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(self._life_of_workers,),
        )
        before = set(multiprocessing.active_children())
        began = executor.submit(os.getpid)
        (process,) = set(multiprocessing.active_children()) - before
        return _Worker(executor, began, process)


@dataclass(frozen=True)
class _Worker:
    """Is one process, and its first sign of life."""

    executor: ProcessPoolExecutor
    began: "Future[int]"
    process: BaseProcess

    def check_began(self) -> None:
        """Tells a process that died at a task from one that could not come so far.

        Raises:
            PrepareError: it did not begin: no other would.
        """
        self.executor.shutdown()  # it has an exit code from here on
        if self.began.exception() is not None and (self.process.exitcode or 0) >= 0:
            raise PrepareError(
                "a worker process could not be started (its own error is above): in a script, call "
                'this below `if __name__ == "__main__":`, since every worker imports the script'
            )

    def end(self) -> WorkerDiedError:
        """Returns how the process has ended."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return WorkerDiedError(f"its process ended with exit code {code}")
        name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
        if -code in _FROM_OUTSIDE:
            return WorkerKilledError(f"its process was killed ({name})")
        return WorkerDiedError(f"its process crashed ({name})")


def _begin_worker(life: Any) -> None:
    """Makes a worker end with its pool, and leaves Ctrl-C to the process that the user sees."""
    import pyarrow as pa

    faulthandler.enable()  # a crash says where it was
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)  # one process per core is enough
    threading.Thread(target=_end_with, args=(life,), name="end with the pool", daemon=True).start()


def _end_with(life: Any) -> None:
    try:
        life.recv()
    except (EOFError, OSError):
        os._exit(1)
