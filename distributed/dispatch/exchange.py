"""Asynchronous, differentiable collectives between the ranks of one group.

A `Communicator` starts a collective (all-to-all, all-gather, reduce-scatter) and returns an
`AsyncCollective`, whose `wait` returns the rows. Each collective has two autograd nodes, which swap
roles in the backward: the wait's node starts the reverse collective, and the start's node waits for
it. Work between start and wait therefore overlaps with communication in both directions.

Sent tensors are kept until they have been waited for, and torch's collectives receive detached
tensors. Otherwise a Gloo thread would often drop the last reference and free Python objects, and the
graph behind them, at any time; during interpreter shutdown this aborts the process. (A Gloo thread
can still hold the last reference shortly after waiting: `stop_process` gives it time.)

With `Communicator.checking` every all-to-all compares the splits of all ranks first, and every row
carries (source rank, position, checksum of its bits), which is verified on arrival. Gloo does not
detect disagreeing splits and returns uninitialised rows. Cost: one small all-gather before, one
exchange of 24 bytes per row, and one all-gather of verdicts after.

Legend: P ranks of the group, R rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...model.execution.recompute import save_dispatch, skip_combine

T = TypeVar("T")
# Names since torch 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ExchangeMismatch(RuntimeError):
    """Raised on all ranks of a group if two of them disagree about an exchange."""


@dataclass
class Pending:
    """A collective in flight; the `rows` that it fills are valid after `wait`."""

    rows: Tensor
    _sent: Tensor | None
    _work: dist.Work | None

    def wait(self) -> Tensor:
        """Waits for the rows and returns them; later calls return immediately."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self.rows


class RowCollective(Protocol):
    """A collective of rows along dim 0 whose backward is another collective."""

    def start(self, rows: Tensor) -> Pending:
        """Starts the collective on `rows` and returns a handle to wait for its result."""
        ...

    @property
    def reverse(self) -> "RowCollective":
        """Returns the collective for the gradients."""
        ...


