"""Sums over a sequence's rows of the softmax of their logits: what a balancing loss averages.

`torch.softmax` takes 18 ns for each expert of a head with 8 on a CPU, for it goes head by head.
softmax.cpp takes 3 ns, and keeps for the backward pass the logits, which are there already, and
no probability. Of wider heads, and without a compiler, torch does the same.

Legend: B sequences, T rows (B·S, sequence-major), H heads, A experts of a head.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cpu.build import CppLibrary

WIDEST = 32  # experts of a head up to which the C++ is quicker
LIBRARY = CppLibrary(
    name="moebius_cpu_softmax",
    source=Path(__file__).parents[1] / "cpu" / "softmax.cpp",
    flags=["-O3", "-std=c++17", "-fopenmp", "-fno-trapping-math", "-fno-math-errno"],
    functions=[
        (
            "moebius_softmax_sums",
            None,
            [c_void_p, *[c_int64] * 4, c_void_p, c_int],  # logits, their shape, sums, threads
        ),
        (
            "moebius_softmax_sums_gradient",
            None,
            [c_void_p, c_void_p, *[c_int64] * 4, c_void_p, c_int],  # gradient of the sums first
        ),
    ],
    takes="a second",
    otherwise="torch.softmax does the same, slower for few experts",
)


def softmax_sums_reference(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Returns what `softmax_sums` does, by plain operations under autograd: its meaning."""
    return logits_THA.softmax(-1).unflatten(0, (batch_size, -1)).sum(1)


def softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Returns Σ over the rows of each sequence of softmax(logits), (B, H, A), differentiable.

    In C++ for narrow heads in float32 on a CPU that has a compiler.
    """
    if _can_add(logits_THA):
        return _softmax_sums(logits_THA, batch_size)
    return softmax_sums_reference(logits_THA, batch_size)


def _can_add(logits_THA: Tensor) -> bool:
    is_plain = type(logits_THA) is Tensor and logits_THA.device.type == "cpu"
    is_narrow = logits_THA.dtype == torch.float32 and logits_THA.shape[-1] <= WIDEST
    return is_plain and is_narrow and _library() is not None


@torch.library.custom_op("moebius::softmax_sums", mutates_args=())
def _softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    library, logits_THA = _library(), logits_THA.contiguous()
    assert library is not None
    rows, heads, experts = logits_THA.shape
    sums_BHA = logits_THA.new_empty(batch_size, heads, experts)
    library.moebius_softmax_sums(
        *(logits_THA.data_ptr(), batch_size, rows // batch_size, heads, experts),
        *(sums_BHA.data_ptr(), torch.get_num_threads()),
    )
    return sums_BHA


@torch.library.custom_op("moebius::softmax_sums_gradient", mutates_args=())
def _softmax_sums_gradient(grad_BHA: Tensor, logits_THA: Tensor) -> Tensor:
    library = _library()
    assert library is not None
    grad_BHA, logits_THA = grad_BHA.contiguous(), logits_THA.contiguous()
    batch, (rows, heads, experts) = len(grad_BHA), logits_THA.shape
    grad_THA = torch.empty_like(logits_THA)
    library.moebius_softmax_sums_gradient(
        *(grad_BHA.data_ptr(), logits_THA.data_ptr(), batch, rows // batch, heads, experts),
        *(grad_THA.data_ptr(), torch.get_num_threads()),
    )
    return grad_THA


@_softmax_sums.register_fake
def _(logits_THA: Tensor, batch_size: int) -> Tensor:
    return logits_THA.new_empty(batch_size, *logits_THA.shape[1:])


@_softmax_sums_gradient.register_fake
def _(grad_BHA: Tensor, logits_THA: Tensor) -> Tensor:
    return torch.empty_like(logits_THA)


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradients(ctx: Any, grad_BHA: Tensor) -> tuple:
    return _softmax_sums_gradient(grad_BHA, *ctx.saved_tensors), None


_softmax_sums.register_autograd(_gradients, setup_context=_context)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None: torch's operations do it."""
    return LIBRARY.load_or_warn()
