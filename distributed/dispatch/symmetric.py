"""Exchanges rows through memory that all ranks of a machine share, without collectives.

A sparse layer's pass is four messages per rank (distributed/symmetric), which include their sizes:
  1. forward: every distinct row once, and for each rank the rows it needs and the routes that read
     them (slot, row, target, gate weight);
  2. the experts' answers, weighted and summed per (source rank, target row); the source adds those
     of different ranks in rank order;
  3. backward: the gradients of these sums, each once;
  4. the gradients of the rows, summed likewise, and of the gate weights.

Rows and sums equal those of `dedup` bit for bit. But no rank sends counts first or waits for all
others, a row that several ranks need is written once, and one C++ function plans the routes instead
of some thirty operations.

Routes with `per_expert` send one row per route, and the source sums the answers in route order, as
alltoall.py does.

Legend: U source rows, T target rows, N routes, P ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.calls import TARGETS, check_counts
from ...kernels.permute import gather_rows, sum_rows
from ...model.execution.recompute import save_combine, save_dispatch, skip_combine
from ...model.moe import Dispatched
from ...model.routing import Routes
from ..symmetric.outbox import Outbox, ReceivedRows, RoutePlan
from .base import ExpertParallelDispatcher, Setup
from .exchange import Counters
from .expert_map import places

_PLACE_BYTES = 12  # of a route: slot, row and target


@dataclass
class _Pass:
    """One pass of one layer: its plan, and the numbers of its messages.

    A number is None if a recomputed pass posts nothing.
    """

    outbox: Outbox
    plan: RoutePlan
    counters: Counters
    rows: Tensor  # (0, D), with the dtype of the rows
    weight_dtype: torch.dtype
    sent: int | None = None
    answered: int | None = None
    # backward pass
    grads_sent: int | None = None
    grads_answered: int | None = None

    @contextmanager
    def counting(self) -> Iterator[Outbox]:
        """Adds the time that this rank waits in the context to the counters."""
        before = self.outbox.waited_s
        yield self.outbox
        self.counters.waited_s += self.outbox.waited_s - before

    def count(self, starts_3P1: Tensor, answers: Tensor) -> None:
        """Counts the rows, routes and answers of this rank."""
        own = self.outbox.rank
        row_bytes, answer_bytes = (x.shape[1] * x.element_size() for x in (self.rows, answers))
        route_bytes = _PLACE_BYTES + self.weight_dtype.itemsize
        _, (*_, num_routes), targets_P1 = starts_3P1.tolist()
        answers_away = targets_P1[-1] - targets_P1[own + 1] + targets_P1[own]
        num_bytes, rows_sent = answers_away * answer_bytes, 0
        if self.counters.is_counting:
            rows, routes, _ = self.outbox.sent(self.plan)
            rows_sent = sum(rows)
            num_bytes += (rows_sent - rows[own]) * row_bytes
            num_bytes += (sum(routes) - routes[own]) * route_bytes
        self.counters.add(bytes_intra_node=num_bytes, rows_sent=rows_sent, routes_served=num_routes)


def _number(posted: int | None) -> int:
    assert posted is not None, "a pass that posts nothing has saved everything"
    return posted


class _PostRows(torch.autograd.Function):
    """Posts rows; its backward sums the gradients of rows that the ranks return."""

    @staticmethod
    def forward(ctx: Any, x_UD: Tensor, weight_N: Tensor, run: _Pass) -> Tensor:
        ctx.run = run

        def post() -> Tensor:
            x, weights = x_UD.detach().contiguous(), weight_N.detach().contiguous()
            run.sent = run.outbox.post_rows(run.plan, x, weights)
            return x_UD.new_empty(0)

        save_dispatch(post)
        return x_UD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        grad_N = run.rows.new_empty(run.plan.num_routes, dtype=run.weight_dtype)
        number = _number(run.grads_answered)
        with run.counting() as outbox:
            grad_UD = outbox.sum_gradients(run.plan, number, run.rows, grad_N)
        return grad_UD, grad_N, None


class _TakeRows(torch.autograd.Function):
    """Waits for rows; its backward posts the gradients of rows and weights."""

    @staticmethod
    def forward(ctx: Any, posted: Tensor, run: _Pass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        taken: list[ReceivedRows] = []

        def take(part: int) -> Tensor:
            if not taken:
                with run.counting() as outbox:
                    number = _number(run.sent)
                    taken.append(outbox.take_rows(number, run.rows, run.weight_dtype))
            [found] = taken
            return (found.rows_MD, found.weight_N, found.places_3N, found.starts_3P1)[part]

        rows, weights, places, starts = (save_dispatch(lambda i=i: take(i)) for i in range(4))
        ctx.run, ctx.starts_3P1 = run, starts
        ctx.sizes = rows.shape[0], weights.shape[0]
        ctx.mark_non_differentiable(places, starts)
        ctx.set_materialize_grads(False)
        return rows, weights, places, starts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        num_rows, num_routes = ctx.sizes
        grad_MD, grad_N, *_ = grads
        if grad_MD is None:
            grad_MD = run.rows.new_zeros(num_rows, run.rows.shape[1])
        if grad_N is None:
            grad_N = run.rows.new_zeros(num_routes, dtype=run.weight_dtype)
        run.grads_answered = run.outbox.post_row_gradients(
            grad_MD.contiguous(), grad_N.contiguous(), ctx.starts_3P1
        )
        return run.rows.new_empty(0), None


class _PostAnswers(torch.autograd.Function):
    """Posts answers; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, run: _Pass, starts_3P1: Tensor) -> Tensor:
        ctx.run, ctx.num_rows, width = run, y_TD.shape[0], y_TD.shape[1]
        ctx.like = y_TD.new_empty(0, width)

        def post() -> Tensor:
            run.answered = run.outbox.post_answers(y_TD.detach().contiguous(), starts_3P1)
            return y_TD.new_empty(0, width)

        return skip_combine(post)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_unread: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        number = _number(run.grads_sent)
        with run.counting() as outbox:
            return outbox.take_gradients(number, ctx.num_rows, ctx.like), None, None


