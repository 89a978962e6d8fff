"""Rotary embedding of queries and keys in one operation: scaled, rotated, rounded once.

In plain operations a rotation takes about eight passes over the rows: cast, roll, two products, sum,
cast, and concatenation. `rotate_pair` makes one pass over queries and keys together, forward and
backward, in a Triton kernel (triton/rotary.py); `rotate_reference` defines it.

A rotation is linear and its transpose is the reverse rotation, so the backward pass is the same
operator and needs only the table.

Legend: B sequences, S positions, H heads, C channels of a head, W of them rotated.
"""

from typing import Any

import torch
from torch import Tensor

from ..backend import runs_triton
from ..custom_op import custom_op
from ..triton.available import kernels


def rotate_reference(
    x_BHSC: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0, back: bool = False
) -> Tensor:
    """Returns scale · x with its first W channels rotated in "half-split" form, in plain operations.

    Channel c becomes x_c · cos_c + x_c' · sin_c, where c' is its partner in the other half. Computed
    in the table's dtype and rounded to x's; scaled rows are rounded before the rotation.

    Source: RoFormer, arXiv 2104.09864, eq. 15.

    Args:
        x_BHSC: rows of any strides.
        cos: (S, W), or (B, 1, S, W); W is even.
        sin: same shape as `cos`, with the first half negated.
        scale: applied first; 1 costs nothing.
        back: rotate by the negative angles.
    """
    x_BHSC = x_BHSC if scale == 1.0 else x_BHSC * scale
    width = cos.shape[-1]
    turned = x_BHSC[..., :width].to(cos.dtype)
    partner = turned.roll(width // 2, -1) * sin
    turned = turned * cos - partner if back else turned * cos + partner
    return torch.cat((turned.to(x_BHSC.dtype), x_BHSC[..., width:]), dim=-1)


def runs_fused(backend: str, q_BHSC: Tensor, cos: Tensor) -> bool:
    """Returns whether `rotate_pair` supports these rows; `backend` is the expert layers'."""
    return (
        cos.shape[-1] > 0
        and cos.dtype == torch.float32
        and runs_triton(backend, q_BHSC.device, q_BHSC.dtype)
    )


def rotate_pair(
    q_BHSC: Tensor, k_BHSC: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Scales and rotates queries and keys in one kernel, in float32, rounded once; differentiable.

    Values equal `rotate_reference` within rounding. Results and gradients have the memory layout
    (B, S, H, C), which matrix products write and attention kernels read.

    Args:
        q_BHSC: queries of any strides, float32 or bfloat16.
        k_BHSC: keys of the same shape and dtype.
        cos: (S, W) or (B, 1, S, W), float32, with 0 < W ≤ C even.
        sin: same shape as `cos`, with the first half negated.
        scale: applied to both.

    Raises:
        ValueError: the Triton kernel does not support these rows, or shapes do not fit.
    """
    if not runs_fused("triton", q_BHSC, cos):
        raise ValueError(
            f"rotate_pair has no kernel for rows {tuple(q_BHSC.shape)} of {q_BHSC.dtype} on "
            f"{q_BHSC.device.type} and a table {tuple(cos.shape)} of {cos.dtype}: use "
            "rotate_reference"
        )
    batch, _, length, channels = q_BHSC.shape
    width = cos.shape[-1]
    tables = ((length, width), (batch, 1, length, width))
    fits = q_BHSC.shape == k_BHSC.shape and cos.shape == sin.shape and cos.shape in tables
    if not fits or width % 2 or width > channels or q_BHSC.dtype != k_BHSC.dtype:
        raise ValueError(
            f"queries {tuple(q_BHSC.shape)} of {q_BHSC.dtype}, keys {tuple(k_BHSC.shape)} of "
            f"{k_BHSC.dtype}, cosines {tuple(cos.shape)} and sines {tuple(sin.shape)} do not fit: "
            "queries and keys must be (B, H, S, C), and the table (S, W) or (B, 1, S, W) with W even and at most C"
        )
    return _rotate_pair(q_BHSC, k_BHSC, cos, sin, scale, False)


@custom_op(
    "moebius::rotate_pair",
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, float scale, bool back) "
    "-> (Tensor, Tensor)",
)
def _rotate_pair(
    q_BHSC: Tensor, k_BHSC: Tensor, cos: Tensor, sin: Tensor, scale: float, back: bool
) -> tuple[Tensor, Tensor]:
    outputs = _new_like(q_BHSC), _new_like(k_BHSC)
    kernels("rotary").rotate_pair((q_BHSC, k_BHSC), (cos, sin), outputs, scale=scale, back=back)
    return outputs


@_rotate_pair.register_fake
def _(q_BHSC: Tensor, k_BHSC: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _new_like(q_BHSC), _new_like(k_BHSC)


def _new_like(x_BHSC: Tensor) -> Tensor:
    batch, heads, length, channels = x_BHSC.shape
    return x_BHSC.new_empty(batch, length, heads, channels).transpose(1, 2)


def _context(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, cos, sin, ctx.scale, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple:
    of_q, of_k = _rotate_pair(grad_q, grad_k, *ctx.saved_tensors, ctx.scale, not ctx.back)
    return of_q, of_k, None, None, None, None


_rotate_pair.register_autograd(_gradients, setup_context=_context)
