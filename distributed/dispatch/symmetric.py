"""One-sided: rows, routes and answers are written where their readers find them, without a
collective.

For ranks of one machine (distributed/symmetric). A sparse layer's pass is four messages of each
rank, sizes among them:
  1. forward: every distinct row once, and for each rank which of them it needs and the routes that
     read them (slot, row, target, gate weight);
  2. its experts' answers, weighed and summed for every (source rank, target row): their source adds
     those of different ranks up in the order of ranks;
  3. backward: the gradients of these sums, each once;
  4. the gradients of the rows, added up likewise, and of the gate weights.

What travels and how it is summed is `dedup`'s, bit for bit; but nobody sends counts ahead, nobody
waits for all, and a row that several ranks need is written once. Where the routes go is written
down by one function in C++ instead of some thirty launches.

Chunks are ranges of tokens, as in dedup.py. Routes with `per_expert` go one row per route, in one
chunk, and are added up at home in the order of routes: as by alltoall.py, to which dedup.py gives
them.

Legend: U source rows, T target rows, N routes, P ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.addresses import ROUTES, ROWS, TARGETS
from ...kernels.calls import check_counts
from ...kernels.permute import gather_rows, sum_rows
from ...model.execution.recompute import save_combine, save_decision, save_dispatch, skip_combine
from ...model.moe import Dispatched, PendingRows
from ...model.routing import Routes
from ..symmetric.interface import ExchangePlan, RowOutbox
from .base import ExpertParallelDispatcher, Setup
from .exchange import Counters
from .expert_map import ExpertMap, ExpertPlaces
from .room import RouteRoom

_PLACE_BYTES = 12  # of a route: slot, row and target


@dataclass
class _Pass:
    """One pass of one layer: its plan, and the numbers of the messages under way.

    A chunk's number is None where a recomputed pass posts nothing.
    """

    outbox: RowOutbox
    plan: ExchangePlan
    counters: Counters
    rows: Tensor  # shape and dtype of the rows, (0, D)
    weight_dtype: torch.dtype
    counts_rows: bool  # and routes that came
    room: RouteRoom | None  # where nobody asks how many come
    sent: list[int | None] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    # of the backward pass
    grads_sent: list[int] = field(default_factory=list)
    grads_answered: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def counting(self) -> Iterator[RowOutbox]:
        """Counts how long this rank waits meanwhile."""
        before = self.outbox.waited_s
        yield self.outbox
        self.counters.waited_s += self.outbox.waited_s - before

    def count(self, chunk: int, starts_3P1: Tensor, answers: Tensor) -> None:
        """Counts what a chunk brought and its answers, and with the first one what this rank has
        sent: on the host, or where a device knows it there.
        """
        row_bytes, answer_bytes = (x.shape[1] * x.element_size() for x in (self.rows, answers))
        own, sent_P3 = self.outbox.rank, self.plan.sent_P3
        if sent_P3 is not None:
            amounts_C3 = _amounts(
                *(self.outbox.num_ranks, own, row_bytes, self.route_bytes, answer_bytes),
                self.counts_rows,
                starts_3P1.device,
            )
            counts = torch.cat((sent_P3.flatten(), starts_3P1.flatten()))
            self.counters.add_unread(counts, amounts_C3)
            return
        if chunk == 0 and self.counters.is_counting:
            rows, metadata, _ = self.outbox.sent(self.plan)
            self.counters.add(
                rows_sent=sum(rows) if self.counts_rows else 0,
                bytes_intra_node=(sum(rows) - rows[own]) * row_bytes
                + (sum(metadata) - metadata[own]) * self.route_bytes,
            )
        _, (*_, num_routes), targets_P1 = starts_3P1.tolist()
        num_away = targets_P1[-1] - targets_P1[own + 1] + targets_P1[own]
        self.counters.add(
            routes_served=num_routes if self.counts_rows else 0,
            bytes_intra_node=num_away * answer_bytes,
        )

    @property
    def route_bytes(self) -> int:
        """Returns the bytes of a route that travels."""
        return _PLACE_BYTES + self.weight_dtype.itemsize

    def answers_like(self, x: Tensor) -> Tensor:
        """Returns zeros without memory in place of the sums, for a recomputed pass."""
        return x.new_zeros(()).expand(self.plan.num_targets, x.shape[1])


@lru_cache(maxsize=256)
def _amounts(
    num_ranks: int,
    own: int,
    row_bytes: int,
    route_bytes: int,
    answer_bytes: int,
    counts_rows: bool,
    device: torch.device,
) -> Tensor:
    """What every number of (counts that were sent, starts of what came) adds to rows sent, routes
    served and bytes that travelled, (3 P + 3 (P + 1), 3).
    """
    sent_P33 = torch.zeros(num_ranks, 3, 3, dtype=torch.int64)
    sent_P33[:, ROWS, 0] = int(counts_rows)
    sent_P33[:, ROWS, 2], sent_P33[:, ROUTES, 2] = row_bytes, route_bytes
    sent_P33[own, :, 2] = 0
    starts_3P13 = torch.zeros(3, num_ranks + 1, 3, dtype=torch.int64)
    starts_3P13[ROUTES, -1, 1] = int(counts_rows)
    starts_3P13[TARGETS, -1, 2] += answer_bytes
    starts_3P13[TARGETS, own + 1, 2] -= answer_bytes
    starts_3P13[TARGETS, own, 2] += answer_bytes
    return torch.cat((sent_P33.view(-1, 3), starts_3P13.view(-1, 3))).to(device)


class _PostRows(torch.autograd.Function):
    """Posts all chunks; its backward adds up the gradients of rows that the ranks send back."""

    @staticmethod
    def forward(ctx: Any, x_UD: Tensor, weight_N: Tensor, run: _Pass) -> tuple[Tensor, ...]:
        ctx.run = run
        x_UD, weight_N = x_UD.detach().contiguous(), weight_N.detach().contiguous()
        for chunk in range(run.plan.num_chunks):
            run.sent.append(None)
            save_dispatch(lambda chunk=chunk: _post_chunk(run, chunk, x_UD, weight_N))
        return tuple(x_UD.new_empty(0) for _ in range(run.plan.num_chunks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        grad_N = run.rows.new_empty(run.plan.num_routes, dtype=run.weight_dtype)
        numbers = [run.grads_answered.pop(chunk) for chunk in range(run.plan.num_chunks)]
        with run.counting() as outbox:
            grad_UD = outbox.sum_gradients(run.plan, numbers, run.rows, grad_N)
        return grad_UD, grad_N, None


def _post_chunk(run: _Pass, chunk: int, x_UD: Tensor, weight_N: Tensor) -> Tensor:
    run.sent[chunk] = run.outbox.post_rows(run.plan, chunk, x_UD, weight_N)
    return x_UD.new_empty(0)


class _TakeRows(torch.autograd.Function):
    """Waits for a chunk; its backward posts the gradients of its rows and weights."""

    @staticmethod
    def forward(
        ctx: Any, posted: Tensor, run: _Pass, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        taken: list[Any] = [None]

        def take(part: int) -> Tensor:
            if taken[0] is None:
                number = run.sent[chunk]
                assert number is not None, "a pass that posts nothing has everything saved"
                with run.counting() as outbox:
                    taken[0] = outbox.take_rows(number, run.rows, run.weight_dtype)
                if taken[0].is_over is not None:
                    assert run.room is not None, "nobody asked for room"
                    run.room.note(taken[0].is_over)
            found = taken[0]
            return (found.rows_MD, found.weight_N, found.places_3N, found.starts_3P1)[part]

        rows, weights, places, starts = (save_dispatch(lambda i=i: take(i)) for i in range(4))
        ctx.run, ctx.chunk, ctx.starts_3P1 = run, chunk, starts
        ctx.sizes = rows.shape[0], weights.shape[0]
        ctx.mark_non_differentiable(places, starts)
        ctx.set_materialize_grads(False)  # of what has none
        return rows, weights, places, starts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        num_rows, num_routes = ctx.sizes
        grad_MD = run.rows.new_zeros(num_rows, run.rows.shape[1]) if grads[0] is None else grads[0]
        grad_N = grads[1]
        if grad_N is None:
            grad_N = run.rows.new_zeros(num_routes, dtype=run.weight_dtype)
        run.grads_answered[ctx.chunk] = run.outbox.post_row_gradients(
            grad_MD.contiguous(), grad_N.contiguous(), ctx.starts_3P1
        )
        return run.rows.new_empty(0), None, None


class _PostAnswers(torch.autograd.Function):
    """Posts a chunk's answers; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, run: _Pass, chunk: int, starts_3P1: Tensor) -> Tensor:
        ctx.run, ctx.chunk, ctx.like, ctx.num_rows = run, chunk, y_TD.new_empty(0, 0), y_TD.shape[0]
        ctx.width = y_TD.shape[1]

        def post() -> Tensor:
            run.answered[chunk] = run.outbox.post_answers(y_TD.detach().contiguous(), starts_3P1)
            return y_TD.new_empty(0, ctx.width)

        return skip_combine(post)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        number, like = run.grads_sent[ctx.chunk], ctx.like.new_empty(0, ctx.width)
        with run.counting() as outbox:
            return outbox.take_gradients(number, ctx.num_rows, like), None, None, None