@dataclass(frozen=True)
class AllToAll:
    """Sends `sent[p]` rows to rank p and receives `received[p]` rows from it."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def start(self, rows: Tensor) -> Pending:
        """Starts the collective and returns its handle."""
        sent, received = rows.detach(), rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, sent, self.received, self.sent, group=self.group, async_op=True
        )
        return Pending(received, sent, work)

    @property
    def reverse(self) -> "AllToAll":
        """Returns the collective for the gradients."""
        return AllToAll(self.group, self.received, self.sent)


@dataclass(frozen=True)
class AllGather:
    """Gathers equally many rows of every rank on every rank, in rank order."""

    group: dist.ProcessGroup

    def start(self, rows: Tensor) -> Pending:
        """Starts the collective and returns its handle."""
        return _start_dense(_all_gather, self.group, rows, len(rows) * self.group.size())

    @property
    def reverse(self) -> "ReduceScatter":
        """Returns the collective for the gradients."""
        return ReduceScatter(self.group)


@dataclass(frozen=True)
class ReduceScatter:
    """Sums the p-th block of rows over all ranks and leaves it on rank p."""

    group: dist.ProcessGroup

    def start(self, rows: Tensor) -> Pending:
        """Starts the collective and returns its handle."""
        return _start_dense(_reduce_scatter, self.group, rows, len(rows) // self.group.size())

    @property
    def reverse(self) -> AllGather:
        """Returns the collective for the gradients."""
        return AllGather(self.group)


def _start_dense(collective: Any, group: dist.ProcessGroup, rows: Tensor, count: int) -> Pending:
    """Starts a collective that gives every rank `count` rows."""
    sent, received = rows.detach(), rows.new_empty(count, *rows.shape[1:])
    return Pending(received, sent, collective(received, sent, group=group, async_op=True))


@dataclass
class Counters:
    """Counters of one dispatcher on this rank since its creation.

    They cover forward passes only, except `waited_s`. A row that stays on its rank counts as a row
    but not as bytes.
    """

    passes: int = 0
    rows_sent: int = 0
    rows_one_per_route: int = 0  # rows that one row per route would have sent
    routes_served: int = 0  # routes that this rank's experts computed
    bytes_intra_node: int = 0
    bytes_inter_node: int = 0
    # time that the host waited for exchanges or counts, backward included
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.is_counting = True  # False in a recomputed pass

    def copy(self) -> "Counters":
        """Returns a copy of the current numbers."""
        return replace(self)

    def since(self, earlier: "Counters") -> "Counters":
        """Returns the differences from `earlier`, a copy of these counters."""
        return Counters(
            *(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self))
        )

    def begin_pass(self, num_routes: int, *, recomputed: bool) -> None:
        """Counts a pass of `num_routes` routes; a recomputed pass is not counted again."""
        self.is_counting = not recomputed
        self.add(passes=1, rows_one_per_route=num_routes)

    def add(self, **amounts: int) -> None:
        """Adds to the counters, unless this pass is not counted."""
        if not self.is_counting:
            return
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def wait(self, pending: Pending) -> Tensor:
        """Waits for a collective and returns its rows."""
        return self._timed(pending.wait)

    def read(self, counts: Tensor) -> list[Any]:
        """Reads values on the host: the only synchronisation of a pass."""
        return self._timed(counts.tolist)

    def _timed(self, wait: Callable[[], T]) -> T:
        started = time.perf_counter()
        value = wait()
        self.waited_s += time.perf_counter() - started
        return value


@dataclass
class _InFlight:
    """The handles that the two autograd nodes of a collective share."""

    forward: Pending | None = None
    backward: Pending | None = None


class _Start(torch.autograd.Function):
    """Starts a collective; its backward waits for the reverse one."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        collective: RowCollective,
        counters: Counters,
        in_flight: _InFlight,
        is_combine: bool,
    ) -> Tensor:
        def start() -> Tensor:
            in_flight.forward = collective.start(rows.contiguous())
            return in_flight.forward.rows.detach()

        ctx.counters, ctx.in_flight = counters, in_flight
        return (skip_combine if is_combine else save_dispatch)(start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        pending, ctx.in_flight.backward = ctx.in_flight.backward, None
        return ctx.counters.wait(pending), None, None, None, None


class _Wait(torch.autograd.Function):
    """Waits for a collective; its backward starts the reverse one."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, collective: RowCollective, counters: Counters, in_flight: _InFlight
    ) -> Tensor:
        ctx.collective, ctx.in_flight = collective, in_flight
        # If nothing was started, this is a recomputed pass and the rows were saved.
        if in_flight.forward is not None:
            counters.wait(in_flight.forward)
            in_flight.forward = None
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.in_flight.backward = ctx.collective.reverse.start(grads[0].contiguous())
        # A placeholder of the right shape for autograd: `_Start` reads the started collective.
        return grads[0], None, None, None


class AsyncCollective:
    """A differentiable collective in flight, whose rows must not be read before `wait`.

    `is_combine` marks outputs, whose sum `save_combine` saves (model/execution/recompute.py).
    """

    def __init__(
        self,
        rows: Tensor,
        collective: RowCollective,
        counters: Counters,
        *,
        is_combine: bool = False,
    ) -> None:
        self._collective, self._counters, self._in_flight = collective, counters, _InFlight()
        self._started: Tensor = _Start.apply(
            rows, collective, counters, self._in_flight, is_combine
        )  # pyright: ignore[reportAttributeAccessIssue]
        self._received: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for the received rows and returns them.

        All ranks must wait for their collectives in the same order.
        """
        if self._received is None:
            self._received = _Wait.apply(
                self._started, self._collective, self._counters, self._in_flight
            )  # pyright: ignore[reportAttributeAccessIssue]
        return self._received  # pyright: ignore[reportReturnType]


class CheckedCollective(AsyncCollective):
    """An all-to-all that also sends marks of its rows, which `wait` verifies."""

    def __init__(
        self,
        rows: Tensor,
        collective: AllToAll,
        counters: Counters,
        everyone: dist.ProcessGroup,
        *,
        is_combine: bool = False,
    ) -> None:
        _check_splits(rows, collective, everyone)
        super().__init__(rows, collective, counters, is_combine=is_combine)
        self._all_to_all, self._everyone = collective, everyone
        self._marks = collective.start(_marks(rows, collective.sent, collective.group.rank()))

    def wait(self) -> Tensor:
        """Waits for the received rows, verifies their marks, and returns them.

        Raises:
            ExchangeMismatch: on all ranks: a row differs from the one that was sent.
        """
        if self._received is None:
            rows = super().wait()
            _check_marks(rows, self._marks.wait(), self._all_to_all, self._everyone)
        return super().wait()


@dataclass
class Communicator:
    """Starts collectives over one group and counts their bytes.

    All ranks of `everyone` take the same steps, and a mismatch is raised on all of them.
    """

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    counters: Counters
    node_of_P: tuple[int, ...]  # the node of every rank of the group
    checking: bool = False
    num_ranks: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_ranks, self.rank = self.group.size(), self.group.rank()

    def all_to_all(
        self, rows: Tensor, sent: list[int], received: list[int], *, is_combine: bool = False
    ) -> AsyncCollective:
        """Starts an all-to-all of rows along dim 0; `is_combine` marks outputs. Collective.

        Raises:
            ExchangeMismatch: while `checking`, on all ranks: two ranks disagree about a split.
        """
        collective = AllToAll(self.group, sent, received)
        self._count(sent, rows)
        if self.checking:
            return CheckedCollective(
                rows, collective, self.counters, self.everyone, is_combine=is_combine
            )
        return AsyncCollective(rows, collective, self.counters, is_combine=is_combine)

    def all_gather(self, rows: Tensor, *, counted: bool = True) -> AsyncCollective:
        """Starts gathering equally many rows of every rank, in rank order. Collective.

        `counted` False excludes metadata from the counted bytes.
        """
        if counted:
            self._count([len(rows)] * self.num_ranks, rows)
        return AsyncCollective(rows, AllGather(self.group), self.counters)

    def reduce_scatter(self, rows: Tensor) -> AsyncCollective:
        """Starts summing outputs over all ranks, one block per rank. Collective."""
        self._count([len(rows) // self.num_ranks] * self.num_ranks, rows)
        return AsyncCollective(rows, ReduceScatter(self.group), self.counters, is_combine=True)

    def _count(self, sent: list[int], rows: Tensor) -> None:
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        here = self.node_of_P[self.rank]
        on_node = sum(
            count for node, count in zip(self.node_of_P, sent, strict=True) if node == here
        )
        self.counters.add(
            bytes_inter_node=(sum(sent) - on_node) * row_bytes,
            bytes_intra_node=(on_node - sent[self.rank]) * row_bytes,
        )


def hottest_factor(served_GP: Tensor) -> float:
    """Returns the largest ratio, over EP groups, of the busiest rank's `routes_served` to the mean."""
    mean_G = served_GP.double().mean(1)
    return torch.where(mean_G > 0, served_GP.amax(1) / mean_G.clamp(min=1e-30), 1.0).max().item()


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers equally many values of every rank, one row per rank. Collective."""
    return AllGather(group).start(values[None]).wait()


def _check_splits(rows: Tensor, collective: AllToAll, everyone: dist.ProcessGroup) -> None:
    """Compares the full matrix of splits on every rank, so that all raise the same error."""
    partners = dist.get_process_group_ranks(collective.group)
    mine = torch.tensor(
        [len(rows), *partners, *collective.sent, *collective.received], device=rows.device
    )
    sends, expects, faults = {}, {}, []
    ranks = dist.get_process_group_ranks(everyone)
    for rank, (num_rows, *lists) in zip(ranks, gathered(mine, everyone).tolist(), strict=True):
        others, sent, received = (
            lists[i * len(partners) : (i + 1) * len(partners)] for i in range(3)
        )
        sends |= {(rank, other): count for other, count in zip(others, sent, strict=True)}
        expects |= {(other, rank): count for other, count in zip(others, received, strict=True)}
        if num_rows != sum(sent):
            faults.append(f"rank {rank} has {num_rows} rows but sends {sum(sent)} ({sent})")
    faults += [
        f"rank {pair[0]} sends {sends[pair]} rows to rank {pair[1]}, which expects {expects[pair]}"
        for pair in sends
        if sends[pair] != expects[pair]
    ]
    if faults:
        raise ExchangeMismatch(f"the ranks {ranks} disagree about an exchange: {'; '.join(faults)}")


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _marks(rows: Tensor, splits: list[int], source: int | None) -> Tensor:
    """Returns (R, 3) int64: source rank, position within the split, checksum of the row's bits.

    `source` None: split p comes from rank p.
    """
    rows = rows.detach() if rows.dim() > 1 else rows.detach()[:, None]
    bits = rows.contiguous().flatten(1).view(_BITS[rows.element_size()])
    checksum = bits.sum(1, dtype=torch.int64)
    position = torch.cat([torch.arange(count) for count in splits]).to(rows.device)
    who = torch.arange(len(splits)).repeat_interleave(torch.tensor(splits)).to(rows.device)
    who = who if source is None else torch.full_like(who, source)
    return torch.stack((who, position, checksum), 1)


def _check_marks(
    rows: Tensor, marks: Tensor, collective: AllToAll, everyone: dist.ProcessGroup
) -> None:
    expected = _marks(rows, collective.received, None)
    wrong = (expected != marks).any(1).nonzero().flatten().tolist()
    first = [0, 0, 0, 0, 0]
    if wrong:
        partners = dist.get_process_group_ranks(collective.group)
        source, position, _ = expected[wrong[0]].tolist()
        marker, marked, _ = marks[wrong[0]].tolist()
        marker = partners[marker] if 0 <= marker < len(partners) else -1
        first = [len(wrong), partners[source], position, marker, marked]
    verdicts = gathered(torch.tensor(first, device=rows.device), everyone).tolist()
    faults = [
        f"rank {here} received {count} wrong rows, the first at position {position} of those of rank "
        f"{source}: it "
        + (
            f"is row {marked} of rank {marker}"
            if (marker, marked) != (source, position)
            else "differs in its bits"
        )
        for here, (count, source, position, marker, marked) in zip(
            dist.get_process_group_ranks(everyone), verdicts, strict=True
        )
        if count
    ]
    if faults:
        raise ExchangeMismatch(f"rows were changed or swapped in transit: {'; '.join(faults)}")
