"""Exchanges between the ranks of one group: launched now, waited for where they are first read,
differentiable both ways.

A `Communicator` starts a collective (an all-to-all, an all-gather, a reduce-scatter) and returns an
`AsyncCollective`; its `wait` returns the rows. Two autograd nodes stand for one collective,
and in the backward they change roles: what landed last is launched back first, and is waited for
where the collective was launched. So whatever was computed between launch and waiting is computed
between them in the backward too, and overlaps there without further words.

What is sent is held until it has landed, and what torch's collectives get has no history. Otherwise
a thread of Gloo would mostly be the last to hold it, and would free Python's objects, and the graph
behind them, at any time: also while Python ends, which aborts the process. (It can still be the
last, for a moment after waiting: `stop_process` gives it time.)

With `Communicator.checking` every all-to-all is checked: the splits of all ranks are compared
before, and every row carries (source rank, position, checksum of its bits) and is compared after. Gloo does
not notice when sender and receiver disagree: it hands out uninitialised rows. Costs one small
all-gather before, one exchange of 24 bytes per row and one all-gather of verdicts after.

Legend: P ranks of the group, R rows.
"""

import time
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...model.recompute import recomputing, save_dispatch, skip_combine

# As torch calls them since 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ExchangeMismatch(RuntimeError):
    """Two ranks disagree about an exchange; raised on all ranks of the group."""


@dataclass
class Pending:
    """A collective under way; `rows`, which it fills, may be read after `wait`."""

    rows: Tensor
    _sent: Tensor | None
    _work: dist.Work | None

    def wait(self) -> Tensor:
        """The rows. Twice is harmless."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self.rows


class Collective(Protocol):
    """A collective of rows along dim 0 whose backward is another one."""

    def start(self, rows: Tensor) -> Pending:
        """Launches it."""
        ...

    @property
    def reverse(self) -> "Collective": ...


@dataclass(frozen=True)
class AllToAll:
    """`sent[p]` rows to rank p, `received[p]` rows from it."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def start(self, rows: Tensor) -> Pending:
        sent, came = rows.detach(), rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(
            came, sent, self.received, self.sent, group=self.group, async_op=True
        )
        return Pending(came, sent, work)

    @property
    def reverse(self) -> "AllToAll":
        return AllToAll(self.group, self.received, self.sent)


@dataclass(frozen=True)
class AllGather:
    """Equally many rows of every rank to every rank, in the order of ranks."""

    group: dist.ProcessGroup

    def start(self, rows: Tensor) -> Pending:
        sent, came = rows.detach(), rows.new_empty(len(rows) * self.group.size(), *rows.shape[1:])
        return Pending(came, sent, _all_gather(came, sent, group=self.group, async_op=True))

    @property
    def reverse(self) -> "ReduceScatter":
        return ReduceScatter(self.group)


@dataclass(frozen=True)
class ReduceScatter:
    """The sum over ranks of the p-th block of rows to rank p."""

    group: dist.ProcessGroup

    def start(self, rows: Tensor) -> Pending:
        sent, came = rows.detach(), rows.new_empty(len(rows) // self.group.size(), *rows.shape[1:])
        return Pending(came, sent, _reduce_scatter(came, sent, group=self.group, async_op=True))

    @property
    def reverse(self) -> AllGather:
        return AllGather(self.group)


@dataclass
class Counters:
    """What one dispatcher has done since it was made: plain numbers of this rank, forward passes
    only but for the waiting.

    A row that stays on its rank counts as a row and not as bytes.
    """

    passes: int = 0
    rows_sent: int = 0
    rows_one_per_route: int = 0  # what a dispatcher with a row for every route would have sent
    routes_served: int = 0  # routes that this rank's experts answered
    bytes_intra_node: int = 0
    bytes_inter_node: int = 0
    # time in which the host stood still for an exchange or for the counts, backward included
    waited_s: float = 0.0

    def copy(self) -> "Counters":
        """As they are now."""
        return replace(self)

    def since(self, earlier: "Counters") -> "Counters":
        """What was done after `earlier`, which is a copy of these."""
        return Counters(
            *(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self))
        )

    def add(self, **amounts: int) -> None:
        """Counts. Not in a recomputation: it belongs to a pass that was counted."""
        if not recomputing():
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def wait(self, pending: Pending) -> Tensor:
        """The result of a collective that was started."""
        started = time.perf_counter()
        rows = pending.wait()
        self.waited_s += time.perf_counter() - started
        return rows

    def read(self, counts: Tensor) -> list[Any]:
        """Values on the host: the one synchronisation of a pass."""
        started = time.perf_counter()
        values = counts.tolist()
        self.waited_s += time.perf_counter() - started
        return values


