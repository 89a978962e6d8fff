"""Residual addition, norm and casts in one operation: s = x + y, n = norm(s), and low-precision copies.

Between two of its maps a layer only moves memory. In MoEUT the addition, the norm and the experts'
cast read the residual stream; the router and the cast for queries and keys read its norm; the
backward adds all their gradients. `add_norm` reads the rows once forward and once backward in Triton
(triton/norm.py); `add_norm_reference` defines it.

Each low-precision copy has its own gradient. These arrive separately in low precision and are added
in float32, exactly as if every reader had made its own cast.

Legend: D columns; rows have any number of leading dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import runs_triton
from ..custom_op import custom_op
from ..gradients import gradient_sum, shared_weights
from ..triton.available import kernels

WIDEST = 8192  # columns: wider rows do not fit the registers of the backward pass
Copied = Literal["normed", "total"]


@dataclass(frozen=True)
class NormedRows:
    """The result of `add_norm`; every tensor has the shape of x."""

    total: Tensor  # x + y, in x's dtype; x if there is no y
    normed: Tensor | None  # its norm, in x's dtype; None if not requested
    copies: tuple[Tensor, ...]  # the requested ones, in low precision


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
    """Defines `add_norm` in plain operations under autograd."""
    total = x if y is None else x + y
    normed = F.layer_norm(total, total.shape[-1:], weight_D, bias_D, eps)
    found = {"total": total, "normed": normed}
    made = tuple(found[name].to(low) for name in copies)
    return NormedRows(total, normed if wants_normed else None, made)


def runs_fused(
    backend: str, x: Tensor, y: Tensor | None, weight_D: Tensor | None, low: torch.dtype
) -> bool:
    """Returns whether `add_norm` supports these rows; `backend` is the expert layers' name or "auto"."""
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
    """Returns x + y, its layer norm, and low-precision copies of them, computed by Triton kernels.

    Values equal `add_norm_reference` within float32 rounding. Gradients are the same sums in another
    order, rounded once to x's and y's dtypes. Both are the same bits in every run.

    Args:
        x: (…, D), float32 or bfloat16: the residual stream.
        y: (…, D), added to x; None adds nothing.
        weight_D, bias_D: of x's dtype; None means 1 and 0. A bias requires a weight.
        eps: added to the variance.
        low: dtype of the copies. If it is x's dtype, they share memory with the total or the norm.
        copies: at most two, of the norm or the total; at most one of the total. Each has its own
            gradient, though two copies of the norm share memory.
        wants_normed: whether to return the norm in x's dtype.

    Raises:
        ValueError: the Triton kernels do not support these rows.
    """
    if not runs_fused("triton", x, y, weight_D, low):
        weight = None if weight_D is None else weight_D.dtype
        raise ValueError(
            f"add_norm has no kernel for rows {tuple(x.shape)} of {x.dtype} on {x.device.type}, "
            f"y of {None if y is None else y.dtype}, a weight of {weight} and copies in {low}: "
            "use add_norm_reference"
        )
    assert len(copies) <= 2, f"{copies}: the kernel adds gradients of two copies at most"
    assert copies.count("total") <= 1, (
        f"{copies}: the kernel adds the gradient of one total at most"
    )
    given, number = tuple(each for each in (weight_D, bias_D) if each is not None), 0
    if given:
        given, number = shared_weights(*given, defer=True)
    weight_D, bias_D, *_ = *given, None, None
    casts, copies_norm = low != x.dtype, "normed" in copies
    wants = (
        wants_normed or (copies_norm and not casts),
        copies_norm and casts,
        "total" in copies and casts,
    )
    total, normed, *made = _AddNorm.apply(  # pyright: ignore[reportGeneralTypeIssues]
        x, y, weight_D, bias_D, eps, low, tuple(copies), wants, number
    )
    return NormedRows(total, normed if wants_normed else None, tuple(made))


class _AddNorm(torch.autograd.Function):
    """Gives every output its own gradient although some share memory, which custom ops forbid."""

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
        wants: tuple[bool, bool, bool],  # the norm, a low-precision copy of it, and of the total
        number: int,
    ) -> tuple[Tensor, ...]:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        total, normed, low_normed, low_total, *statistics = _add_norm(
            x, y, weight_D, bias_D, eps, low, *wants
        )
        total = x if y is None else total
        ctx.save_for_backward(total, weight_D, *statistics)
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.has_bias, ctx.number = copies, bias_D is not None, number
        ctx.added = None if y is None else y.dtype
        made = (
            {"normed": low_normed, "total": low_total}
            if low != x.dtype
            else {"normed": normed, "total": total}
        )
        # detached: it shares memory with a tensor that has its own history
        return total.detach(), normed, *(made[c].detach() for c in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        none = (None,) * 9
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
        found = (
            None if weight_D is None else d_weight,
            d_bias if ctx.has_bias else None,
        )
        if (calls := gradient_sum(ctx.number)) is not None:
            calls.defer_call([each for each in found if each is not None], _sum_calls)
            found = None, None
        return d_x, None if ctx.added is None else shared, *found, *none[4:]


def _sum_calls(calls: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Adds up the gradients of weight and bias over all calls of a pass."""
    return tuple(torch.stack(gradients).sum(0) for gradients in zip(*calls, strict=True))


# Operators: they return tensors only, so an omitted output is an empty tensor ---------------------


@custom_op(
    "moebius::add_norm",
    schema="(Tensor x, Tensor? y, Tensor? weight, Tensor? bias, float eps, ScalarType low, "
    "bool normed, bool low_normed, bool low_total) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _add_norm(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the sum, its norm, copies of norm and sum, and each row's mean and inverse deviation (T,)."""
    weight_D, bias_D, eps, *wants = rest
    *outputs, mean, inverse = _new_outputs(x, y, *wants)
    wanted = tuple(map(_wanted_rows, outputs))
    statistics = mean, inverse
    kernels("norm").add_norm(_rows(x), _rows(y), weight_D, bias_D, eps, wanted, statistics)
    return *outputs, mean, inverse


@_add_norm.register_fake
def _(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _weight_D, _bias_D, _eps, *wants = rest
    return _new_outputs(x, y, *wants)


@custom_op(
    "moebius::add_norm_backward",
    schema="(Tensor total, Tensor? weight, Tensor mean, Tensor inverse, Tensor? of_total, "
    "Tensor? of_normed, Tensor? first, Tensor? second, bool second_is_normed, ScalarType? added, "
    "bool has_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _add_norm_backward(total: Tensor, weight_D: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of x, y (empty if equal to x's), weight and bias."""
    mean, inverse, *gradients, second_is_normed, added, has_bias = rest
    d_x, d_y, d_weight, d_bias = _new_gradients(total, weight_D, added, has_bias)
    kernels("norm").add_norm_backward(
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
    """Flattens all leading dimensions into one."""
    return None if x is None else x.view(-1, x.shape[-1])


def _wanted_rows(x: Tensor) -> Tensor | None:
    """Flattens an operator's result into rows; None for the empty tensor of an omitted one."""
    return _rows(x) if x.dim() > 1 else None