class _SumAnswers(torch.autograd.Function):
    """Waits for the answers to all chunks; its backward posts the gradients of their sums."""

    @staticmethod
    def forward(ctx: Any, run: _Pass, *posted: Tensor) -> Tensor:
        ctx.run, ctx.num_chunks = run, len(posted)
        if not run.answered:  # a recomputed pass, whose sums were saved
            return run.answers_like(posted[0])
        numbers = [run.answered.pop(chunk) for chunk in range(len(posted))]
        with run.counting() as outbox:
            return outbox.sum_answers(run.plan, numbers, posted[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        grad_TD = grads[0].contiguous()
        run.grads_sent = [
            run.outbox.post_gradients(run.plan, chunk, grad_TD) for chunk in range(ctx.num_chunks)
        ]
        return None, *(grad_TD.new_empty(0, grad_TD.shape[1]) for _ in range(ctx.num_chunks))


@dataclass(frozen=True)
class _Answers:
    """Answers under way: what `combine` needs to wait for them."""

    posted: Tensor

    def wait(self) -> Tensor:
        """Returns what stands for them until they are summed."""
        return self.posted


@dataclass(frozen=True)
class _Chunk:
    """One chunk under way: what the experts of this rank must serve."""

    run: _Pass
    number: int
    posted: Tensor
    num_slots: int

    @cached_property
    def _received(self) -> tuple[Tensor, Routes, Tensor]:
        rows, weights, places, starts = _TakeRows.apply(self.posted, self.run, self.number)  # pyright: ignore[reportGeneralTypeIssues]
        room = self.run.plan.room
        num_targets = int(starts[TARGETS, -1]) if room is None else room.targets
        routes = Routes(
            places[0],
            places[1],
            weights,
            places[2],
            self.num_slots,
            num_targets=num_targets,
            per_source=0,
            per_target=0,
            has_unused=room is not None,
        )
        return rows, routes, starts

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self._received[0]

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._received[1]

    def send_back(self, y_TD: Tensor) -> _Answers:
        """Posts one row of answers for every target that came."""
        self.run.count(self.number, self._received[2], y_TD)
        return _Answers(_PostAnswers.apply(y_TD, self.run, self.number, self._received[2]))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class SymmetricExchange:
    """An exchange under way."""

    run: _Pass
    chunks: Sequence[_Chunk]

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up what the ranks answer, in their order, (num_targets, D)."""
        return _SumAnswers.apply(self.run, *(each.wait() for each in outputs))  # pyright: ignore[reportReturnType]


def start_exchange(
    outbox: RowOutbox,
    counters: Counters,
    x_UD: Tensor,
    routes: Routes,
    *,
    places: ExpertPlaces,
    num_slots: int,
    num_chunks: int = 1,
    counts_rows: bool = False,
    of_token: Sequence[int] | None = None,
    room: RouteRoom | None = None,
) -> SymmetricExchange:
    """Posts distinct rows, and the routes that read them; counts bytes, and if so asked the rows that
    set out and the routes that come.

    Args:
        num_slots: of this rank.
        of_token: what every token sends to every rank, where that is known of all.
        room: where every rank is known to send as many routes; it says how many there is room for.

    Raises:
        ValueError: a route is out of range.
    """
    plan = outbox.plan(
        routes,
        x_UD.shape[0],
        rank_E=places.rank_E,
        slot_E=places.slot_E,
        num_slots=num_slots,
        num_chunks=num_chunks,
        rows_per_token=Setup.rows_per_token(routes, x_UD.shape[0]),
        of_token=of_token,
        room=None if room is None else room.factor,
    )
    weight_dtype = routes.weight_N.dtype
    run = _Pass(outbox, plan, counters, x_UD.detach()[:0], weight_dtype, counts_rows, room)
    posted: tuple[Tensor, ...] = _PostRows.apply(x_UD, routes.weight_N, run)  # pyright: ignore[reportAssignmentType]
    chunks = [_Chunk(run, number, each, num_slots) for number, each in enumerate(posted)]
    return SymmetricExchange(run, chunks)


@dataclass(frozen=True)
class _Dispatched:
    """A pass under way."""

    exchange: SymmetricExchange
    one_per_route: Routes | None = None  # where every route has a row of its own

    @property
    def chunks(self) -> Sequence[_Chunk]:
        """Returns what the experts of this rank must serve."""
        return self.exchange.chunks

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up what the ranks answer, in their order, (num_targets, D)."""
        answers, routes = self.exchange.combine(outputs), self.one_per_route
        if routes is not None:
            target_N, num_rows = routes.target_N, routes.num_targets
            answers = sum_rows(
                answers, None, target_N, num_rows=num_rows, per_row=routes.per_target
            )
        return save_combine(answers)


class SymmetricDispatcher(ExpertParallelDispatcher):
    """Writes every row once for all ranks of the node; equal to `dedup` bit for bit."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.outbox is None:
            raise ValueError("the symmetric dispatcher wants an outbox of its group (open_outbox)")
        self.outbox = setup.outbox

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Posts the distinct rows, and the routes that read them.

        Raises:
            ValueError: a route is out of range, or the ranks cannot share their experts.
        """
        check_counts(routes, routes.num_experts)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator])
        self.outbox.check(self.communicator.checking)
        if not routes.per_expert:
            return self._dispatch(x_UD, routes, expert_map, self.setup.overlap_chunks)
        rows_ND = gather_rows(x_UD, None, routes.source_N, per_row=routes.per_source)
        own_N = torch.arange(len(rows_ND), device=x_UD.device)
        own = replace(routes, source_N=own_N, target_N=own_N, num_targets=len(rows_ND))
        return replace(self._dispatch(rows_ND, own, expert_map, 1), one_per_route=routes)

    def _may_leave_room(self, routes: Routes) -> bool:
        """Whether every rank is known to send as many routes, in a pass that is not checked."""
        return self.setup.sends_equally(routes) and not self.communicator.checking

    def _dispatch(
        self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap, num_chunks: int
    ) -> _Dispatched:
        # Decisions, for a second run is in the backward pass, where nobody promises anything.
        of_token = save_decision(
            lambda: self.setup.counts_of_token(routes, x_UD.shape[0], expert_map)
        )
        is_equal = save_decision(lambda: self._may_leave_room(routes))
        places = expert_map.places(x_UD.device)
        exchange = start_exchange(
            self.outbox,
            self.setup.counters,
            x_UD,
            routes,
            places=places,
            num_slots=expert_map.slots_P[self.communicator.rank],
            num_chunks=num_chunks,
            counts_rows=True,
            of_token=of_token,
            room=self.setup.room if is_equal else None,
        )
        return _Dispatched(exchange)
