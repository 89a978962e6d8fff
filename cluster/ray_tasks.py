"""Data preparation on a Ray cluster: the work of data_pipeline/, one plain Ray task per item.

Plain tasks, not Ray Data: measured within noise of a bare process per CPU second, where Ray Data
took 1.5-3 times the wall time and could wait for itself for ever (ray#44687). Results come in the
order in which they are done; who needs another order (the committer of the shards) restores it.
What to do about a task that failed is decided by the preparation, for Ray as for any other pool.

A split is read to be scanned, and kept by the process that has scanned it (making/kept.py). Ray does
not let a plain task choose its worker; but where no task waits for a worker, the one that is free is
the one that has just scanned, and what comes next, tokenising that split, is run there. With a second
task for every CPU in line more than half of the splits were read twice: a tenth of the processor
time. A CPU that waits for the next task waits 10 ms, of seconds that a task takes.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..data_pipeline.make.pools import WorkerDiedError, WorkerKilledError, import_tasks, run_task
from ..own_parts import FOLDER, folder_of_job
from .places.ray_session import require_ray

T = TypeVar("T")

_CANCELS = 5
_CPUS_PER_WAITING = 16  # of a large cluster one task waits, so that the driver keeps all busy


def tasks_for(num_cpus: int) -> int:
    """Returns how many tasks are out at a time on so many CPUs."""
    return max(1, num_cpus + num_cpus // _CPUS_PER_WAITING)


class RayPool:
    """Runs tasks on the cluster that this process is connected to. Use it as a context manager.

    About as many tasks are out at a time as there are CPUs, and the cluster's memory never holds
    more than a few results.
    """

    def __init__(self, *, capacity: int | None = None):
        """Takes the tasks that may be out at a time; None: as many as suit the cluster's CPUs.

        Nodes may come and go: a capacity that was not given is asked of the cluster each time.
        """
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
        """Returns how many tasks may be out at a time, by default as many as suit the CPUs."""
        if self._capacity is not None:
            return self._capacity
        import ray

        return tasks_for(int(ray.cluster_resources().get("CPU", 1)))

    def expect(self, num_tasks: int) -> None:
        """Implements `TaskPool.expect`: workers import what tasks need while nobody waits."""
        for _ in range(min(num_tasks, self.capacity)):
            self._task.remote(import_tasks, None, folder_of_job())

    def submit(self, function: Callable[[T], object], item: T, /) -> int:
        """Submits a task to the Ray cluster and returns its number."""
        self._submitted += 1
        self._out[self._task.remote(function, item, folder_of_job())] = self._submitted
        return self._submitted

    def wait(self) -> tuple[int, Any]:
        """Waits until some task has ended; returns its number and its result or exception."""
        import ray

        done, _ = ray.wait(list(self._out), num_returns=1)
        return self._out.pop(done[0]), _result(done[0])

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends what is still out when nobody listens any more (an error, Ctrl-C)."""
        import ray
        from ray.exceptions import RayError

        out = list(self._out)
        for _ in range(_CANCELS):  # Ray can lose a cancellation of a task that is about to start
            for reference in out:
                with contextlib.suppress(RayError):
                    ray.cancel(reference, force=True)
            if out:
                out = ray.wait(out, num_returns=len(out), timeout=1.0)[1]


def _call(function: Callable[[T], object], item: T, folder: str) -> object:
    """The task: any callable will do, where Ray itself takes plain functions only."""
    os.environ[FOLDER] = folder  # which functions of the user's own are imported from
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
    except RayError as error:  # Ray does not say what a worker died of
        return WorkerDiedError(f"its process died ({type(error).__name__})")


def _cause(error: Any) -> Exception:
    """Returns the exception of a task, with Ray's account of where it was raised."""
    if not isinstance(error.cause, Exception):
        return error
    error.cause.__cause__ = error
    return error.cause
