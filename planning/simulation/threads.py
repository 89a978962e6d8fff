"""Runs many ranks in one process as threads whose collectives carry real values.

Starting 8 ranks takes 0.2 s, 256 ranks 0.6 s.

Only this module uses torch's threaded process group, which belongs to torch's own tests, and the thread
isolation of process groups. If a version of torch lacks them, only the simulation fails.

`counting` counts the rows and bytes that a rank passes to collectives, by receiver. It measures
what is sent, independently of the dispatchers' own counters. Threads share global state such as
torch's default random generator, so a rank must draw from its own generator.

Legend: P ranks of the world.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
_this_rank = threading.local()  # `sent`: the `Sent` that counts, or None


class RankFailed(RuntimeError):
    """Reports a simulated rank that raised (the cause) or never arrived (no cause)."""


@dataclass(frozen=True)
class Sent:
    """Counts what a rank sends to every rank, itself included.

    A row is a line of a float matrix as wide as one of `widths`; other tensors count only as bytes.
    """

    widths: set[int]
    rows_P: np.ndarray
    bytes_P: np.ndarray

    def add(self, ranks: Sequence[int], sent: Sequence[int], tensor: Tensor) -> None:
        """Adds `sent[p]` lines of `tensor` to `ranks[p]`."""
        self.bytes_P[ranks] += np.array(sent) * tensor[:1].numel() * tensor.element_size()
        if tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] in self.widths:
            self.rows_P[ranks] += sent


@contextmanager
def counting(num_ranks: int, *, widths: set[int]) -> Iterator[Sent]:
    """Counts what the rank on this thread sends while the context lasts."""
    rows_P, bytes_P = np.zeros((2, num_ranks), np.int64)
    _this_rank.sent = Sent(widths, rows_P, bytes_P)
    try:
        yield _this_rank.sent
    finally:
        _this_rank.sent = None


def run_threads(fn: Callable[[int], _T], num_ranks: int, *, timeout_s: float = 3600.0) -> list[_T]:
    """Runs fn(rank) on threads that are the ranks of one world, and returns their results by rank.

    The world is torch's default group. If no rank enters an exchange or ends for `timeout_s`, the
    remaining ranks count as stuck.

    Raises:
        ValueError: a rank raised it, or this torch has no threaded process group.
        RankFailed: a rank raised, or ranks are stuck; the others are released.
    """
    group_class = _threaded_group()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []

    def run_rank(rank: int) -> None:
        try:
            dist.init_process_group(BACKEND, rank=rank, world_size=num_ranks, store=store)
            results[rank] = fn(rank)
        except SystemExit:  # released; the other rank's failure is reported
            pass
        except BaseException as error:  # noqa: BLE001 - whatever ends a thread is reported below
            failures.append((rank, error))
            group_class.release(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(num_ranks)
    ]
    with _one_world, _isolated(group_class):
        for thread in threads:
            thread.start()
        late = _wait(threads, group_class, timeout_s)
    if failures:
        rank, error = failures[0]
        if isinstance(error, ValueError):  # the request was wrong
            raise error
        raise RankFailed(
            f"simulated rank {rank} of {num_ranks}: {type(error).__name__}: {error}"
        ) from error
    if late:
        raise RankFailed(
            f"no progress for {timeout_s:g} s: simulated ranks {spell_ranks(late)} are still "
            "waiting for others"
        )
    return results


def _wait(threads: list[threading.Thread], group_class: Any, timeout_s: float) -> list[int]:
    """Joins all threads and returns the ranks that had to be released, because no rank entered a
    collective or ended for `timeout_s`.
    """
    last_signs, since = None, time.monotonic()
    while late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        threads[late[0]].join(min(timeout_s, 1.0))
        signs = group_class.entered, len(late)
        if signs != last_signs:
            last_signs, since = signs, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            group_class.release(TimeoutError())
            deadline = time.monotonic() + 10
            for rank in late:
                threads[rank].join(max(0.0, deadline - time.monotonic()))
            return late
    return []


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


@lru_cache(maxsize=1)
def _threaded_group() -> Any:
    """Returns torch's threaded process group with counters, and registers it as a backend.

    Raises:
        ValueError: this torch lacks it.
    """
    try:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        base: Any = threaded.ProcessLocalGroup
        barrier: Any = threaded._store_based_barrier  # pyright: ignore[reportPrivateImportUsage]
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"torch {torch.__version__} has no threaded process group for simulated ranks "
            f"({error}); install a torch version from constraints.txt"
        ) from None

    class CountedGroup(base):
        entered = 0  # collectives of any rank, as a sign of life; not an exact count
        parts = threaded

        @staticmethod
        def release(error: BaseException) -> None:
            """Releases ranks that wait in a collective, now or later."""
            with base._coll_lock:
                base.exception_handle(error)

        def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
            self.count(inputs[0], [len(inputs[0])] * self.size())
            return super().allgather(outputs, inputs, *options)

        def reduce_scatter(self, output: Any, parts: Any, *options: Any) -> Any:
            self.count(parts[0][0], [len(part) for part in parts[0]])
            return super().reduce_scatter(output, parts, *options)

        def all_to_all_single(
            self, output: Tensor, rows: Tensor, received: Any, sent: Any, *options: Any
        ) -> Any:
            equal = [len(rows) // self.size()] * self.size()
            received, sent = list(received or equal), list(sent or equal)
            self.count(rows, sent)
            together = base._start_coll(_AllToAll(), self)
            work = together.join(self.rank(), (output, rows, received, sent))
            base._end_coll(together, self)
            return work

        alltoall_base = all_to_all_single  # its name before torch 2.13

        def count(self, rows: Tensor, sent: list[int]) -> None:
            CountedGroup.entered += 1
            if (counted := getattr(_this_rank, "sent", None)) is not None:
                counted.add(dist.get_process_group_ranks(self), sent, rows)  # pyright: ignore[reportArgumentType]

    def create(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        group = CountedGroup(rank, world_size)
        barrier(rank, store, "", world_size, timeout)
        return group

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return CountedGroup


@contextmanager
def _isolated(group_class: Any) -> Iterator[None]:
    """Gives each thread its own process groups while it lasts."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]
    threaded, hook = group_class.parts, sys.excepthook
    threaded.ProcessLocalGroup.reset()
    threaded._install_threaded_pg()
    isolate(True)
    try:
        yield
    finally:
        sys.excepthook = hook  # every rank wrapped it to print its number
        isolate(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
