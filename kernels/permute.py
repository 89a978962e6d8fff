"""Rows in and out of expert order: sort, gather, and the sum back in a fixed order.

`gather_rows` and `sum_rows` are each other's transpose, and both add in route order. So the local kernels and an all-to-all
dispatcher, which do the same sums in different places, agree bit for bit.

Legend: N routes, U source or target rows, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sort_by_expert(expert_N: Tensor, num_experts: int) -> Tensor:
    """The routes in order of their expert, and in their old order within an expert (int64).

    16-bit keys where they suffice: radix-sorted in a third of the time of 64-bit ones.
    """
    keys_N = expert_N.to(torch.int16) if num_experts <= 2**15 else expert_N
    return torch.argsort(keys_N, stable=True)


def inverse_order(order_N: Tensor) -> Tensor:
    """Where each route went: place[order[i]] = i."""
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return place_N


def add_rows(rows: Tensor, place_N: Tensor, index_N: Tensor, num_rows: int, per_row: int) -> Tensor:
    """out[index_N[n]] += rows[place_N[n]] in the order of n; `per_row` > 0: route n belongs to row n // per_row.

    (≥ N, D) to (num_rows, D). Without a rule (`per_row` = 0) rows are accumulated by index in the rows' own dtype.
    """
    if per_row == 1:
        return rows.index_select(0, place_N)
    if per_row > 1:
        return F.embedding_bag(place_N.view(-1, per_row), rows, mode="sum")
    return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, index_N, rows.index_select(0, place_N))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UD: Tensor, order_N: Tensor, index_N: Tensor, per_row: int) -> Tensor:
        ctx.save_for_backward(order_N, index_N)
        ctx.num_rows, ctx.per_row = x_UD.shape[0], per_row
        return x_UD.index_select(0, index_N.index_select(0, order_N))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        order_N, index_N = ctx.saved_tensors
        grad = add_rows(grads[0].contiguous(), inverse_order(order_N), index_N, ctx.num_rows, ctx.per_row)
        return grad, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, index_N: Tensor, num_rows: int, per_row: int) -> Tensor:
        ctx.save_for_backward(order_N, index_N)
        return add_rows(rows_ND, inverse_order(order_N), index_N, num_rows, per_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        order_N, index_N = ctx.saved_tensors
        return grads[0].index_select(0, index_N.index_select(0, order_N)), None, None, None, None


def gather_rows(x_UD: Tensor, order_N: Tensor, index_N: Tensor, *, per_row: int) -> Tensor:
    """x[index[order]], (N, D): route n's row, in sorted order."""
    return _Gather.apply(x_UD, order_N, index_N, per_row)  # pyright: ignore[reportReturnType]


def sum_rows(rows_ND: Tensor, order_N: Tensor, index_N: Tensor, *, num_rows: int, per_row: int) -> Tensor:
    """Adds sorted rows up where `index_N` says, in route order: (N, D) to (num_rows, D)."""
    return _Sum.apply(rows_ND, order_N, index_N, num_rows, per_row)  # pyright: ignore[reportReturnType]
