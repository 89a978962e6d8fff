"""Counts and packs the rows and routes that a rank sends to the ranks of its experts.

A row is sent once to each destination that needs it. `count_sends` returns how many rows, routes and
target rows each destination gets; the ranks exchange these counts first. `pack_sends` overlaps with
that exchange: it packs the routes and lists the rows. `unpack_sends` reads received routes. Nothing
here reads a value from the device, so outputs of unknown length have their largest possible size.

On CPUs, cpu/lists.cpp needs two passes. The torch operations here serve GPUs and machines without
a compiler, and are the reference in the tests.

Legend: N routes, P ranks, U source rows, T target rows, M distinct (rank, row) pairs,
R received routes, D width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .calls import (
    INTEGERS,
    ROUTES,
    ROWS,
    TARGETS,
    Addresses,
    PackedSends,
    RowPairs,
    SendCounts,
)
from .cpu import lists
from .cpu.library import handles
from .permute import inverse_order, sort_by_expert


def count_sends(to: Addresses) -> SendCounts:
    """Finds the destination of every route and counts what each destination receives.

    Raises:
        IndexError: a route is out of range; only the C++ code checks.
    """
    is_native = handles(to.expert_N, torch.int64, torch.int32)
    return lists.count_sends(to) if is_native else count_by_torch(to)


def pack_sends(to: Addresses, counts: SendCounts, weight_N: Tensor) -> PackedSends:
    """Packs the routes by destination and lists the distinct rows; differentiable in the weights."""
    pack = lists.pack_sends if handles(weight_N, *INTEGERS) else pack_by_torch
    packed = pack(to, counts, weight_N.detach())
    metadata_N4: Any = _WithWeights.apply(weight_N, packed.metadata_N4, packed.place_N)
    return replace(packed, metadata_N4=metadata_N4)


@dataclass(frozen=True)
class UnpackedSends:
    """Received routes; their rows and targets are numbered in order of arrival."""

    source_R: Tensor  # int64, as the following two
    slot_R: Tensor
    target_R: Tensor
    weight_R: Tensor


def unpack_sends(metadata_R4: Tensor, received_P3: Tensor, num_slots: int) -> UnpackedSends:
    """Unpacks received routes, source rank by source rank; differentiable in the weights.

    Args:
        received_P3: int64, rows, routes and target rows received from each source.

    Raises:
        IndexError: the counts do not match, or a route names a row or slot that does not exist;
            only the C++ code checks.
    """
    places_3R, weight_R = _Unpack.apply(metadata_R4, received_P3, num_slots)  # pyright: ignore[reportGeneralTypeIssues]
    source_R, slot_R, target_R = places_3R.unbind(0)
    return UnpackedSends(source_R, slot_R, target_R, weight_R)


def gather_pairs(x_UD: Tensor, pairs: RowPairs) -> Tensor:
    """Gathers the row of every pair, ordered by destination: (U, D) to (M, D)."""
    return _GatherPairs.apply(x_UD, pairs)  # pyright: ignore[reportReturnType]


def sum_pairs(rows_MD: Tensor, pairs: RowPairs) -> Tensor:
    """Sums the pairs of every row in destination order: (M, D) to (U, D)."""
    return _SumPairs.apply(rows_MD, pairs)  # pyright: ignore[reportReturnType]


# In torch operations -------------------------------------------------------------------------------------------------


def count_by_torch(to: Addresses) -> SendCounts:
    """Implements `count_sends` in about twenty torch operations."""
    destination_N = to.rank_E.index_select(0, to.expert_N).long()
    number_PU = _numbers(destination_N, to.source_N, to.num_ranks, to.num_sources)
    number_PT = None
    if not to.into_sources:
        number_PT = _numbers(destination_N, to.target_N, to.num_ranks, to.num_targets)
    rows_P = (number_PU >= 0).sum(1)
    targets_P = rows_P if number_PT is None else (number_PT >= 0).sum(1)
    routes_P = torch.zeros_like(rows_P).scatter_add_(
        0, destination_N, torch.ones_like(destination_N)
    )
    counts_P3 = torch.stack((rows_P, routes_P, targets_P), 1)
    return SendCounts(counts_P3, destination_N.int(), number_PU, number_PT)


def pack_by_torch(to: Addresses, counts: SendCounts, weight_N: Tensor) -> PackedSends:
    """Implements `pack_sends` in about thirty torch operations."""
    destination_N = counts.destination_N.long()
    order_N = sort_by_expert(destination_N, to.num_ranks)
    row_N = counts.number_PU[destination_N, to.source_N]
    target_N = row_N
    if counts.number_PT is not None:
        target_N = counts.number_PT[destination_N, to.target_N]
    integers_N3 = torch.stack((to.slot_E.index_select(0, to.expert_N), row_N, target_N), 1)
    integers_N3 = integers_N3.to(INTEGERS[weight_N.dtype]).view(weight_N.dtype)
    metadata_N4 = torch.cat((integers_N3, weight_N[:, None]), 1).index_select(0, order_N)
    place_N = inverse_order(order_N.int())
    sources = _pairs(counts.number_PU, counts.counts_P3[:, ROWS], len(order_N))
    targets = None
    if counts.number_PT is not None:
        targets = _pairs(counts.number_PT, counts.counts_P3[:, TARGETS], len(order_N))
    return PackedSends(metadata_N4, place_N, sources, targets)


def unpack_by_torch(
    metadata_R4: Tensor, received_P3: Tensor, num_slots: int
) -> tuple[Tensor, Tensor]:
    """Implements `unpack_sends`: returns source, slot and target as (3, R), and the weights."""
    del num_slots
    integers_R3 = metadata_R4[:, :3].contiguous().view(INTEGERS[metadata_R4.dtype]).long()
    first_P3 = received_P3.cumsum(0) - received_P3
    first_R3 = first_P3.repeat_interleave(
        received_P3[:, ROUTES], 0, output_size=metadata_R4.shape[0]
    )
    slot_R, row_R, target_R = integers_R3.unbind(1)
    places_3R = torch.stack((row_R + first_R3[:, ROWS], slot_R, target_R + first_R3[:, TARGETS]))
    return places_3R, metadata_R4[:, 3].contiguous()


def _numbers(destination_N: Tensor, row_N: Tensor, num_ranks: int, num_rows: int) -> Tensor:
    """Returns (P, U) int32: the index of a row among those sent to a destination, or −1."""
    mask = torch.zeros(num_ranks * num_rows, dtype=torch.bool, device=row_N.device)
    mask = mask.index_fill_(0, destination_N * num_rows + row_N, True)
    mask_PU = mask.view(num_ranks, num_rows)
    return torch.where(mask_PU, mask_PU.cumsum(1) - 1, -1).int()


def _pairs(number_PU: Tensor, counts_P: Tensor, num_routes: int) -> RowPairs:
    num_ranks, num_rows = (max(1, size) for size in number_PU.shape)
    first_P, mask_PU = counts_P.cumsum(0) - counts_P, number_PU >= 0
    places, across = (
        torch.nonzero_static(mask.flatten(), size=num_routes, fill_value=0).squeeze(1)
        for mask in (mask_PU, mask_PU.T)
    )
    row_N, destination_N = across // num_ranks, across % num_ranks
    counts_U = mask_PU.sum(0)
    by_row_N = torch.zeros_like(row_N)
    if number_PU.numel():
        by_row_N = first_P[destination_N] + number_PU[destination_N, row_N]
    return RowPairs(
        (places % num_rows).int(), by_row_N.int(), (counts_U.cumsum(0) - counts_U).int()
    )


# Gradients -----------------------------------------------------------------------------------------------------------


class _WithWeights(torch.autograd.Function):
    """Connects the metadata's last column to the weights."""

    @staticmethod
    def forward(ctx: Any, weight_N: Tensor, metadata_N4: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        return metadata_N4.view_as(metadata_N4)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        [place_N] = ctx.saved_tensors
        return grads[0][:, 3].index_select(0, place_N), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, metadata_R4: Tensor, received_P3: Tensor, num_slots: int
    ) -> tuple[Tensor, Tensor]:
        unpack = lists.unpack_sends if handles(metadata_R4, *INTEGERS) else unpack_by_torch
        places_3R, weight_R = unpack(metadata_R4.detach(), received_P3, num_slots)
        ctx.mark_non_differentiable(places_3R)
        return places_3R, weight_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_R = grads[1]
        grad_R4 = grad_R.new_zeros(grad_R.shape[0], 4)
        grad_R4[:, 3] = grad_R
        return grad_R4, None, None


class _GatherPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UD: Tensor, pairs: RowPairs) -> Tensor:
        ctx.save_for_backward(pairs.by_row_N, pairs.first_U)
        return x_UD.index_select(0, pairs.row_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_by_row(grads[0].contiguous(), *ctx.saved_tensors), None


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, pairs: RowPairs) -> Tensor:
        ctx.save_for_backward(pairs.row_N)
        return _sum_by_row(rows_MD, pairs.by_row_N, pairs.first_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        [row_N] = ctx.saved_tensors
        return grads[0].index_select(0, row_N), None


def _sum_by_row(rows_MD: Tensor, by_row_M: Tensor, first_U: Tensor) -> Tensor:
    """Returns (U, D): the sum of every row's pairs in destination order, zero without pairs."""
    if not len(rows_MD):
        return rows_MD.new_zeros(len(first_U), rows_MD.shape[1])
    return F.embedding_bag(by_row_M, rows_MD, first_U, mode="sum")
