"""What a rank sends to the ranks of its routes' experts: counted first, then written down.

A row goes once to every destination that wants it. `count_sends` says how many rows, routes and
target rows each destination gets, which is all that the ranks must know of each other before rows
can travel; `pack_sends` writes down the routes as they travel and lists the rows, while the counts
do; `unpack_sends` reads routes that came. Nothing here reads a number from the device: what has a
length of its own is as long as it can be.

On CPUs two passes of cpu/lists.cpp do it, on GPUs five of Triton's kernels (triton/sends.py); the
operations of torch here stand for both where there is no compiler, and are what both are tested
against.

Legend: N routes, P ranks, U source rows, T target rows, M distinct (rank, row) pairs,
R routes that came, D width.
"""

from dataclasses import dataclass, replace
from importlib import import_module
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
from .triton.available import reason_against


def count_sends(to: Addresses) -> SendCounts:
    """Says where every route goes, and counts what does.

    Raises:
        IndexError: a route is out of range; of C++ alone.
    """
    if handles(to.expert_N, torch.int64, torch.int32):
        return lists.count_sends(to)
    return _triton().count_sends(to) if _has_triton(to.expert_N) else count_by_torch(to)


def pack_sends(to: Addresses, counts: SendCounts, weight_N: Tensor) -> PackedSends:
    """Writes down the routes as they travel, and the distinct rows; differentiable in the weights."""
    given = to, counts, weight_N.detach()
    if handles(weight_N, *INTEGERS):
        packed = lists.pack_sends(*given)
    elif counts.blocks is not None:
        packed = _triton().pack_sends(*given)
    else:
        packed = pack_by_torch(*given)
    metadata_N4: Any = _WithWeights.apply(weight_N, packed.metadata_N4, packed.place_N)
    return replace(packed, metadata_N4=metadata_N4)


@dataclass(frozen=True)
class UnpackedSends:
    """Holds routes that came; rows and targets are numbered as they came."""

    source_R: Tensor  # int64, as the following two
    slot_R: Tensor
    target_R: Tensor
    weight_R: Tensor


def unpack_sends(metadata_R4: Tensor, received_P3: Tensor, num_slots: int) -> UnpackedSends:
    """Reads routes that came, from one source after another; differentiable in the weights.

    Args:
        received_P3: int64: rows, routes and target rows that came from every source.

    Raises:
        IndexError: the counts are not theirs, or a route names what did not come; of C++ alone.
    """
    places_3R, weight_R = _Unpack.apply(metadata_R4, received_P3, num_slots)  # pyright: ignore[reportGeneralTypeIssues]
    source_R, slot_R, target_R = places_3R.unbind(0)
    return UnpackedSends(source_R, slot_R, target_R, weight_R)


def gather_pairs(x_UD: Tensor, pairs: RowPairs) -> Tensor:
    """Gathers the row of every pair, by destination: (U, D) to (M, D)."""
    return _GatherPairs.apply(x_UD, pairs)  # pyright: ignore[reportReturnType]


def sum_pairs(rows_MD: Tensor, pairs: RowPairs) -> Tensor:
    """Adds up the pairs of every row in the order of destinations: (M, D) to (U, D)."""
    return _SumPairs.apply(rows_MD, pairs)  # pyright: ignore[reportReturnType]


# By torch's operations -----------------------------------------------------------------------------------------------


def count_by_torch(to: Addresses) -> SendCounts:
    """Does what `count_sends` says, by some twenty operations."""
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
    """Does what `pack_sends` says, by some thirty operations."""
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
    """Does what `unpack_sends` says, by a dozen operations: source, slot and target, (3, R), and
    weights.
    """
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
    """(P, U) int32: the number of every marked row among those of its destination, else −1."""
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


# Their gradients -----------------------------------------------------------------------------------------------------


class _WithWeights(torch.autograd.Function):
    """The metadata, whose last column is the weights."""

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
        if handles(metadata_R4, *INTEGERS):
            unpack = lists.unpack_sends
        else:
            unpack = _triton().unpack_sends if _has_triton(metadata_R4) else unpack_by_torch
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
    """(U, D): the sum over every row's pairs in order of destination, zero where there is none."""
    if not len(rows_MD):
        return rows_MD.new_zeros(len(first_U), rows_MD.shape[1])
    return F.embedding_bag(by_row_M, rows_MD, first_U, mode="sum")


def _has_triton(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and reason_against("cuda", torch.float32) is None


def _triton() -> Any:
    return import_module(".triton.sends", __package__)
