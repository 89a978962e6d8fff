"""The two doors through which every expert computation goes: `routed_mlp` and `routed_linear`.

The `reference` backend is plain PyTorch under autograd. The fast ones stand behind one op per door: gather, matrix products,
activation, gate weight and scatter-add together, with one backward, so that a backend may fuse them and save as little as it
can. Each op is a `torch.library.custom_op` with fake and autograd registrations: meta-device dry runs and torch.compile see it
as one opaque step; and with a FLOP formula, so torch's FlopCounterMode counts its products, with or without data.

Legend: U source rows, N routes, E experts, D input width, F hidden width, O output width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import reference, segments
from .backend import resolve_backend
from .operands import FlatRoutes, MLPBank, RouteList, check_counts


def routed_mlp(
    x_UD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFO: Tensor,
    routes: RouteList,
    *,
    activation: str = "relu",
    b_up_EF: Tensor | None = None,
    b_down_EO: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y[target] += weight · (W_down[expert]ᵀ a(W_up[expert]ᵀ x[source] + b_up[expert]) + b_down[expert]) over all routes.

    Args:
        x_UD: source rows, cast to the weights' dtype, as the biases are.
        w_up_EDF, w_down_EFO: one two-layer perceptron per expert.
        routes: indices in range (experts 0 … E−1); weights float32, differentiable. Where `per_expert` is positive nothing is
            sorted and no count is read from the device.
        activation: a. "relu", "gelu" (with erf), "silu"; or gated, "swiglu" (silu) and "geglu" (gelu): `w_up` and `b_up` then
            have 2F columns, and the hidden row is a(first half) · second half.
        b_up_EF, b_down_EO: biases, each only if wanted.

    Returns:
        (num_targets, O) in the weights' dtype. A target without a route is zero.

    Raises:
        ValueError: an unknown activation or backend; shapes that do not fit; a `per_expert` that does not.
    """
    dtype = w_up_EDF.dtype
    x_UD = x_UD.to(dtype)
    b_up_EF, b_down_EO = (None if bias is None else bias.to(dtype) for bias in (b_up_EF, b_down_EO))
    bank = MLPBank(w_up_EDF, w_down_EFO, b_up_EF, b_down_EO, activation)
    bank.check()
    check_counts(routes, w_up_EDF.shape[0])
    if resolve_backend(backend) == "reference":
        return reference.routed_mlp(x_UD, bank, routes)
    y_TO, _, _ = _routed_mlp(x_UD, w_up_EDF, w_down_EFO, b_up_EF, b_down_EO, activation, *_flat(routes))
    return y_TO


def routed_linear(x_UD: Tensor, w_EDO: Tensor, routes: RouteList, *, backend: str = "auto") -> Tensor:
    """y[target] += weight · W[expert]ᵀ x[source] over all routes; arguments, result and errors as in `routed_mlp`."""
    x_UD = x_UD.to(w_EDO.dtype)
    check_counts(routes, w_EDO.shape[0])
    if resolve_backend(backend) == "reference":
        return reference.routed_linear(x_UD, w_EDO, routes)
    y_TO, _, _ = _routed_linear(x_UD, w_EDO, *_flat(routes))
    return y_TO


def _flat(routes: RouteList) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, int]:
    """An op takes tensors and numbers, no records; `FlatRoutes(*…)` is the way back."""
    return (
        routes.source_N, routes.expert_N, routes.weight_N, routes.target_N,
        routes.num_targets, routes.per_source, routes.per_target, routes.per_expert,
    )  # fmt: skip


# The ops return, beside the result, what their backward needs: hidden or ungated rows in sorted order, and that order
# (empty where the routes stand in it already).


@torch.library.custom_op("moebius::routed_mlp", mutates_args=())
def _routed_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str,
    source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int, per_expert: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    routes = FlatRoutes(source, expert, weight, target, num_targets, per_source, per_target, per_expert)
    y, kept, order = segments.mlp_forward(x, MLPBank(w_up, w_down, b_up, b_down, activation), routes)
    return y, kept, expert.new_empty(0) if order is None else order


@_routed_mlp.register_fake
def _(x, w_up, w_down, b_up, b_down, activation, source, expert, weight, target, num_targets, _s, _t, per_expert):
    kept = x.new_empty(expert.shape[0] + segments.ROW_SLACK, w_up.shape[2])
    return x.new_empty(num_targets, w_down.shape[2]), kept, _fake_order(expert, per_expert)