@dataclass
class _Ways:
    """What is under way between the two nodes of a collective: out in the forward, back in the
    backward.
    """

    out: Pending | None = None
    back: Pending | None = None


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        collective: Collective,
        counters: Counters,
        ways: _Ways,
        is_combine: bool,
    ) -> Tensor:
        def start() -> Tensor:
            ways.out = collective.start(rows.contiguous())
            return ways.out.rows.detach()

        ctx.counters, ctx.ways = counters, ways
        return (skip_combine if is_combine else save_dispatch)(start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        back, ctx.ways.back = ctx.ways.back, None
        return ctx.counters.wait(back), None, None, None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, collective: Collective, counters: Counters, ways: _Ways
    ) -> Tensor:
        ctx.collective, ctx.ways = collective, ways
        if (
            ways.out is not None
        ):  # else nothing was launched: the rows are those of a first run (model/recompute.py)
            counters.wait(ways.out)
            ways.out = None
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ways.back = ctx.collective.reverse.start(grads[0].contiguous())
        return (
            grads[0],
            None,
            None,
            None,
        )  # of the shape that autograd expects; `_Launch` reads what was launched


class AsyncCollective:
    """A collective under way. Between launch and waiting its rows must not be read.

    `is_combine`: answers, of which `save_combine` keeps what becomes of them (model/recompute.py).
    """

    def __init__(
        self, rows: Tensor, collective: Collective, counters: Counters, *, is_combine: bool = False
    ) -> None:
        self._motion, self._counters, self._ways = collective, counters, _Ways()
        self._pending: Tensor = _Launch.apply(rows, collective, counters, self._ways, is_combine)  # pyright: ignore[reportAttributeAccessIssue]
        self._landed: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for the rows the first time. All ranks must wait in the same
        order.
        """
        if self._landed is None:
            self._landed = _Land.apply(self._pending, self._motion, self._counters, self._ways)  # pyright: ignore[reportAssignmentType]
        return self._landed  # pyright: ignore[reportReturnType]


class CheckedCollective(AsyncCollective):
    """A collective that is followed by marks of its rows, and verified when it lands."""

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
        """Raises ExchangeMismatch on all ranks if a row is not the one that was sent."""
        if self._landed is None:
            rows = super().wait()
            _check_marks(rows, self._marks.wait(), self._all_to_all, self._everyone)
        return super().wait()


@dataclass
class Communicator:
    """Exchanges over one group, and what they cost. All ranks of `everyone` take the same steps,
    and hear of a mismatch.
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

    def launch(
        self, rows: Tensor, sent: list[int], received: list[int], *, is_combine: bool = False
    ) -> AsyncCollective:
        """Collective. An all-to-all of rows along dim 0, on its way; `is_combine` where they are
        answers.

        Raises:
            ExchangeMismatch: while `checking`, on all ranks: two of them disagree about how many
                rows pass between them.
        """
        collective = AllToAll(self.group, sent, received)
        self._count(sent, rows)
        if self.checking:
            return CheckedCollective(
                rows, collective, self.counters, self.everyone, is_combine=is_combine
            )
        return AsyncCollective(rows, collective, self.counters, is_combine=is_combine)

    def all_gather(self, rows: Tensor) -> AsyncCollective:
        """Collective. Equally many rows of every rank, joined in the order of ranks."""
        self._count([len(rows)] * self.num_ranks, rows)
        return AsyncCollective(rows, AllGather(self.group), self.counters)

    def reduce_scatter(self, rows: Tensor) -> AsyncCollective:
        """Collective. This rank's block of the sum over all ranks' answers."""
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
    """Of the `routes_served` of EP groups and their ranks: the busiest rank's ÷ its group's mean,
    where that is largest.
    """
    mean_G = served_GP.double().mean(1)
    return torch.where(mean_G > 0, served_GP.amax(1) / mean_G.clamp(min=1e-30), 1.0).max().item()


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective. Equally many values of every rank, as rows in the order of ranks; waits for them."""
    return AllGather(group).start(values[None]).wait()


def _check_splits(rows: Tensor, collective: AllToAll, everyone: dist.ProcessGroup) -> None:
    """The full matrix of counts, seen by every rank: so every rank raises the same error."""
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
        f"rank {pair[0]} sends {sends[pair]} rows to rank {pair[1]}, which expects {expects[pair]} of it"
        for pair in sends
        if sends[pair] != expects[pair]
    ]
    if faults:
        raise ExchangeMismatch(f"the ranks {ranks} disagree about an exchange: {'; '.join(faults)}")


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _marks(rows: Tensor, splits: list[int], source: int | None) -> Tensor:
    """(R, 3) int64: source rank, position among the rows of a split, sum of the row's bits.

    `source` None: the splits are those of the source ranks.
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
        f"rank {here} got {count} wrong rows, the first at position {position} of those of rank {source}: it is "
        + (
            f"row {marked} of rank {marker}"
            if (marker, marked) != (source, position)
            else "another in its bits"
        )
        for here, (count, source, position, marker, marked) in zip(
            dist.get_process_group_ranks(everyone), verdicts, strict=True
        )
        if count
    ]
    if faults:
        raise ExchangeMismatch(f"rows were changed or exchanged under way: {'; '.join(faults)}")
