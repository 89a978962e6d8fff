"""Where the greatest scores of every row stand, on a CPU: top_k.cpp where there is a compiler.

A third of the time of `torch.topk` for 155 experts of which 12 are chosen, two thirds for 5 of which
two are.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .build import CppLibrary

LIBRARY = CppLibrary(
    name="moebius_cpu_top_k",
    source=Path(__file__).with_name("top_k.cpp"),
    flags=["-O3", "-std=c++17", "-fopenmp"],
    functions=[
        (
            "moebius_top_k",
            None,
            [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int],  # scores, T, E, K, out, threads
        ),
    ],
    takes="a second",
    otherwise="torch.topk does the same, slower",
)


def can_find(scores: Tensor) -> bool:
    """Tells whether `top_k` takes such scores: float32, on a CPU, and no stand-ins of a tracer's."""
    is_plain = type(scores) is Tensor and scores.device.type == "cpu"
    return is_plain and scores.dtype == torch.float32 and _library() is not None


def top_k(scores: Tensor, count: int) -> Tensor:
    """Returns where the `count` greatest along the last axis stand, the greatest first: int64.

    Of equal scores the first comes first, which `torch.topk` leaves open; NaN is greater than any
    number, as it is there.

    Raises:
        ValueError: `count` is not of 1 … E.
    """
    if not 0 < count <= scores.shape[-1]:
        raise ValueError(f"the {count} greatest of {scores.shape[-1]} scores: choose 1 to all")
    return _top_k(scores, count)


@torch.library.custom_op("moebius::top_k", mutates_args=())
def _top_k(scores: Tensor, count: int) -> Tensor:
    library, scores = _library(), scores.contiguous()
    assert library is not None, "ask `can_find` first"
    places = torch.empty(*scores.shape[:-1], count, dtype=torch.int64)
    library.moebius_top_k(
        *(scores.data_ptr(), places.numel() // count, scores.shape[-1], count),
        *(places.data_ptr(), torch.get_num_threads()),
    )
    return places


@_top_k.register_fake
def _(scores: Tensor, count: int) -> Tensor:
    return scores.new_empty(*scores.shape[:-1], count, dtype=torch.int64)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None: `torch.topk` finds them."""
    return LIBRARY.load_or_warn()
