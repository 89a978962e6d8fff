"""Dispatchers across ranks: rows to their experts, answers home.

`alltoall`, one row per route. Flow of one sparse layer and pass:
  1. sort the routes by expert (stable): the canonical order (expert, source rank, source position);
  2. exchange the table of counts (P ranks × e experts each), and read it on the host: the one synchronisation;
  3. exchange rows and gate weights; the receiver knows every row's expert from the table;
  4. the experts run on what came, as on one rank;
  5. exchange the answers back and add them up in route order.

Where the routes have `per_expert` (a mixture's slots, expert choice) every rank has the same counts, and steps 1 and 2 fall
away: nothing is sorted, no counts travel, the host never waits for the device, and all splits are equal. Rows come as (source
rank, expert, position) in either case; here they are brought into canonical order by one transposed copy each way.

In canonical order an expert sees the same rows in the same order on 1 or on P ranks, so outputs, input gradients and expert
gradients are bitwise equal (on CPUs: kernels/segments.py says why). Cost per rank and direction: N·D elements and N gate
weights, where N is the number of routes, minus what stays home. The backward sends the same amount the other way.

A rank without rows takes part in every exchange: its empty tensors come out of the exchange itself, so its backward does too.

Legend: U rows, N routes, D width, P ranks, E experts, e experts of one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.operands import check_counts
from ..kernels.permute import gather_rows, sort_by_expert, sum_rows
from ..model.moe import Dispatcher, LocalDispatcher, Sent
from ..model.routing import Routes, slot_routes


@dataclass(frozen=True)
class _Splits:
    """How many rows go to every rank, and how many come from it."""

    sent: list[int]
    received: list[int]

    def opposite(self) -> "_Splits":
        return _Splits(self.received, self.sent)


@dataclass(frozen=True)
class _WayHome:
    """What combine needs: the sender's order (None: they stood in it) and the splits (None: equal ones)."""

    routes: Routes
    order_N: Tensor | None
    splits: _Splits | None


class _Exchange(torch.autograd.Function):
    """all_to_all_single along dim 0; its backward is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: _Splits | None, group: dist.ProcessGroup) -> Tensor:
        ctx.opposite, ctx.group = splits and splits.opposite(), group
        return _all_to_all(rows, splits, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return _all_to_all(grads[0], ctx.opposite, ctx.group), None, None


def _exchange(rows: Tensor, splits: _Splits | None, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(rows, splits, group)  # pyright: ignore[reportReturnType]


def _all_to_all(rows: Tensor, splits: _Splits | None, group: dist.ProcessGroup) -> Tensor:
    rows = rows.contiguous()
    if splits is None:
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows, group=group)
        return out
    out = rows.new_empty(sum(splits.received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, splits.received, splits.sent, group=group)
    return out


def _transpose(rows: Tensor, num_outer: int, num_inner: int) -> Tensor:
    """Rows in order (outer, inner, position) to (inner, outer, position). A view where there is one of either."""
    return rows.reshape(num_outer, num_inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


class AllToAllDispatcher:
    """One row per route to the rank that holds its expert; bitwise equal to `LocalDispatcher`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective. Returns the rows for this rank's experts, one route per row, experts numbered from 0.

        Raises:
            ValueError: the routes' `per_expert` is not theirs.
        """
        return self._dispatch_equal(x_UD, routes) if routes.per_expert else self._dispatch_counted(x_UD, routes)

    def combine(self, y_UD: Tensor, sent: Sent) -> Tensor:
        """Collective. (U, D) answers to (num_targets, D) at home, added up in route order."""
        home: _WayHome = sent.way_home
        if home.splits is None:
            y_UD = _transpose(y_UD, sent.routes.num_experts, self.num_ranks)
        answers = _exchange(y_UD, home.splits and home.splits.opposite(), self.group)
        routes = home.routes
        return sum_rows(
            answers, home.order_N, routes.target_N, num_rows=routes.num_targets, per_row=routes.per_target
        )  # fmt: skip

    def _dispatch_equal(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Every rank sends `per_expert` rows to every expert: they stand in canonical order, and all is known beforehand."""
        check_counts(routes, routes.num_experts)
        num_experts = routes.num_experts // self.num_ranks
        rows = gather_rows(x_UD, None, routes.source_N, per_row=routes.per_source)
        x_sent, weights = (
            _transpose(_exchange(values, None, self.group), self.num_ranks, num_experts)
            for values in (rows, routes.weight_N)
        )
        local_routes = slot_routes(len(x_sent), num_experts=num_experts, device=x_sent.device).with_weights(weights)
        return Sent(x_sent, local_routes, _WayHome(routes, None, None))

    def _dispatch_counted(self, x_UD: Tensor, routes: Routes) -> Sent:
        order_N = sort_by_expert(routes.expert_N, routes.num_experts)
        sent_Pe = torch.bincount(routes.expert_N, minlength=routes.num_experts).view(self.num_ranks, -1)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        splits = _Splits(*torch.stack((sent_Pe.sum(1), received_Pe.sum(1))).tolist())
        rows = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        x_sent = _exchange(rows, splits, self.group)
        weights = _exchange(routes.weight_N[order_N], splits, self.group)
        local_routes = self._local_routes(received_Pe, len(x_sent), weights)
        return Sent(x_sent, local_routes, _WayHome(routes, order_N, splits))

    def _local_routes(self, received_Pe: Tensor, num_rows: int, weights: Tensor) -> Routes:
        """Rows came as (source rank, expert, position): the table says where each expert's begin."""
        num_experts = received_Pe.shape[1]
        experts_Pe = torch.arange(num_experts, device=received_Pe.device).repeat(self.num_ranks)
        expert_U = experts_Pe.repeat_interleave(received_Pe.view(-1), output_size=num_rows)
        row_U = torch.arange(num_rows, device=received_Pe.device)
        return Routes(row_U, expert_U, weights, row_U, num_experts, num_rows, per_source=1, per_target=1)


def make_dispatcher(name: str, group: dist.ProcessGroup) -> Dispatcher:
    """The dispatcher of that name over one EP group.

    Raises:
        ValueError: `local` is asked for although the experts are spread over several ranks.
    """
    num_ranks = dist.get_world_size(group)
    if name == "local" or (name == "auto" and num_ranks == 1):
        if num_ranks > 1:
            raise ValueError(
                f'mesh.dispatcher="local" with mesh.ep={num_ranks}: the experts are on several ranks; use "auto"'
            )
        return LocalDispatcher()
    return AllToAllDispatcher(group)
