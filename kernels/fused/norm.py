"""Residual, norm and casts in one operation: s = x + y, n = norm(s), and copies of both as matrix
products read them.

What a layer does between two of its maps is memory traffic alone: in MoEUT the residual stream is
read by the addition, the norm and the cast for the experts, its norm by the router and the cast for
queries and keys, and backward all of their gradients are added up again. `add_norm` passes over the
rows once forward and once backward, in Triton's kernels (triton/norm.py); `add_norm_reference` is
what it means.

A copy in low precision is made once, and every copy has a gradient of its own: they come back
apart, in low precision as the products leave them, and are added in float32, as they are where
every reader casts for itself.

Legend: D columns; rows have any number of leading dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import runs_triton

# Columns up to which the kernels are made: a row of more does not fit the registers of the backward pass.
WIDEST = 8192
Copied = Literal["normed", "total"]


@dataclass(frozen=True)
class NormedRows:
    """Holds what `add_norm` returns, all of the shape of x."""

    total: Tensor  # x + y, in x's dtype; without y it is x
    normed: Tensor | None  # its norm, in x's dtype; None if it is not wanted
    copies: tuple[Tensor, ...]  # as asked for, in low precision


def add_norm_reference(
    x: Tensor,
    y: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    *,
    low: torch.dtype,
    copies: Sequence[Copied] = (),
    wants_normed: bool = True,
) -> NormedRows:
    """Returns what `add_norm` does, by plain operations under autograd: its meaning."""
    total = x if y is None else x + y
    normed = F.layer_norm(total, total.shape[-1:], weight_D, bias_D, eps)
    found = {"total": total, "normed": normed}
    made = tuple(found[name].to(low) for name in copies)
    return NormedRows(total, normed if wants_normed else None, made)


def runs_fused(
    backend: str, x: Tensor, y: Tensor | None, weight_D: Tensor | None, low: torch.dtype
) -> bool:
    """Tells whether `add_norm` has kernels for these rows: with Triton on a GPU, in its dtypes.

    `backend`: the one of the expert layers, "auto" or a name. Another than Triton's keeps plain
    operations.
    """
    return (
        runs_triton(backend, x.device, x.dtype)
        and x.shape[-1] <= WIDEST
        and low.is_floating_point
        and (weight_D is None or weight_D.dtype == x.dtype)
        and (y is None or torch.promote_types(x.dtype, y.dtype) == x.dtype)
    )


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    *,
    low: torch.dtype,
    copies: Sequence[Copied] = (),
    wants_normed: bool = True,
) -> NormedRows:
    """Returns x + y, its layer norm, and copies of them in low precision, by the kernels.

    Values are those of `add_norm_reference` within float32 rounding. Gradients are the same sums in
    another order, rounded to x's and y's dtypes once; they, too, are the same bits in every run.

    Args:
        x: (…, D), float32 or bfloat16: the residual stream.
        y: (…, D): what is added to it; None: nothing.
        weight_D, bias_D: of x's dtype; None: 1 and 0. There is no bias without a weight.
        eps: is added to the variance.
        low: dtype of the copies. Where it is x's they are no copies, but share memory with the
            total or the norm.
        copies: of the norm or of the total, at most two, and of the total one. Each has a gradient
            of its own, though two of the norm share memory.
        wants_normed: whether the norm is wanted in x's dtype.

    Raises:
        ValueError: Triton's kernels cannot run on these rows.
    """
    if not runs_fused("triton", x, y, weight_D, low):
        weight = None if weight_D is None else weight_D.dtype
        raise ValueError(
            f"add_norm has no kernel for rows {tuple(x.shape)} of {x.dtype} on {x.device.type}, "
            f"added {None if y is None else y.dtype}, a weight of {weight} and copies in {low}: "
            "use add_norm_reference"
        )
    assert len(copies) <= 2, f"{copies}: gradients of two can be added"
    assert copies.count("total") <= 1, f"{copies}: a gradient of one can be added to the total's"
    total, normed, *made = _AddNorm.apply(  # pyright: ignore[reportGeneralTypeIssues]
        x, y, weight_D, bias_D, eps, low, tuple(copies), wants_normed
    )
    return NormedRows(total, normed, tuple(made))


class _AddNorm(torch.autograd.Function):
    """Gives every output a gradient of its own, though several share memory, as no operator may."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        eps: float,
        low: torch.dtype,
        copies: tuple[Copied, ...],
        wants_normed: bool,
    ) -> tuple[Tensor | None, ...]:
        casts = low != x.dtype
        x, y = x.contiguous(), None if y is None else y.contiguous()
        total, normed, low_normed, low_total, *statistics = _add_norm(
            *(x, y, weight_D, bias_D, eps, low),
            wants_normed or (not casts and "normed" in copies),
            casts and "normed" in copies,
            casts and "total" in copies,
        )
        total = x if y is None else total
        ctx.save_for_backward(total, weight_D, *statistics)
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.has_bias = copies, bias_D is not None
        ctx.added = None if y is None else y.dtype
        made = (
            {"normed": low_normed, "total": low_total}
            if casts
            else {"normed": normed, "total": total}
        )
        # detached: the same memory as another tensor, which has a history of its own
        return total.detach(), normed if wants_normed else None, *(made[c].detach() for c in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        none = (None,) * 8
        if all(grad is None for grad in grads):
            return none
        total, weight_D, *statistics = ctx.saved_tensors
        of_total, of_normed, *of_copies = (g if g is None else g.contiguous() for g in grads)
        given = [(c, g) for c, g in zip(ctx.copies, of_copies, strict=True) if g is not None]
        of_norms = [grad for copied, grad in given if copied == "normed"]
        of_totals = [grad for copied, grad in given if copied == "total"]
        first, second, *_ = [*(of_norms or [None]), *of_totals, None]
        d_x, d_y, d_weight, d_bias = _add_norm_backward(
            *(total, weight_D, *statistics, of_total, of_normed, first, second),
            *(len(of_norms) == 2, ctx.added, ctx.has_bias),
        )
        shared = d_x if ctx.added == total.dtype else d_y
        return (
            d_x,
            None if ctx.added is None else shared,
            None if weight_D is None else d_weight,
            d_bias if ctx.has_bias else None,
            *none[4:],
        )


# The operators: both return tensors only, so what is not wanted is empty --------------------------


@torch.library.custom_op(
    "moebius::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? y, Tensor? weight, Tensor? bias, float eps, ScalarType low, "
    "bool normed, bool low_normed, bool low_total) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _add_norm(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the sum (empty without y), its norm, copies of the norm and of the sum, and each
    row's mean and inverse deviation, (T,) float32.
    """
    weight_D, bias_D, eps, *wants = rest
    *outputs, mean, inverse = _new_outputs(x, y, *wants)
    wanted = tuple(map(_wanted_rows, outputs))
    statistics = mean, inverse
    _kernels().add_norm(_rows(x), _rows(y), weight_D, bias_D, eps, wanted, statistics)
    return *outputs, mean, inverse


@_add_norm.register_fake
def _(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _weight_D, _bias_D, _eps, *wants = rest
    return _new_outputs(x, y, *wants)


@torch.library.custom_op(
    "moebius::add_norm_backward",
    mutates_args=(),
    schema="(Tensor total, Tensor? weight, Tensor mean, Tensor inverse, Tensor? of_total, "
    "Tensor? of_normed, Tensor? first, Tensor? second, bool second_is_normed, ScalarType? added, "
    "bool has_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _add_norm_backward(total: Tensor, weight_D: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of x, of y (empty where it is x's), of weight and bias."""
    mean, inverse, *gradients, second_is_normed, added, has_bias = rest
    d_x, d_y, d_weight, d_bias = _new_gradients(total, weight_D, added, has_bias)
    _kernels().add_norm_backward(
        _rows(total),
        weight_D,
        (mean, inverse),
        tuple(map(_rows, gradients)),
        (_rows(d_x), _wanted_rows(d_y)),
        (None if weight_D is None else d_weight, d_bias if has_bias else None),
        second_is_normed=second_is_normed,
    )
    return d_x, d_y, d_weight, d_bias


@_add_norm_backward.register_fake
def _(total: Tensor, weight_D: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, added, has_bias = rest
    return _new_gradients(total, weight_D, added, has_bias)


def _new_outputs(
    x: Tensor, y: Tensor | None, low: torch.dtype, *wanted: bool
) -> tuple[Tensor, ...]:
    normed, low_normed, low_total = wanted
    mean = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return (
        torch.empty_like(x) if y is not None else x.new_empty(0),
        torch.empty_like(x) if normed else x.new_empty(0),
        torch.empty_like(x, dtype=low) if low_normed else x.new_empty(0),
        torch.empty_like(x, dtype=low) if low_total else x.new_empty(0),
        mean,
        torch.empty_like(mean),
    )


def _new_gradients(
    total: Tensor, weight_D: Tensor | None, added: torch.dtype | None, has_bias: bool
) -> tuple[Tensor, ...]:
    own_y = added is not None and added != total.dtype
    dtype = total.dtype if weight_D is None else weight_D.dtype
    return (
        torch.empty_like(total),
        torch.empty_like(total, dtype=added) if own_y else total.new_empty(0),
        total.new_empty(0 if weight_D is None else total.shape[-1], dtype=dtype),
        total.new_empty(total.shape[-1] if has_bias else 0, dtype=dtype),
    )


def _rows(x: Tensor | None) -> Tensor | None:
    """Lays all leading dimensions into one."""
    return None if x is None else x.view(-1, x.shape[-1])


def _wanted_rows(x: Tensor) -> Tensor | None:
    """Lays out the rows of an operator's result; None for the empty vector of an unwanted one."""
    return _rows(x) if x.dim() > 1 else None


def _kernels() -> Any:
    """Imports Triton's kernels, where they are wanted first."""
    return import_module("..triton.norm", __package__)
