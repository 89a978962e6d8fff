"""Where tasks run: in this process, or in processes of this machine.

A pool takes functions of one item, runs them in any order and tells which one is done. It never
decides what a failure means: `wait` returns an exception as it returns a result. A process that
dies is one such failure, of exactly the task that it was at, and is replaced.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from ..errors import DataError, PrepareError

T = TypeVar("T")


class WorkerDiedError(Exception):
    """Says that the process of a task ended before the task did."""


class TaskPool(Protocol):
    """Runs functions of one item, anywhere."""

    @property
    def capacity(self) -> int:
        """Returns how many tasks may be out at a time; with more, some would only wait."""
        ...

    @property
    def description(self) -> str:
        """Returns where tasks run, for people."""
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
    description = "this process"

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Callable[[Any], object], object]] = deque()
        self._submitted = 0

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Implements `TaskPool.submit`."""
        self._submitted += 1
        self._waiting.append((self._submitted, function, item))
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Implements `TaskPool.wait`."""
        number, function, item = self._waiting.popleft()
        try:
            return number, function(item)
        except Exception as error:  # noqa: BLE001 (judged by whoever waits)
            return number, error


class LocalPool:
    """Runs tasks in processes of this machine. Use it as a context manager.

    Leaving it ends the processes, whatever they are at. So does the end of this process, however it
    ends: each of them holds one end of a pipe.
    """

    def __init__(self, num_workers: int):
        """Starts nothing yet: a process is started with the first task that needs it.

        Raises:
            DataError: fewer than one worker.
        """
        if num_workers < 1:
            raise DataError(f"a pool of {num_workers} workers: at least 1")
        self.capacity = num_workers
        self.description = f"{num_workers} processes of this machine"
        # One pool per process: when one breaks, it is known which task it was at.
        self._idle: list[_Worker] = []
        self._out: dict[Future[Any], tuple[int, _Worker]] = {}
        self._submitted = 0
        self._life, self._life_of_workers = cast("tuple[Any, Any]", multiprocessing.Pipe())

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Implements `TaskPool.submit`."""
        worker = self._idle.pop() if self._idle else self._start()
        self._submitted += 1
        self._out[worker.executor.submit(function, item)] = (self._submitted, worker)
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
            worker.executor.shutdown(wait=False)
            worker.check_began()
            return number, WorkerDiedError("its process died")
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
        return _Worker(executor, executor.submit(os.getpid))


@dataclass(frozen=True)
class _Worker:
    """Is one process, and its first sign of life."""

    executor: ProcessPoolExecutor
    began: "Future[int]"

    def check_began(self) -> None:
        """Tells a process that died at a task from one that never came so far.

        Raises:
            PrepareError: it did not begin: no other would.
        """
        if self.began.exception() is not None:
            raise PrepareError(
                "a worker process could not be started (its own error is above): in a script, call "
                'this below `if __name__ == "__main__":`, since every worker imports the script'
            )


def _begin_worker(life: Any) -> None:
    """Makes a worker end with its pool, and leaves Ctrl-C to the process that the user sees."""
    import pyarrow as pa

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)  # one process per core is enough
    threading.Thread(target=_end_with, args=(life,), name="end with the pool", daemon=True).start()


def _end_with(life: Any) -> None:
    try:
        life.recv()
    except (EOFError, OSError):
        os._exit(1)
