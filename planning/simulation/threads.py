"""Runs many ranks in one process as threads whose collectives carry real values.

Starting 8 ranks takes 0.2 s, 256 ranks 0.6 s.

Only this module uses torch's private parts (`torch.testing._internal.distributed` and the thread
isolation of its process groups). If a version of torch lacks them, it raises
`SimulationUnavailable`, and the rest of the package works.

A `TrafficCounter` counts the rows and bytes that each rank passes to a collective, for every pair
of ranks. It measures what is sent, independently of the dispatchers' own counters. Threads share
global state such as torch's default random generator, so a rank must draw from its own generator.

Legend: P ranks of the world.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.dispatch.exchange import ExchangeMismatch
from ...distributed.layout import spell_ranks

MOST_THREADS = 256
BACKEND = "moebius_threads"

_T = TypeVar("_T")
_one_world = threading.Lock()  # torch keeps the threads' collectives in one table per process


class SimulationUnavailable(ValueError):
    """Reports that this torch lacks what simulated ranks need."""


class RankFailed(RuntimeError):
    """Reports a simulated rank that raised (the cause) or never arrived (no cause)."""


@dataclass
class TrafficCounter:
    """Counts the rows and bytes that every rank sends to every rank, itself included.

    Each rank writes only its own line. A row is a line of a float matrix as wide as one of the
    rank's `widths`; other tensors count only as bytes.
    """

    num_ranks: int
    rows_PP: np.ndarray = field(init=False)  # [from, to]
    bytes_PP: np.ndarray = field(init=False)
    widths: list[frozenset[int]] = field(init=False)
    is_open: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.is_open, self.widths = [False] * self.num_ranks, [frozenset()] * self.num_ranks
        self.clear()

    def clear(self) -> None:
        """Sets all counts to zero."""
        self.rows_PP, self.bytes_PP = (
            np.zeros((self.num_ranks, self.num_ranks), np.int64) for _ in range(2)
        )

    @contextmanager
    def counting(self, rank: int, *, widths: Set[int]) -> Iterator[None]:
        """Counts what `rank` sends while the context lasts; matrices of these widths hold rows."""
        self.widths[rank], self.is_open[rank] = frozenset(widths), True
        try:
            yield
        finally:
            self.is_open[rank] = False

    def count(self, ranks: Sequence[int], rank: int, sent: Sequence[int], tensor: Tensor) -> None:
        """Adds `sent[p]` lines of `tensor` from `rank` to `ranks[p]`, if the rank is counting."""
        if not self.is_open[rank]:
            return
        line_bytes = tensor[:1].numel() * tensor.element_size()
        np.add.at(self.bytes_PP[rank], np.asarray(ranks), np.asarray(sent, np.int64) * line_bytes)
        if (
            tensor.dim() == 2
            and tensor.is_floating_point()
            and tensor.shape[1] in self.widths[rank]
        ):
            np.add.at(self.rows_PP[rank], np.asarray(ranks), np.asarray(sent, np.int64))


def run_threads(
    fn: Callable[[int], _T],
    num_ranks: int,
    *,
    traffic: TrafficCounter | None = None,
    timeout_s: float = 600.0,
) -> list[_T]:
    """Runs fn(rank) on threads that are the ranks of one world, and returns their results by rank.

    The world is torch's default group. If no rank enters an exchange or ends for `timeout_s`, the
    remaining ranks count as stuck.

    Raises:
        SimulationUnavailable: this torch has no threaded process group.
        ValueError: there are too many ranks, or a rank raised it.
        RankFailed: a rank raised, or ranks are stuck; the others are released.
    """
    if not 1 <= num_ranks <= MOST_THREADS:
        raise ValueError(f"{num_ranks} simulated ranks: must be 1 to {MOST_THREADS}")
    threaded = _threaded()
    with _one_world:
        return _World(threaded, num_ranks, traffic).run(fn, timeout_s)


@dataclass(frozen=True)
class _Threaded:
    """Holds the private parts of torch that make a world of threads."""

    groups: Any  # torch's class of threaded process groups
    metered: Any  # our subclass, which counts what every rank sends
    install: Callable[[], Any]
    uninstall: Callable[[], Any]
    isolate: Callable[[bool], Any]


class _World:
    """Runs one world of threads from start to end."""

    def __init__(self, threaded: _Threaded, num_ranks: int, traffic: TrafficCounter | None) -> None:
        self.threaded, self.num_ranks, self.traffic = threaded, num_ranks, traffic
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.failures: list[tuple[int, BaseException]] = []

    def run(self, fn: Callable[[int], _T], timeout_s: float) -> list[_T]:
        results: list[Any] = [None] * self.num_ranks
        threads = [
            threading.Thread(
                target=self._run_rank, args=(rank, fn, results), name=f"rank {rank}", daemon=True
            )
            for rank in range(self.num_ranks)
        ]
        with _isolated(self.threaded, self.traffic):
            for thread in threads:
                thread.start()
            late = self._wait(threads, timeout_s)
        if self.failures:
            rank, error = self.failures[0]
            if isinstance(error, ValueError):  # the request was wrong
                raise error
            raise RankFailed(
                f"simulated rank {rank} of {self.num_ranks}: {type(error).__name__}: {error}"
            ) from error
        if late:
            raise RankFailed(
                f"no progress for {timeout_s:g} s: simulated ranks {spell_ranks(late)} are still "
                "waiting for others"
            )
        return results

    def _run_rank(self, rank: int, fn: Callable[[int], _T], results: list[Any]) -> None:
        try:
            dist.init_process_group(BACKEND, rank=rank, world_size=self.num_ranks, store=self.store)
            results[rank] = fn(rank)
        except SystemExit:  # released by `_release`; the other rank's failure is reported
            pass
        except BaseException as error:  # noqa: BLE001 - `run` reports whatever ends a thread
            self.failures.append((rank, error))
            self._release(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _wait(self, threads: list[threading.Thread], timeout_s: float) -> list[int]:
        """Joins all threads and returns the ranks that had to be released.

        Ranks are released once no rank has entered a collective or ended for `timeout_s`.
        """
        last_signs, since = None, time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(min(timeout_s, 1.0))
                signs = self.threaded.metered.entered, sum(other.is_alive() for other in threads)
                if last_signs != signs:
                    last_signs, since = signs, time.monotonic()
                elif time.monotonic() - since > timeout_s:
                    return self._release_late(threads)
        return []

    def _release_late(self, threads: list[threading.Thread]) -> list[int]:
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        self._release(TimeoutError())
        deadline = time.monotonic() + 10
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return late

    def _release(self, error: BaseException) -> None:
        """Releases ranks that wait in a collective, now or later."""
        with self.threaded.groups._coll_lock:
            self.threaded.groups.exception_handle(error)


@lru_cache(maxsize=1)
def _threaded() -> _Threaded:
    """Finds torch's private parts and registers our backend.

    Raises:
        SimulationUnavailable: a name is missing.
    """
    try:
        from torch.testing._internal.distributed import multi_threaded_pg as found

        metered = _metered(found.ProcessLocalGroup)
        barrier: Any = found._store_based_barrier  # pyright: ignore[reportPrivateImportUsage]
        private: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
        isolate = private._set_thread_isolation_mode
        parts = _Threaded(
            found.ProcessLocalGroup,
            metered,
            found._install_threaded_pg,
            found._uninstall_threaded_pg,
            isolate,
        )
    except (ImportError, AttributeError) as error:
        raise SimulationUnavailable(
            f"torch {torch.__version__} has no threaded process group for simulated ranks "
            f"({error}); install a torch version from constraints.txt"
        ) from None

    def create(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        group = metered(rank, world_size)
        barrier(rank, store, "", world_size, timeout)
        return group

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return parts


class _AllToAll:
    """Copies rows for the whole group, on its first rank, once all have arrived.

    torch's own version takes P³ steps: a minute on 256 ranks.
    """

    @torch.no_grad()
    def work(self, data: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
        """Copies every rank's rows to their receivers: (output, rows, received, sent) by rank."""
        parts = [rows.detach().split(sent) for _, rows, _, sent in data]
        for target, (output, _, received, _) in enumerate(data):
            arrived = [part[target] for part in parts]
            for source, (rows, expected) in enumerate(zip(arrived, received, strict=True)):
                if len(rows) != expected:
                    raise ExchangeMismatch(
                        f"rank {source} of the group sends {len(rows)} rows to rank {target}, "
                        f"which expects {expected}"
                    )
            output.detach().copy_(torch.cat(arrived))


