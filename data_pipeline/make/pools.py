"""Task pools, and the policy for tasks that fail.

A pool runs functions of one item in any order, in this process or in others of this machine. `wait`
returns exceptions like results. A process that dies is a failure of its task; a kill from outside is
distinguished from a crash.

`Failures` decides what follows from a failure:

    InputError                 ends the preparation; with on_poison="quarantine" the unit is left out
    another DataError          ends the preparation, since no text is at fault
    a crash, an exception      after three tries, the unit is left out ("auto", "quarantine"), or the
                               preparation ends ("fail")
    no memory, killed          after three tries, the preparation ends, since fewer workers may help;
                               left out only with on_poison="quarantine"
    a system error,            after three tries, the preparation ends: a full disk would otherwise
    a missing module           leave out everything

The next call always continues where a preparation stopped.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection
from typing import Any, Literal, Protocol, TypeVar, cast

from ...plugins import PluginError
from ..errors import DataError, InputError, PrepareError

T = TypeVar("T")

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM}


class WorkerDiedError(Exception):
    """Says that a task's process ended before the task did."""


class WorkerKilledError(WorkerDiedError):
    """Says that a task's process was killed, by a person or by the system for its memory."""


class TaskFailedError(Exception):
    """Replaces an exception that cannot be pickled or is not an `Exception`."""


def run_task(function: Callable[[T], object], item: T) -> object:
    """Runs a task so that its failure does not end the process.

    Raises:
        Exception: that of the task; or TaskFailedError if it would end the process (`sys.exit`, a
            panic in Rust) or cannot be pickled.
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


def import_tasks() -> None:
    """Imports what most tasks need, for a fresh process."""
    import_module(f"{__package__}.tasks")


class TaskPool(Protocol):
    """Runs functions of one item, anywhere."""

    @property
    def capacity(self) -> int:
        """Returns how many tasks can run at once."""
        ...

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Submits a task and returns its number."""
        ...

    def wait(self) -> tuple[int, Any]:
        """Waits for any task to end; returns its number and its result or exception."""
        ...


class SerialPool:
    """Runs tasks one after another in this process."""

    capacity = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Callable[[Any], object], object]] = deque()
        self._submitted = 0

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Queues a task for `wait` to run, and returns its number."""
        self._submitted += 1
        self._waiting.append((self._submitted, function, item))
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Runs the oldest queued task; returns its number and its result or exception."""
        number, function, item = self._waiting.popleft()
        try:
            return number, run_task(function, item)
        except Exception as error:  # noqa: BLE001 (judged by whoever waits)
            return number, error


class LocalPool:
    """Runs tasks in processes of this machine. Use it as a context manager.

    Leaving it kills the processes. They also end with this process, however it ends, because each
    holds one end of a pipe. Tasks and results use another pipe per process. A killed pool of
    `concurrent.futures` would leave named semaphores in /dev/shm.
    """

    def __init__(self, num_workers: int):
        """Starts no process; the first task that needs one does."""
        self.capacity = num_workers
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}  # by task number, in the order of submission
        self._submitted = 0
        self._life, self._life_of_workers = cast("tuple[Any, Any]", multiprocessing.Pipe())

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Sends a task to an idle or a new worker process, and returns its number."""
        worker = self._idle.pop() if self._idle else _Worker(self._life_of_workers)
        try:
            worker.send(function, item)
        except OSError:  # it was killed while idle
            worker.check_began()
            worker = _Worker(self._life_of_workers)
            worker.send(function, item)
        self._submitted += 1
        self._busy[self._submitted] = worker
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Waits for any task to end; returns its number and its result or exception."""
        while True:
            ready = connection.wait([worker.pipe for worker in self._busy.values()])
            # the one submitted first
            number = next(one for one, worker in self._busy.items() if worker.pipe in ready)
            worker = self._busy[number]
            try:
                message = worker.receive()
            except (EOFError, OSError):
                del self._busy[number]
                worker.check_began()
                return number, worker.end()
            if message is not None:
                self._idle.append(self._busy.pop(number))
                return number, message.outcome

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self._life.close()
        self._life_of_workers.close()
        for worker in [*self._idle, *self._busy.values()]:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


@dataclass(frozen=True)
class _Result:
    """Holds what a task returned, or the exception that it raised."""

    outcome: Any


