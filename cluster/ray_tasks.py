"""Prepares data on a Ray cluster: one plain Ray task per item of data_pipeline/.

Plain tasks were within noise of a bare process per CPU second, whereas Ray Data took 1.5-3 times the wall
time and could deadlock (ray#44687). Results arrive in order of completion; the committer of the shards
restores the order of the data. The preparation decides how to handle failed tasks, as for any other pool.

The process that scans a split keeps it (make/kept.py), and tokenizing it there saves reading it twice. Ray
does not let a plain task choose its worker. But if no task waits for a worker, the free one is the one that
has just scanned. With a second task queued for every CPU, more than half of the splits were read twice, a
tenth of the processor time. Without a queue, a CPU waits 10 ms for the next task; tasks take seconds.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..data_pipeline.make.pools import WorkerDiedError, WorkerKilledError, run_task
from ..plugins import FOLDER, folder_of_job
from .places.ray_session import require_ray

T = TypeVar("T")

_CANCELS = 5
_CPUS_PER_WAITING = 16  # one queued task per 16 CPUs keeps a large cluster busy


def tasks_for(num_cpus: int) -> int:
    """Returns how many tasks to have submitted at a time to `num_cpus` CPUs."""
    return max(1, num_cpus + num_cpus // _CPUS_PER_WAITING)


class RayPool:
    """Runs tasks on the connected cluster. Use it as a context manager.

    It submits about as many tasks at a time as there are CPUs, so the cluster's memory holds few results.
    """

    def __init__(self, *, capacity: int | None = None):
        """Takes the number of tasks to submit at a time; None: as the cluster's CPUs allow, which may change."""
        require_ray()
        import ray

        self._capacity = capacity
        self._task: Any = ray.remote(_call).options(
            num_cpus=1,
            max_retries=0,  # the preparation counts attempts
            scheduling_strategy="SPREAD",
        )
        self._out: dict[Any, int] = {}
        self._submitted = 0

    @property
    def capacity(self) -> int:
        """Returns how many tasks to submit at a time."""
        if self._capacity is not None:
            return self._capacity
        import ray

        return tasks_for(int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Submits a task and returns its number."""
        self._submitted += 1
        self._out[self._task.remote(function, item, folder_of_job())] = self._submitted
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Waits until a task has ended; returns its number and its result or exception."""
        import ray

        done, _ = ray.wait(list(self._out), num_returns=1)
        return self._out.pop(done[0]), _result(done[0])

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *exception: object) -> None:
        """Cancels tasks that are still running (after an error or Ctrl-C)."""
        import ray
        from ray.exceptions import RayError

        out = list(self._out)
        for _ in range(_CANCELS):  # Ray can lose the cancellation of a task that is about to start
            for reference in out:
                with contextlib.suppress(RayError):
                    ray.cancel(reference, force=True)
            if out:
                out = ray.wait(out, num_returns=len(out), timeout=1.0)[1]


def _call(function: Callable[[T], object], item: T, folder: str) -> object:
    """Runs one item; unlike a Ray task, `function` may be any callable."""
    os.environ[FOLDER] = folder  # from which the user's own functions are imported
    return run_task(function, item)


def _result(reference: Any) -> Any:
    """Returns a task's result, or the exception that ended it."""
    import ray
    from ray.exceptions import (
        NodeDiedError,
        OutOfMemoryError,
        RayError,
        RayTaskError,
        TaskCancelledError,
    )

    try:
        return ray.get(reference)
    except RayTaskError as error:
        return _cause(error)
    except (NodeDiedError, OutOfMemoryError, TaskCancelledError) as error:
        return WorkerKilledError(f"Ray ended its process ({type(error).__name__})")
    except RayError as error:  # Ray does not say why the worker died
        return WorkerDiedError(f"its process died ({type(error).__name__})")


def _cause(error: Any) -> Exception:
    """Returns a task's exception, chained to Ray's report of where it was raised."""
    if not isinstance(error.cause, Exception):
        return error
    error.cause.__cause__ = error
    return error.cause