def _metered(base: Any) -> type:
    """Returns torch's threaded group with a counter in the three calls that all collectives use."""

    class Metered(base):
        traffic: TrafficCounter | None = None  # of the running world
        entered = 0  # collectives of any rank, as a sign of life; not an exact count

        def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
            self.count(inputs[0], [len(inputs[0])] * self.size())
            return super().allgather(outputs, inputs, *options)

        def reduce_scatter(self, output: Any, parts: Any, *options: Any) -> Any:
            self.count(parts[0][0], [len(part) for part in parts[0]])
            return super().reduce_scatter(output, parts, *options)

        def count(self, rows: Tensor, sent: list[int]) -> None:
            Metered.entered += 1
            if self.traffic is not None:
                ranks = dist.get_process_group_ranks(self)  # pyright: ignore[reportArgumentType]
                self.traffic.count(ranks, ranks[self.rank()], sent, rows)

    def all_to_all(
        self: Any, output: Tensor, rows: Tensor, received: Any, sent: Any, *options: Any
    ) -> Any:
        equal = [len(rows) // self.size()] * self.size()
        received, sent = list(received or equal), list(sent or equal)
        self.count(rows, sent)
        together = base._start_coll(_AllToAll(), self)
        work = together.join(self.rank(), (output, rows, received, sent))
        base._end_coll(together, self)
        return work

    # The name since torch 2.13, and the one before.
    setattr(
        Metered,
        "all_to_all_single" if hasattr(base, "all_to_all_single") else "alltoall_base",
        all_to_all,
    )
    return Metered


@contextmanager
def _isolated(threaded: _Threaded, traffic: TrafficCounter | None) -> Iterator[None]:
    """Gives each thread its own process groups, and counts in `traffic`, while it lasts."""
    threaded.groups.reset()
    threaded.install()
    threaded.isolate(True)
    threaded.metered.traffic, hook = traffic, sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook  # every rank wrapped it to print its number
        threaded.metered.traffic = None
        threaded.isolate(False)
        threaded.uninstall()
        threaded.groups.reset()
