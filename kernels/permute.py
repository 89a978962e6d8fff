"""Sorts routes by expert, gathers their rows, and sums rows back in a fixed order.

`gather_rows` and `sum_rows` are transposes of each other, and both add in route order. The local
kernels and an all-to-all dispatcher compute the same sums in different places, so they agree bit for
bit.

An order of None is the identity: with `per_expert` the routes are already in expert order.

Legend: N routes, U source or target rows, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .calls import SortedRoutes, Sorting
from .cpu import lists
from .cpu.library import handles
from .custom_op import custom_op
from .triton.available import kernels, reason_against


def sort_routes(expert_N: Tensor, num_experts: int, *, per_expert: int = 0) -> Sorting:
    """Sorts N routes stably by expert, 0 … num_experts − 1.

    With `per_expert` > 0 the routes are already sorted, so nothing is computed.
    """
    if per_expert:
        starts_E1 = (
            torch.arange(num_experts + 1, device=expert_N.device, dtype=torch.int32) * per_expert
        )
        return Sorting(None, None, starts_E1)
    return Sorting(*_sort_routes(expert_N, num_experts))


@custom_op("moebius::sort_routes")
def _sort_routes(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if expert_N.device.type == "cuda" and reason_against("cuda", torch.float32) is None:
        return kernels("routing").sort_routes(expert_N, num_experts)
    if handles(expert_N, torch.int64):
        return lists.sort_by_expert(expert_N, num_experts)
    order_N = sort_by_expert(expert_N, num_experts)
    place_N = inverse_order(order_N.to(torch.int32))
    if expert_N.device.type == "cpu":
        ends_E = torch.bincount(expert_N, minlength=num_experts).cumsum(0)
    else:  # `bincount` synchronises with a GPU
        numbers_E = torch.arange(num_experts, device=expert_N.device)
        ends_E = torch.searchsorted(expert_N.index_select(0, order_N), numbers_E, right=True)
    starts_E1 = torch.zeros(num_experts + 1, device=expert_N.device, dtype=torch.int32)
    starts_E1[1:] = ends_E
    return order_N.to(torch.int32), place_N, starts_E1


@_sort_routes.register_fake
def _(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order_N = expert_N.new_empty(expert_N.shape, dtype=torch.int32)
    return order_N, torch.empty_like(order_N), order_N.new_empty(num_experts + 1)


def sort_by_expert(expert_N: Tensor, num_experts: int) -> Tensor:
    """Returns the stable order of routes by expert (int64).

    Uses 16-bit keys if they suffice: they radix-sort in a third of the time of 64-bit ones.
    """
    keys_N = expert_N.to(torch.int16) if num_experts <= 2**15 else expert_N
    return torch.argsort(keys_N, stable=True)


def inverse_order(order_N: Tensor) -> Tensor:
    """Returns the inverse permutation in the order's dtype: place[order[i]] = i."""
    places_N = torch.arange(order_N.numel(), device=order_N.device, dtype=order_N.dtype)
    return torch.empty_like(order_N).scatter_(0, order_N.to(torch.int64), places_N)


def _inverse(order_N: Tensor | None) -> Tensor | None:
    return None if order_N is None else inverse_order(order_N)


def in_order(values_N: Tensor, order_N: Tensor | None) -> Tensor:
    """Returns values[order], (N,), or the values unchanged if `order_N` is None."""
    return values_N if order_N is None else values_N.index_select(0, order_N)


def add_rows(
    rows: Tensor, place_N: Tensor | None, index_N: Tensor | None, num_rows: int, per_row: int
) -> Tensor:
    """Sums rows by index, (≥ N, D) to (num_rows, D): out[index_N[n]] += rows[place_N[n]] in order of n.

    With `per_row` > 0 route n belongs to row n // per_row and the index is not used. Otherwise rows
    accumulate by index in their own dtype. The result may be a view of `rows`.
    """
    if per_row > 1:
        if place_N is None:
            place_N = torch.arange(num_rows * per_row, device=rows.device)
        return F.embedding_bag(place_N.view(-1, per_row), rows, mode="sum")
    if index_N is not None and lists.can_add(rows):
        return lists.add_by_index(rows, place_N, index_N, num_rows)
    if place_N is not None:
        rows = rows.index_select(0, place_N)
    if index_N is None:
        return rows[:num_rows]
    return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, index_N, rows[: index_N.shape[0]])


def sum_to_targets(rows: Tensor, routes: SortedRoutes) -> Tensor:
    """Sums each target's sorted rows in route order. The result may be a view of `rows`."""
    num_targets, per_target = routes.num_targets, routes.per_target
    return add_rows(rows, routes.place_N, routes.target_N, num_targets, per_target)


def sum_to_sources(rows: Tensor, routes: SortedRoutes, num_sources: int) -> Tensor:
    """Sums each source's sorted rows in route order. The result may be a view of `rows`."""
    return add_rows(rows, routes.place_N, routes.source_N, num_sources, routes.per_source)


class _Gather(torch.autograd.Function):
    """Gathers rows in sorted order; its backward sums their gradients in route order."""

    @staticmethod
    def forward(
        ctx: Any, x_UD: Tensor, order_N: Tensor | None, index_N: Tensor, per_row: int
    ) -> Tensor:
        ctx.save_for_backward(order_N, index_N)
        ctx.num_rows, ctx.per_row = x_UD.shape[0], per_row
        return x_UD.index_select(0, in_order(index_N, order_N))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        order_N, index_N = ctx.saved_tensors
        index_or_rule = None if ctx.per_row else index_N
        grad = add_rows(
            grads[0].contiguous(), _inverse(order_N), index_or_rule, ctx.num_rows, ctx.per_row
        )
        return grad, None, None, None


class _Sum(torch.autograd.Function):
    """Sums sorted rows in route order; its backward gathers the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        order_N: Tensor | None,
        index_N: Tensor,
        num_rows: int,
        per_row: int,
    ) -> Tensor:
        ctx.save_for_backward(order_N, index_N)
        return add_rows(rows_ND, _inverse(order_N), None if per_row else index_N, num_rows, per_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        order_N, index_N = ctx.saved_tensors
        return grads[0].index_select(0, in_order(index_N, order_N)), None, None, None, None


def gather_rows(x_UD: Tensor, order_N: Tensor | None, index_N: Tensor, *, per_row: int) -> Tensor:
    """Returns x[index[order]], (N, D): each route's row in sorted order."""
    if order_N is None and per_row == 1:
        return x_UD
    gathered: Any = _Gather.apply(x_UD, order_N, index_N, per_row)
    return gathered


def sum_rows(
    rows_ND: Tensor, order_N: Tensor | None, index_N: Tensor, *, num_rows: int, per_row: int
) -> Tensor:
    """Sums sorted rows by `index_N` in route order: (N, D) to (num_rows, D)."""
    if order_N is None and per_row == 1:
        return rows_ND
    summed: Any = _Sum.apply(rows_ND, order_N, index_N, num_rows, per_row)
    return summed
