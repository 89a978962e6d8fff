"""Dispatchers across ranks: rows to their experts, answers home.

`alltoall`, one row per route. Flow of one sparse layer and pass:
  1. sort the routes by expert (stable): the canonical order (expert, source rank, source position);
  2. exchange the table of counts (P ranks × e experts each), and read it on the host: the one synchronisation;
  3. exchange rows and gate weights; the receiver knows every row's expert from the table;
  4. the experts run on what came, as on one rank;
  5. exchange the answers back and add them up in route order.

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

from ..kernels.permute import gather_rows, sort_by_expert, sum_rows
from ..model.moe import Dispatcher, LocalDispatcher, Sent
from ..model.routing import Routes


@dataclass(frozen=True)
class _WayHome:
    """What combine needs: the sender's order, and how many rows went to and came from every rank."""

    routes: Routes
    order_N: Tensor
    sent_rows: list[int]
    received_rows: list[int]


class _Exchange(torch.autograd.Function):
    """all_to_all_single with uneven splits along dim 0; its backward is the opposite exchange."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:  # fmt: skip
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class AllToAllDispatcher:
    """One row per route to the rank that holds its expert; bitwise equal to `LocalDispatcher`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective. Returns the rows for this rank's experts, one route per row, experts numbered from 0."""
        order_N = sort_by_expert(routes.expert_N, routes.num_experts)
        sent_Pe = torch.bincount(routes.expert_N, minlength=routes.num_experts).view(self.num_ranks, -1)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        sent_rows, received_rows = torch.stack((sent_Pe.sum(1), received_Pe.sum(1))).tolist()
        rows = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        x_sent = _Exchange.apply(rows, sent_rows, received_rows, self.group)
        weights = _Exchange.apply(routes.weight_N[order_N], sent_rows, received_rows, self.group)
        local_routes = self._local_routes(received_Pe, sum(received_rows), weights)  # pyright: ignore[reportArgumentType]
        way_home = _WayHome(routes, order_N, sent_rows, received_rows)
        return Sent(x_sent, local_routes, way_home)  # pyright: ignore[reportArgumentType]

    def combine(self, y_UD: Tensor, sent: Sent) -> Tensor:
        """Collective. (U, D) answers to (num_targets, D) at home, added up in route order."""
        home: _WayHome = sent.way_home
        answers = _Exchange.apply(y_UD, home.received_rows, home.sent_rows, self.group)
        routes = home.routes
        return sum_rows(
            answers, home.order_N, routes.target_N, num_rows=routes.num_targets, per_row=routes.per_target
        )  # pyright: ignore[reportArgumentType]  # fmt: skip

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
