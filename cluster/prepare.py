"""Data preparation on a Ray cluster: the work of data_pipeline/, one plain Ray task per item.

Plain tasks, not Ray Data: measured within noise of a bare process per CPU second, where Ray Data
took 1.5-3 times the wall time and could wait for itself for ever (ray#44687). Results come in the
order in which they are done; who needs another order (the committer of the shards) restores it. A
task whose worker was killed is run again by Ray.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..data_pipeline.making.prepare import TaskRunner
from .ray_session import require_ray

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS = 3


def ray_runner(*, in_flight: int | None = None) -> TaskRunner:
    """Returns a runner on the cluster that this process is connected to.

    Args:
        in_flight: how many tasks may be out at a time; by default twice the cluster's CPUs, so that
            no worker waits and the cluster's memory never holds more than a few results.
    """
    require_ray()

    def run(function: Callable[[T], R], items: Sequence[T], /) -> Iterator[tuple[int, R]]:
        import ray

        limit = in_flight or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        task = ray.remote(_call).options(
            num_cpus=1,
            max_retries=ATTEMPTS - 1,  # counts killed workers and, with the next line, exceptions
            retry_exceptions=True,
            scheduling_strategy="SPREAD",
        )
        waiting = iter(enumerate(items))
        out: dict[Any, int] = {}
        try:
            while True:
                for index, item in waiting:
                    out[task.remote(function, item)] = index
                    if len(out) >= limit:
                        break
                if not out:
                    return
                done, _ = ray.wait(list(out), num_returns=1)
                index = out.pop(done[0])
                yield index, _result(done[0], items[index], index, len(items))
        finally:
            _cancel(out)

    return run


def _call(function: Callable[[T], R], item: T) -> R:
    """The task: any callable will do, where Ray itself takes plain functions only."""
    return function(item)


def _result(reference: Any, item: object, index: int, total: int) -> Any:
    """A task's result; its own exception, with a note about the item, when it failed every time."""
    import ray
    from ray.exceptions import RayTaskError, WorkerCrashedError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"item {index + 1} of {total}, tried {ATTEMPTS} times: {item!r:.500}")
        raise cause from error
    except WorkerCrashedError as error:
        error.add_note(
            f"item {index + 1} of {total}, tried {ATTEMPTS} times, killed its process each time: "
            f"{item!r:.500}"
        )
        raise


def _cancel(references: dict[Any, int]) -> None:
    """Ends what is still out when the caller has stopped listening (an error, Ctrl-C)."""
    import ray
    from ray.exceptions import RayError

    for reference in references:
        with contextlib.suppress(RayError):
            ray.cancel(reference, force=True)
