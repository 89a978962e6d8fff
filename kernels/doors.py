"""The two doors through which every expert computation goes: `routed_mlp` and `routed_linear`.

The `reference` backend is plain PyTorch under autograd. The fast ones stand behind one op per door: gather, matrix products,
activation, gate weight and scatter-add together, with one backward, so that a backend may fuse them and save as little as it
can. Each op is a `torch.library.custom_op` with fake and autograd registrations: meta-device dry runs and torch.compile see it
as one opaque step.

Legend: U source rows, N routes, E experts, D input width, F hidden width, O output width.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from . import reference, segments
from .backend import resolve_backend


class RouteList(Protocol):
    """What a door reads of a list of routes (the model's `Routes` is one)."""

    @property
    def source_N(self) -> Tensor: ...
    @property
    def expert_N(self) -> Tensor: ...
    @property
    def weight_N(self) -> Tensor: ...
    @property
    def target_N(self) -> Tensor: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def per_source(self) -> int: ...
    @property
    def per_target(self) -> int: ...


def routed_mlp(
    x_UD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFO: Tensor,
    routes: RouteList,
    *,
    activation: str = "relu",
    backend: str = "auto",
) -> Tensor:
    """y[target] += weight · W_down[expert]ᵀ relu(W_up[expert]ᵀ x[source]) over all routes.

    Args:
        x_UD: source rows, cast to the weights' dtype.
        w_up_EDF, w_down_EFO: one two-layer perceptron per expert, without biases.
        routes: indices in range (experts 0 … E−1); weights float32, differentiable.

    Returns:
        (num_targets, O) in the weights' dtype. A target without a route is zero.

    Raises:
        ValueError: an unknown activation or backend.
    """
    if activation != "relu":
        raise ValueError(f"activation={activation!r} is unknown: experts have relu")
    x_UD = x_UD.to(w_up_EDF.dtype)
    indices = (routes.source_N, routes.expert_N, routes.weight_N, routes.target_N, routes.num_targets)
    if resolve_backend(backend) == "reference":
        return reference.routed_mlp(x_UD, w_up_EDF, w_down_EFO, *indices)
    y_TO, _, _ = _routed_mlp(x_UD, w_up_EDF, w_down_EFO, *indices, routes.per_source, routes.per_target)
    return y_TO


def routed_linear(x_UD: Tensor, w_EDO: Tensor, routes: RouteList, *, backend: str = "auto") -> Tensor:
    """y[target] += weight · W[expert]ᵀ x[source] over all routes; arguments and result as in `routed_mlp`."""
    x_UD = x_UD.to(w_EDO.dtype)
    indices = (routes.source_N, routes.expert_N, routes.weight_N, routes.target_N, routes.num_targets)
    if resolve_backend(backend) == "reference":
        return reference.routed_linear(x_UD, w_EDO, *indices)
    y_TO, _, _ = _routed_linear(x_UD, w_EDO, *indices, routes.per_source, routes.per_target)
    return y_TO


# The ops return, beside the result, what their backward needs: hidden or ungated rows in sorted order, and that order.


@torch.library.custom_op("moebius::routed_mlp", mutates_args=())
def _routed_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return segments.mlp_forward(x, w_up, w_down, source, expert, weight, target, num_targets, per_target)


@_routed_mlp.register_fake
def _(x, w_up, w_down, source, expert, weight, target, num_targets, per_source, per_target):
    y = x.new_empty(num_targets, w_down.shape[2])
    return y, x.new_empty(expert.shape[0] + segments.ROW_SLACK, w_up.shape[2]), expert.new_empty(expert.shape[0])


@torch.library.custom_op("moebius::routed_mlp_backward", mutates_args=())
def _routed_mlp_backward(
    grad: Tensor, x: Tensor, w_up: Tensor, w_down: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    hidden: Tensor, order: Tensor, per_source: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return segments.mlp_backward(grad, x, w_up, w_down, source, expert, weight, target, hidden, order, per_source)


@_routed_mlp_backward.register_fake
def _(grad, x, w_up, w_down, source, expert, weight, target, hidden, order, per_source):
    return torch.empty_like(x), torch.empty_like(w_up), torch.empty_like(w_down), torch.empty_like(weight)


def _mlp_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w_up, w_down, source, expert, weight, target, _, ctx.per_source, _ = inputs
    _, hidden, order = output
    ctx.mark_non_differentiable(hidden, order)
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable
    ctx.save_for_backward(x, w_up, w_down, source, expert, weight, target, hidden, order)


def _mlp_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    if grad is None:
        return (None,) * 10
    grad_x, grad_up, grad_down, grad_weight = _routed_mlp_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.per_source
    )
    return grad_x, grad_up, grad_down, None, None, grad_weight, None, None, None, None


_routed_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_context)


@torch.library.custom_op("moebius::routed_linear", mutates_args=())
def _routed_linear(
    x: Tensor, w: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    num_targets: int, per_source: int, per_target: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return segments.linear_forward(x, w, source, expert, weight, target, num_targets, per_target)


@_routed_linear.register_fake
def _(x, w, source, expert, weight, target, num_targets, per_source, per_target):
    y = x.new_empty(num_targets, w.shape[2])
    kept = (expert.shape[0] + segments.ROW_SLACK, w.shape[2]) if w.shape[2] <= w.shape[1] else (0,)
    return y, x.new_empty(kept), expert.new_empty(expert.shape[0])


@torch.library.custom_op("moebius::routed_linear_backward", mutates_args=())
def _routed_linear_backward(
    grad: Tensor, x: Tensor, w: Tensor, source: Tensor, expert: Tensor, weight: Tensor, target: Tensor,
    answers: Tensor, order: Tensor, per_source: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return segments.linear_backward(grad, x, w, source, expert, weight, target, answers, order, per_source)


@_routed_linear_backward.register_fake
def _(grad, x, w, source, expert, weight, target, answers, order, per_source):
    return torch.empty_like(x), torch.empty_like(w), torch.empty_like(weight)


def _linear_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w, source, expert, weight, target, _, ctx.per_source, _ = inputs
    _, answers, order = output
    ctx.mark_non_differentiable(answers, order)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, source, expert, weight, target, answers, order)


def _linear_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    if grad is None:
        return (None,) * 9
    grad_x, grad_w, grad_weight = _routed_linear_backward(grad.contiguous(), *ctx.saved_tensors, ctx.per_source)
    return grad_x, grad_w, None, None, grad_weight, None, None, None, None


_routed_linear.register_autograd(_linear_gradients, setup_context=_linear_context)