@torch.library.custom_op("moebius::routed_mlp_backward", mutates_args=())
def _routed_mlp_backward(
    grad: Tensor, x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str,
    source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int, per_expert: int, kept: Tensor, order: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    routes = FlatRoutes(source, expert, weight, target, num_targets, per_source, per_target, per_expert)
    bank = MLPBank(w_up, w_down, b_up, b_down, activation)
    grads = segments.mlp_backward(grad, x, bank, routes, kept, None if per_expert else order)
    b_up, b_down = (x.new_empty(0) if bias is None else bias for bias in (grads.b_up_EW, grads.b_down_EO))
    return grads.x_UD, grads.w_up_EDW, grads.w_down_EFO, b_up, b_down, grads.weight_N


@_routed_mlp_backward.register_fake
def _(grad, x, w_up, w_down, b_up, b_down, activation, source, expert, weight, *_unused):
    biases = (x.new_empty(0) if bias is None else torch.empty_like(bias) for bias in (b_up, b_down))
    return torch.empty_like(x), torch.empty_like(w_up), torch.empty_like(w_down), *biases, torch.empty_like(weight)


def _mlp_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w_up, w_down, b_up, b_down, ctx.activation, source, expert, weight, target, *ctx.numbers = inputs
    _, kept, order = output
    ctx.mark_non_differentiable(kept, order)
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable
    ctx.save_for_backward(x, w_up, w_down, b_up, b_down, source, expert, weight, target, kept, order)


def _mlp_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    if grad is None:
        return (None,) * 14
    *bank, source, expert, weight, target, kept, order = ctx.saved_tensors
    x, w_up, w_down, b_up, b_down, gate = _routed_mlp_backward(
        grad.contiguous(), *bank, ctx.activation, source, expert, weight, target, *ctx.numbers, kept, order
    )
    biases = (None if bias is None else bias_grad for bias, bias_grad in zip(bank[3:], (b_up, b_down), strict=True))
    return x, w_up, w_down, *biases, None, None, None, gate, *(None,) * 5


_routed_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_context)


@torch.library.custom_op("moebius::routed_linear", mutates_args=())
def _routed_linear(
    x: Tensor, w: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int, per_expert: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    routes = FlatRoutes(source, expert, weight, target, num_targets, per_source, per_target, per_expert)
    y, answers, order = segments.linear_forward(x, w, routes)
    return y, answers, expert.new_empty(0) if order is None else order


@_routed_linear.register_fake
def _(x, w, source, expert, weight, target, num_targets, per_source, per_target, per_expert):
    kept = (expert.shape[0] + segments.ROW_SLACK, w.shape[2]) if w.shape[2] <= w.shape[1] else (0,)
    return x.new_empty(num_targets, w.shape[2]), x.new_empty(kept), _fake_order(expert, per_expert)


@torch.library.custom_op("moebius::routed_linear_backward", mutates_args=())
def _routed_linear_backward(
    grad: Tensor, x: Tensor, w: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int, per_expert: int, answers: Tensor, order: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    routes = FlatRoutes(source, expert, weight, target, num_targets, per_source, per_target, per_expert)
    return segments.linear_backward(grad, x, w, routes, answers, None if per_expert else order)


@_routed_linear_backward.register_fake
def _(grad, x, w, source, expert, weight, *_unused):
    return torch.empty_like(x), torch.empty_like(w), torch.empty_like(weight)


def _linear_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.num_targets, ctx.per_source, ctx.per_target, ctx.per_expert = inputs
    _, answers, order = output
    ctx.mark_non_differentiable(answers, order)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, answers, order)


def _linear_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    if grad is None:
        return (None,) * 10
    *tensors, answers, order = ctx.saved_tensors
    numbers = (ctx.num_targets, ctx.per_source, ctx.per_target, ctx.per_expert)
    grad_x, grad_w, grad_weight = _routed_linear_backward(grad.contiguous(), *tensors, *numbers, answers, order)
    return grad_x, grad_w, None, None, grad_weight, *(None,) * 5


_routed_linear.register_autograd(_linear_gradients, setup_context=_linear_context)


def _fake_order(expert: Tensor, per_expert: int) -> Tensor:
    return expert.new_empty(0 if per_expert else expert.shape[0])


# FLOPs: of the products alone, two per multiply-accumulate, as torch counts its own. Arguments are shapes.


@register_flop_formula(torch.ops.moebius.routed_mlp)
def _(x, w_up, w_down, b_up, b_down, activation, source, expert, *_unused, **_kwargs) -> int:
    return 2 * expert[0] * (w_up[1] * w_up[2] + w_down[1] * w_down[2])


@register_flop_formula(torch.ops.moebius.routed_mlp_backward)
def _(grad, x, w_up, w_down, b_up, b_down, activation, source, expert, *_unused, **_kwargs) -> int:
    return 4 * expert[0] * (w_up[1] * w_up[2] + w_down[1] * w_down[2])


@register_flop_formula(torch.ops.moebius.routed_linear)
def _(x, w, source, expert, *_unused, **_kwargs) -> int:
    return 2 * expert[0] * w[1] * w[2]


@register_flop_formula(torch.ops.moebius.routed_linear_backward)
def _(grad, x, w, source, expert, *_unused, **_kwargs) -> int:
    return 4 * expert[0] * w[1] * w[2]
