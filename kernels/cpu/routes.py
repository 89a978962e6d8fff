"""Lists of routes on a CPU, each in one pass of routes.cpp where there is a compiler: rows added
up by index, and routes sorted by expert.

Routes that came from other ranks follow no rule (so many per row), and there are more of them than
rows of one's own. A copy of all rows and `index_add_` took longer than sending them. To sort them
torch needs eight operations, each of which costs more than the sorting does.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .build import CppLibrary

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
LIBRARY = CppLibrary(
    name="moebius_cpu_routes",
    source=Path(__file__).with_name("routes.cpp"),
    flags=["-O3", "-std=c++17"],
    functions=[
        (
            "moebius_add_rows",
            c_int,
            [
                *(c_void_p, c_int64, c_int64, c_void_p),  # rows, their number and stride; places
                *(c_void_p, c_int64, c_int64, c_int64),  # index, N, sums, width
                *(c_int, c_void_p),  # dtype, out
            ],
        ),
        (
            "moebius_sort_routes",
            c_int,
            [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p],  # expert, N, E; all found
        ),
    ],
    takes="a second",
    otherwise="torch's own operations do the same, in more passes",
)


def can_add(rows: Tensor) -> bool:
    """Tells whether rows like these can be added up here: on a CPU, and no stand-ins of a tracer's."""
    is_plain = type(rows) is Tensor and rows.device.type == "cpu" and rows.dtype in _DTYPES
    return is_plain and _library() is not None


def add_by_index(rows: Tensor, place_N: Tensor | None, index_N: Tensor, num_rows: int) -> Tensor:
    """Returns out[index_N[n]] += rows[place_N[n]] in the order of n: (≥ N, D) to (num_rows, D).

    Args:
        rows: neighbouring along its last axis.
        place_N: int32; None: row n.

    Raises:
        IndexError: an index is out of range.
    """
    library, index_N = _library(), index_N.to(torch.int64).contiguous()
    assert library is not None, "ask `can_add` first"
    place_N = None if place_N is None else place_N.to(torch.int32).contiguous()
    rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
    sums = rows.new_zeros(num_rows, rows.shape[1])
    status = library.moebius_add_rows(
        *(rows.data_ptr(), len(rows), rows.stride(0) * rows.element_size()),
        *(None if place_N is None or not len(place_N) else place_N.data_ptr(),),
        *(index_N.data_ptr(), len(index_N), num_rows, rows.shape[1]),
        *(_DTYPES[rows.dtype], sums.data_ptr()),
    )
    if status:
        raise IndexError(
            f"a row is added to none of the {num_rows} sums, or is none of {len(rows)}"
        )
    return sums


def can_sort(expert_N: Tensor) -> bool:
    """Tells whether routes to these experts can be sorted here: on a CPU, and no stand-ins."""
    is_plain = type(expert_N) is Tensor and expert_N.device.type == "cpu"
    return is_plain and expert_N.dtype == torch.int64 and _library() is not None


def sort_by_expert(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts routes by expert, stably.

    Returns:
        int32: the route at every place, the place of every route, and where every expert begins and
        the last ends, (E + 1,).

    Raises:
        IndexError: an expert is out of range.
    """
    library, expert_N = _library(), expert_N.contiguous()
    assert library is not None, "ask `can_sort` first"
    order_N = torch.empty(expert_N.shape, dtype=torch.int32)
    place_N, starts_E1 = torch.empty_like(order_N), order_N.new_empty(num_experts + 1)
    status = library.moebius_sort_routes(
        *(expert_N.data_ptr(), len(expert_N), num_experts),
        *(order_N.data_ptr(), place_N.data_ptr(), starts_E1.data_ptr()),
    )
    if status:
        raise IndexError(f"a route goes to none of the {num_experts} experts")
    return order_N, place_N, starts_E1


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None: torch adds instead, in two passes and the same order."""
    return LIBRARY.load_or_warn()
