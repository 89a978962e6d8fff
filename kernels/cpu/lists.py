"""Route lists on CPUs, one pass of lists.cpp each: indexed sums, sorting, and an exchange's sends.

Received routes have no fixed number per row and outnumber the rank's own rows: copying all rows for
`index_add_` took longer than sending them. In torch, sorting takes eight operations and packing some
thirty. Callers check `handles` first and otherwise use torch operations (permute.py, sends.py).
"""

import torch
from torch import Tensor

from ..calls import Addresses, PackedSends, RowPairs, SendCounts
from .library import call, handles

_SUMMED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


def can_add(rows: Tensor) -> bool:
    """Returns whether `add_by_index` accepts these rows."""
    return handles(rows, *_SUMMED)


def add_by_index(rows: Tensor, place_N: Tensor | None, index_N: Tensor, num_rows: int) -> Tensor:
    """Computes out[index_N[n]] += rows[place_N[n]] in order of n: (≥ N, D) to (num_rows, D).

    Args:
        rows: contiguous along the last dim, else copied.
        place_N: int32; None: row n.

    Raises:
        IndexError: an index is out of range.
    """
    index_N = index_N.to(torch.int64).contiguous()
    place_N = None if place_N is None else place_N.to(torch.int32).contiguous()
    rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
    sums = rows.new_zeros(num_rows, rows.shape[1])
    is_wrong = call(
        "add_rows",
        *(rows, len(rows), rows.stride(0) * rows.element_size(), place_N),
        *(index_N, len(index_N), num_rows, rows.shape[1], _SUMMED[rows.dtype], sums),
    )
    if is_wrong:
        raise IndexError(f"an index is out of range: there are {num_rows} sums of {len(rows)} rows")
    return sums


def sort_by_expert(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts routes stably by expert.

    Returns:
        int32: the route at each place, the place of each route, and the experts' bounds (E + 1,).

    Raises:
        IndexError: an expert is out of range.
    """
    order_N = torch.empty(expert_N.shape, dtype=torch.int32)
    place_N, starts_E1 = torch.empty_like(order_N), order_N.new_empty(num_experts + 1)
    expert_N = expert_N.contiguous()
    if call("sort_routes", expert_N, len(expert_N), num_experts, order_N, place_N, starts_E1):
        raise IndexError(f"a route names an expert outside 0 … {num_experts - 1}")
    return order_N, place_N, starts_E1


def count_sends(to: Addresses) -> SendCounts:
    """Implements `kernels.sends.count_sends`.

    Raises:
        IndexError: a route is out of range.
    """
    counts_P3 = torch.empty((to.num_ranks, 3), dtype=torch.int64)
    destination_N = torch.empty(len(to.expert_N), dtype=torch.int32)
    number_PU = torch.empty((to.num_ranks, to.num_sources), dtype=torch.int32)
    number_PT = None
    if not to.into_sources:
        number_PT = torch.empty((to.num_ranks, to.num_targets), dtype=torch.int32)
    wrong = call(
        "count_sends",
        *(*_lists(to), len(to.expert_N), to.rank_E, len(to.rank_E)),
        *(to.num_sources, to.num_targets, to.num_ranks),
        *(counts_P3, destination_N, number_PU, number_PT),
    )
    if wrong >= 0:
        raise IndexError(
            f"route {wrong} reads row {to.source_N[wrong]} of {to.num_sources}, goes to expert "
            f"{to.expert_N[wrong]} of {len(to.rank_E)} and to target row {to.target_N[wrong]} of "
            f"{to.num_targets}"
        )
    return SendCounts(counts_P3, destination_N, number_PU, number_PT)


def pack_sends(to: Addresses, counts: SendCounts, weight_N: Tensor) -> PackedSends:
    """Implements `kernels.sends.pack_sends`, without its gradient."""
    num_routes, weight_N = len(to.expert_N), weight_N.contiguous()
    metadata_N4 = weight_N.new_empty(num_routes, 4)
    place_N = torch.empty(num_routes, dtype=torch.int32)
    rows, targets = _empty_pairs(num_routes, to.num_sources), None
    if counts.number_PT is not None:
        targets = _empty_pairs(num_routes, to.num_targets)
    call(
        "pack_sends",
        *(*_lists(to), num_routes, to.slot_E, weight_N, weight_N.element_size()),
        *(to.num_sources, to.num_targets, to.num_ranks),
        *(counts.counts_P3, counts.destination_N, counts.number_PU, counts.number_PT),
        *(metadata_N4, place_N, rows.row_N, rows.by_row_N, rows.first_U),
        *((None,) * 3 if targets is None else (targets.row_N, targets.by_row_N, targets.first_U)),
    )
    return PackedSends(metadata_N4, place_N, rows, targets)


def unpack_sends(metadata_R4: Tensor, received_P3: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Unpacks received routes: source row, slot and target row (3, R), and weights (R,).

    Raises:
        IndexError: the counts do not match, or a route names a row or slot that does not exist.
    """
    num_routes, num_sources = len(metadata_R4), len(received_P3)
    metadata_R4, received_P3 = metadata_R4.contiguous(), received_P3.contiguous()
    places_3R = torch.empty((3, num_routes), dtype=torch.int64)
    weight_R = metadata_R4.new_empty(num_routes)
    is_wrong = call(
        "unpack_sends",
        *(metadata_R4, received_P3, num_sources, num_routes, metadata_R4.element_size()),
        *(num_slots, *places_3R, weight_R),
    )
    if is_wrong:
        raise IndexError(
            f"some of the {num_routes} received routes name rows or slots that do not exist: rows, routes and "
            f"targets of every source are {received_P3.tolist()}, and there are {num_slots} slots"
        )
    return places_3R, weight_R


def _lists(to: Addresses) -> list[Tensor]:
    """Returns source, target and expert of every route as C++ expects them."""
    return [each.to(torch.int64).contiguous() for each in (to.source_N, to.target_N, to.expert_N)]


def _empty_pairs(num_routes: int, num_rows: int) -> RowPairs:
    lengths = (num_routes, num_routes, num_rows)
    return RowPairs(*(torch.empty(length, dtype=torch.int32) for length in lengths))