class _SumAnswers(torch.autograd.Function):
    """Waits for the answers; its backward posts the gradients of their sums."""

    @staticmethod
    def forward(ctx: Any, posted: Tensor, run: _Pass) -> Tensor:
        ctx.run = run
        if run.answered is None:  # a recomputed pass with saved sums: zeros that take no memory
            return posted.new_zeros(()).expand(run.plan.num_targets, posted.shape[1])
        with run.counting() as outbox:
            return outbox.sum_answers(run.plan, run.answered, posted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Pass = ctx.run
        grad_TD = grads[0].contiguous()
        run.grads_sent = run.outbox.post_gradients(run.plan, grad_TD)
        return grad_TD.new_empty(0, grad_TD.shape[1]), None


@dataclass(frozen=True)
class _Exchange:
    """An exchange in flight: rows and routes for this rank's experts, and the return path."""

    run: _Pass
    posted: Tensor
    num_slots: int
    one_per_route: Routes | None = None  # set if every route has its own row

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self._received[0]

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._received[1]

    def combine(self, y_TD: Tensor) -> Tensor:
        """Posts one answer per received target, and sums the ranks' answers in rank order, (num_targets, D)."""
        starts_3P1, routes = self._received[2], self.one_per_route
        self.run.count(starts_3P1, y_TD)
        posted = _PostAnswers.apply(y_TD, self.run, starts_3P1)
        answers: Tensor = _SumAnswers.apply(posted, self.run)  # pyright: ignore[reportAssignmentType]
        if routes is not None:
            target_N, num_rows = routes.target_N, routes.num_targets
            answers = sum_rows(
                answers, None, target_N, num_rows=num_rows, per_row=routes.per_target
            )
        return save_combine(answers)

    @cached_property
    def _received(self) -> tuple[Tensor, Routes, Tensor]:
        rows, weights, places, starts = _TakeRows.apply(self.posted, self.run)  # pyright: ignore[reportGeneralTypeIssues]
        routes = Routes(
            places[0],
            places[1],
            weights,
            places[2],
            self.num_slots,
            num_targets=int(starts[TARGETS, -1]),
            per_source=0,
            per_target=0,
        )
        return rows, routes, starts


class SymmetricDispatcher(ExpertParallelDispatcher):
    """Writes every row once for all ranks of the node; equal to `dedup` bit for bit."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.outbox is not None, "symmetric needs an outbox of its group (open_outbox)"
        self.outbox = setup.outbox

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Posts the distinct rows and the routes that read them.

        Raises:
            ValueError: a route is out of range, or there are fewer experts than ranks.
        """
        check_counts(routes, routes.num_experts)
        expert_map = self.begin(x_UD, routes)
        self.outbox.check(self.communicator.checking)
        one_per_route = None
        if routes.per_expert:
            one_per_route = routes
            x_UD = gather_rows(x_UD, None, routes.source_N, per_row=routes.per_source)
            own_N = torch.arange(len(x_UD), device=x_UD.device)
            routes = replace(routes, source_N=own_N, target_N=own_N, num_targets=len(x_UD))
        on_ranks, outbox = places(expert_map, x_UD.device), self.outbox
        plan = outbox.plan(routes, len(x_UD), rank_E=on_ranks.rank_E, slot_E=on_ranks.slot_E)
        run = _Pass(outbox, plan, self.setup.counters, x_UD.detach()[:0], routes.weight_N.dtype)
        posted: Tensor = _PostRows.apply(x_UD, routes.weight_N, run)  # pyright: ignore[reportAssignmentType]
        num_slots = expert_map.slots_P[self.communicator.rank]
        return _Exchange(run, posted, num_slots, one_per_route)