class _Worker:
    """Holds a process, and this side of the pipe to it."""

    def __init__(self, life: Any):
        # not fork: this process may have threads that hold locks
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # not a daemon, which could not start processes of its own
        self.process = context.Process(target=_work, args=(theirs, life), daemon=False)
        self._has_begun = False
        with _safe_path():
            self.process.start()
        theirs.close()

    def send(self, function: Callable[[T], object], item: T) -> None:
        """Sends the process a task."""
        self.pipe.send((function, item))

    def receive(self) -> _Result | None:
        """Returns the process's next result; None if the message only says that it has begun."""
        message = self.pipe.recv()
        self._has_begun = True
        return message

    def check_began(self) -> None:
        """Checks that a dead process had begun to work.

        Raises:
            PrepareError: it had not, so no other would.
        """
        with suppress(EOFError, OSError):
            while not self._has_begun:
                self.receive()
        self.process.join()
        if not self._has_begun and (self.process.exitcode or 0) >= 0:
            raise PrepareError(
                "a worker process could not start (its own error is above): in a script, call this "
                'below `if __name__ == "__main__":`, since every worker imports the script'
            )

    def end(self) -> WorkerDiedError:
        """Returns an error that describes how the process ended."""
        self.pipe.close()
        code = self.process.exitcode
        if code is None or code >= 0:
            return WorkerDiedError(f"its process ended with exit code {code}")
        name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
        if -code in _FROM_OUTSIDE:
            return WorkerKilledError(f"its process was killed ({name})")
        return WorkerDiedError(f"its process crashed ({name})")


@contextmanager
def _safe_path() -> Iterator[None]:
    """Starts Python inside without the working folder first on its path, where a `token.py` would end it."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _work(pipe: Any, life: Any) -> None:
    """Runs in a worker: reports that it has begun, then runs one task after another."""
    import pyarrow as pa

    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    pa.set_cpu_count(1)  # one process per core is enough
    threading.Thread(target=_end_with, args=(life,), name="end with the pool", daemon=True).start()
    pipe.send(None)
    import_tasks()
    while True:
        function, item = pipe.recv()
        try:
            outcome = run_task(function, item)
        except Exception as error:  # noqa: BLE001 (judged by whoever waits)
            error.add_note("in the worker:\n" + "".join(traceback.format_exception(error)))
            outcome = error  # pickling drops its traceback, hence the note
        pipe.send(_Result(outcome))


def _end_with(life: Any) -> None:
    try:
        life.recv()
    except (EOFError, OSError):
        os._exit(1)


ATTEMPTS = 3
"""How often a task is tried if its failure is not the user's mistake."""

OnPoison = Literal["auto", "fail", "quarantine"]
"""The policy for units that cannot be prepared: "auto" ends the preparation for a user's mistake and
quarantines units that crash; "fail" always ends it, "quarantine" always quarantines."""


class Failures:
    """Counts the failures of every task, and applies the policy."""

    def __init__(self, on_poison: OnPoison):
        self._on_poison = on_poison
        self._counts: Counter[Hashable] = Counter()

    def try_again(self, task: Hashable, error: BaseException) -> bool:
        """Counts a task's failure, and returns whether to try it again.

        Raises:
            DataError, PluginError: `error`, if it is the user's mistake.
        """
        if isinstance(error, InputError) and self._on_poison == "quarantine":
            return False
        if isinstance(error, DataError | PluginError):
            raise error
        self._counts[task] += 1
        return self._counts[task] < ATTEMPTS

    def check_is_poison(self, what: str, stage: str, error: BaseException) -> None:
        """Checks that a repeated error is the unit's fault, so that the unit may be left out.

        Raises:
            PrepareError: it is not, so the preparation ends.
        """
        advice = _advice(error)
        if isinstance(error, (MemoryError, WorkerKilledError)) and self._on_poison == "quarantine":
            advice = None
        if advice is not None or self._on_poison == "fail":
            raise ended(what, stage, error)


def ended(what: str, stage: str, error: BaseException) -> PrepareError:
    """Returns the error that ends a preparation."""
    message = f"{what} failed {ATTEMPTS} times in stage {stage!r}: {reason(error)}"
    if (advice := _advice(error)) is not None:
        message += (
            f". No text is known to be at fault, and no work is lost: {advice}, and run the same "
            "command again; it continues where it stopped"
        )
    result = PrepareError(message)
    result.__cause__ = error
    return result


def reason(error: BaseException) -> str:
    """Describes why a task failed, in words that are the same on any machine."""
    if isinstance(error, WorkerKilledError):
        return "its process was killed each time"
    if isinstance(error, WorkerDiedError):
        return "it killed its process each time"
    if isinstance(error, (InputError, TaskFailedError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _advice(error: BaseException) -> str | None:
    """Returns the remedy for a failure that is not a text's fault; None if it may be."""
    if isinstance(error, (MemoryError, WorkerKilledError)):
        return (
            "it has probably run out of memory; use fewer workers or a machine with more memory, or "
            "leave out failing units with on_poison='quarantine' (--on-poison quarantine)"
        )
    if isinstance(error, ImportError):
        return "install what is missing where the tasks run"
    if isinstance(error, OSError) and error.errno is not None:
        return "fix that"  # decoders raise OSErrors, too, but without a number
    return None
