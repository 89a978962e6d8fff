"""What an exchange sends, on a CPU, by sends.cpp: the same as sends.py has from torch, in two
passes over the routes.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ..addresses import Addresses, PackedSends, RowPairs, SendCounts
from .build import CppLibrary

LIBRARY = CppLibrary(
    name="moebius_cpu_sends",
    source=Path(__file__).with_name("sends.cpp"),
    flags=["-O3", "-std=c++17"],
    functions=[
        (
            "moebius_count_sends",
            c_int64,
            [
                *(c_void_p, c_void_p, c_void_p, c_int64),  # source, target and expert of N routes
                *(c_void_p, c_int64),  # rank of E experts
                *(c_int64, c_int64, c_int64, c_int64, c_int64),  # U, T, P, C, rows of a token
                *(c_void_p, c_void_p, c_void_p, c_void_p),  # counts, destinations, numbers: found
            ],
        ),
        (
            "moebius_pack_sends",
            None,
            [
                *(c_void_p, c_void_p, c_void_p, c_int64),
                *(c_void_p, c_void_p, c_int),  # slot of an expert, weights and their bytes
                *(c_int64, c_int64, c_int64),  # U, T, V
                *(c_void_p, c_void_p, c_void_p, c_void_p),  # what was counted
                *([c_void_p] * 8),  # metadata, places, lists of rows and of targets: all found
            ],
        ),
        (
            "moebius_unpack_sends",
            c_int,
            [
                *(c_void_p, c_void_p, c_int64, c_int64, c_int, c_int64),  # what came; V, R; slots
                *(c_void_p, c_void_p, c_void_p, c_void_p),  # source, slot, target, weight: found
            ],
        ),
    ],
    takes="a second",
    otherwise="torch's own operations do the same, in more passes",
)


def can_send(tensor: Tensor) -> bool:
    """Tells whether routes like these can be handled here: on a CPU, and no stand-ins."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and _library() is not None


def count_sends(to: Addresses) -> SendCounts:
    """Says where every route goes, and counts what does.

    Raises:
        IndexError: a route is out of range.
    """
    library, num_routes = _library(), len(to.expert_N)
    assert library is not None, "ask `can_send` first"
    lists = _lists(to)
    counts_V3 = torch.empty((to.num_destinations, 3), dtype=torch.int64)
    destination_N = torch.empty(num_routes, dtype=torch.int32)
    number_VU = torch.empty((to.num_destinations, to.num_sources), dtype=torch.int32)
    number_VT = None
    if not to.into_sources:
        number_VT = torch.empty((to.num_destinations, to.num_targets), dtype=torch.int32)
    wrong = library.moebius_count_sends(
        *(*(each.data_ptr() for each in lists), num_routes),
        *(to.rank_E.data_ptr(), len(to.rank_E), to.num_sources, to.num_targets),
        *(to.num_ranks, to.num_chunks, to.rows_per_token),
        *(counts_V3.data_ptr(), destination_N.data_ptr(), number_VU.data_ptr()),
        None if number_VT is None else number_VT.data_ptr(),
    )
    if wrong >= 0:
        raise IndexError(
            f"route {wrong} reads row {to.source_N[wrong]} of {to.num_sources}, goes to expert "
            f"{to.expert_N[wrong]} of {len(to.rank_E)} and to target row {to.target_N[wrong]} of "
            f"{to.num_targets}"
        )
    return SendCounts(counts_V3, destination_N, number_VU, number_VT)


def pack_sends(to: Addresses, counts: SendCounts, weight_N: Tensor) -> PackedSends:
    """Writes down the routes as they travel, and the distinct rows."""
    library, num_routes = _library(), len(to.expert_N)
    assert library is not None, "ask `can_send` first"
    lists, weight_N = _lists(to), weight_N.contiguous()
    metadata_N4 = weight_N.new_empty(num_routes, 4)
    place_N = torch.empty(num_routes, dtype=torch.int32)
    rows = _empty_pairs(num_routes, to.num_sources)
    targets = None if counts.number_VT is None else _empty_pairs(num_routes, to.num_targets)
    pairs = [*vars(rows).values(), *(vars(targets).values() if targets else [None] * 3)]
    number_VT = counts.number_VT
    library.moebius_pack_sends(
        *(*(each.data_ptr() for each in lists), num_routes),
        *(to.slot_E.data_ptr(), weight_N.data_ptr(), weight_N.element_size()),
        *(to.num_sources, to.num_targets, to.num_destinations),
        *(counts.counts_V3.data_ptr(), counts.destination_N.data_ptr()),
        *(counts.number_VU.data_ptr(), None if number_VT is None else number_VT.data_ptr()),
        *(metadata_N4.data_ptr(), place_N.data_ptr()),
        *(None if each is None else each.data_ptr() for each in pairs),
    )
    return PackedSends(metadata_N4, place_N, rows, targets)


def unpack_sends(metadata_R4: Tensor, received_V3: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Reads routes that came: source row, slot and target row (3, R), and weights (R,).

    Raises:
        IndexError: the counts are not theirs, or a route names what did not come.
    """
    library, num_routes = _library(), len(metadata_R4)
    assert library is not None, "ask `can_send` first"
    metadata_R4, received_V3 = metadata_R4.contiguous(), received_V3.contiguous()
    places_3R = torch.empty((3, num_routes), dtype=torch.int64)
    weight_R = metadata_R4.new_empty(num_routes)
    wrong = library.moebius_unpack_sends(
        *(metadata_R4.data_ptr(), received_V3.data_ptr(), len(received_V3), num_routes),
        *(metadata_R4.element_size(), num_slots),
        *(each.data_ptr() for each in places_3R),
        weight_R.data_ptr(),
    )
    if wrong:
        raise IndexError(
            f"{num_routes} routes came of which not all name rows and experts that are there: "
            f"rows, routes and targets of every source are {received_V3.tolist()}, and there are "
            f"{num_slots} slots"
        )
    return places_3R, weight_R


def _lists(to: Addresses) -> list[Tensor]:
    """Source, target and expert of every route, as C++ reads them."""
    return [each.to(torch.int64).contiguous() for each in (to.source_N, to.target_N, to.expert_N)]


def _empty_pairs(num_routes: int, num_rows: int) -> RowPairs:
    return RowPairs(
        *(torch.empty(count, dtype=torch.int32) for count in (num_routes, num_routes, num_rows))
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None: torch does it."""
    return LIBRARY.load_or_warn()
