"""The expert operations as torch sees them: custom ops with schemas, fake and autograd
registrations, and FLOP formulas.

So meta-device dry runs, torch.compile and torch's FlopCounterMode work, with or without data. Of
each of the two operations there are

    NAME                 the result, and what the backward reads: hidden or ungated rows in
                         sorted order
    NAME_backward        all gradients
    NAME_backward_into   those of the weights are added to the buffers of a pass (gradients.py)
    NAME_backward_rows   those of the weights come later, of all calls of a pass at once (backends
                         that defer)

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .backend import WRITING_BACKENDS, defers, implementation
from .calls import LinearCall, MLPBank, MLPCall, MLPGradients, SortedRoutes
from .gradients import GradientSum, gradient_sum
from .interface import ROW_SLACK

# Arguments of an op are flat: `SortedRoutes(*…)` and `MLPBank(*…)` put them together again.
_BANK = "Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, str activation"
_ROUTES = (
    "Tensor weight, Tensor? order, Tensor? place, Tensor starts, Tensor? source, Tensor? target, "
    "int num_targets, int per_source, int per_target, int per_expert"
)
_NUM_BANK, _NUM_ROUTES = 5, 10
_INDEX = 6  # how many of the routes' are tensors


def _operator(name: str, schema: str, *, mutates: Sequence[str] = ()) -> Any:
    return torch.library.custom_op(f"moebius::{name}", mutates_args=mutates, schema=schema)


# Perceptrons --------------------------------------------------------------------------------------


@_operator(
    "routed_mlp", f"(Tensor x, {_BANK}, {_ROUTES}, str backend, int number) -> (Tensor, Tensor)"
)
def routed_mlp(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns y (num_targets, O), and the saved rows (N + slack, W).

    `number`: of the weights' `GradientSum`, or 0.
    """
    bank, routes, backend, _ = _mlp_records(*rest)
    return implementation(backend).mlp_forward(x, bank, routes)


@routed_mlp.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    bank, routes, *_ = _mlp_records(*rest)
    y = x.new_empty(routes.num_targets, bank.w_down_EFO.shape[2])
    return y, x.new_empty(routes.num_routes + ROW_SLACK, bank.w_up_EDW.shape[2])


@_operator(
    "routed_mlp_backward",
    f"(Tensor grad, Tensor x, {_BANK}, {_ROUTES}, str backend, Tensor saved) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _mlp_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bank, routes, backend, saved = _mlp_records(*rest)
    writes = backend in WRITING_BACKENDS
    new = torch.empty_like if writes else torch.zeros_like
    into = MLPGradients(new(bank.w_up_EDW), new(bank.w_down_EFO), are_new=writes)
    rows = implementation(backend).mlp_backward(grad, x, bank, routes, saved, into)
    return *_without_none(x, rows), into.w_up_EDW, into.w_down_EFO


@_mlp_backward.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bank = _mlp_records(*rest)[0]
    return (
        *_fake_row_gradients(x, *rest),
        torch.empty_like(bank.w_up_EDW),
        torch.empty_like(bank.w_down_EFO),
    )


@_operator(
    "routed_mlp_backward_into",
    f"(Tensor grad, Tensor x, {_BANK}, {_ROUTES}, str backend, Tensor saved, Tensor(a!) into_up, "
    "Tensor(b!) into_down) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    mutates=("into_up", "into_down"),
)
def _mlp_backward_into(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bank, routes, backend, saved = _mlp_records(*rest[:-2])
    into = MLPGradients(*rest[-2:])
    return _without_none(
        x, implementation(backend).mlp_backward(grad, x, bank, routes, saved, into)
    )


@_mlp_backward_into.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_row_gradients(x, *rest[:-2])


@_operator(
    "routed_mlp_backward_rows",
    f"(Tensor grad, Tensor x, {_BANK}, {_ROUTES}, str backend, Tensor saved) -> (Tensor, Tensor, "
    "Tensor, Tensor, Tensor)",
)
def _mlp_backward_rows(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bank, routes, backend, saved = _mlp_records(*rest)
    *rows, d_z = implementation(backend).mlp_backward_rows(grad, x, bank, routes, saved)
    return *_without_none(x, rows), d_z


@_mlp_backward_rows.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_row_gradients(x, *rest), torch.empty_like(rest[-1])


def _mlp_records(*rest: Any) -> tuple[MLPBank, SortedRoutes, str, Any]:
    """Puts flat arguments together: bank, routes, backend, and what comes last."""
    routes = SortedRoutes(*rest[_NUM_BANK : _NUM_BANK + _NUM_ROUTES])
    backend, last = rest[_NUM_BANK + _NUM_ROUTES :]
    return MLPBank(*rest[:_NUM_BANK]), routes, backend, last


def _without_none(x: Tensor, rows: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Replaces None, a bias that there is not, by an empty tensor: an op returns tensors."""
    return tuple(x.new_empty(0) if value is None else value for value in rows)


def _fake_row_gradients(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bank, routes, *_ = _mlp_records(*rest)
    biases = (
        x.new_empty(0) if bias is None else torch.empty_like(bias)
        for bias in (bank.b_up_EW, bank.b_down_EO)
    )
    return torch.empty_like(x), torch.empty_like(routes.weight_N), *biases


def _mlp_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, *rest, ctx.backend, ctx.number = inputs
    bank, routes = rest[:_NUM_BANK], rest[_NUM_BANK:]
    ctx.activation, ctx.numbers = bank.pop(), routes[_INDEX:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable
    ctx.save_for_backward(x, *bank, *routes[:_INDEX], output[1])


def _mlp_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    none = (None,) * (1 + _NUM_BANK + _NUM_ROUTES + 2)
    if grad is None:
        return none
    x, *tensors, saved = ctx.saved_tensors
    weights, routes = tensors[: _NUM_BANK - 1], (*tensors[_NUM_BANK - 1 :], *ctx.numbers)
    grad, total, grad_banks = grad.contiguous(), gradient_sum(ctx.number), (None, None)
    arguments = (grad, x, *weights, ctx.activation, *routes, ctx.backend, saved)
    if total is None:
        grad_x, gate, b_up, b_down, *grad_banks = _mlp_backward(*arguments)
    elif _defers(total, ctx.backend):
        grad_x, gate, b_up, b_down, d_z = _mlp_backward_rows(*arguments)
        bank = MLPBank(*weights, activation=ctx.activation)
        call = MLPCall(grad, x, SortedRoutes(*routes), saved, d_z, bank)
        total.defer_call(call, implementation(ctx.backend).mlp_weight_gradients)
    else:
        grad_x, gate, b_up, b_down = _mlp_backward_into(*arguments, *total.buffers())
    biases = (
        None if bias is None else found
        for bias, found in zip(weights[2:], (b_up, b_down), strict=True)
    )
    return grad_x, *grad_banks, *biases, None, gate, *none[_NUM_BANK + 2 :]


routed_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_context)


# Matrices -----------------------------------------------------------------------------------------


@_operator(
    "routed_linear", f"(Tensor x, Tensor w, {_ROUTES}, str backend, int number) -> (Tensor, Tensor)"
)
def routed_linear(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns y (num_targets, O), and the outputs before their gates if these are the narrow side.

    Else the second result is empty.
    """
    *routes, backend, _ = rest
    return implementation(backend).linear_forward(x, w, SortedRoutes(*routes))


@routed_linear.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    routes = SortedRoutes(*rest[:_NUM_ROUTES])
    saved = (routes.num_routes + ROW_SLACK, w.shape[2]) if w.shape[2] <= w.shape[1] else (0,)
    return x.new_empty(routes.num_targets, w.shape[2]), x.new_empty(saved)


@_operator(
    "routed_linear_backward",
    f"(Tensor grad, Tensor x, Tensor w, {_ROUTES}, str backend, Tensor saved) -> (Tensor, Tensor, "
    "Tensor)",
)
def _linear_backward(grad: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *routes, backend, saved = rest
    into = torch.zeros_like(w)
    return *implementation(backend).linear_backward(
        grad, x, w, SortedRoutes(*routes), saved, into
    ), into


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, weight: Tensor, *_unused: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(w)


@_operator(
    "routed_linear_backward_into",
    f"(Tensor grad, Tensor x, Tensor w, {_ROUTES}, str backend, Tensor saved, Tensor(a!) into) -> "
    "(Tensor, Tensor)",
    mutates=("into",),
)
def _linear_backward_into(grad: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *routes, backend, saved, into = rest
    return implementation(backend).linear_backward(grad, x, w, SortedRoutes(*routes), saved, into)


@_operator(
    "routed_linear_backward_rows",
    f"(Tensor grad, Tensor x, Tensor w, {_ROUTES}, str backend, Tensor saved) -> (Tensor, Tensor)",
)
def _linear_backward_rows(grad: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *routes, backend, saved = rest
    return implementation(backend).linear_backward_rows(grad, x, w, SortedRoutes(*routes), saved)


@_linear_backward_into.register_fake
@_linear_backward_rows.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, weight: Tensor, *_unused: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight)


def _linear_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w, *routes, ctx.backend, ctx.number = inputs
    ctx.numbers = routes[_INDEX:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, *routes[:_INDEX], output[1])


def _linear_gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    none = (None,) * (2 + _NUM_ROUTES + 2)
    if grad is None:
        return none
    x, w, *index, saved = ctx.saved_tensors
    grad, total, grad_w = grad.contiguous(), gradient_sum(ctx.number), None
    routes = (*index, *ctx.numbers)
    arguments = (grad, x, w, *routes, ctx.backend, saved)
    if total is None:
        grad_x, gate, grad_w = _linear_backward(*arguments)
    elif _defers(total, ctx.backend):
        grad_x, gate = _linear_backward_rows(*arguments)
        call = LinearCall(grad, x, SortedRoutes(*routes), w)
        total.defer_call(call, implementation(ctx.backend).linear_weight_gradients)
    else:
        grad_x, gate = _linear_backward_into(*arguments, *total.buffers())
    return grad_x, grad_w, gate, *none[3:]


routed_linear.register_autograd(_linear_gradients, setup_context=_linear_context)


def _defers(total: GradientSum, backend: str) -> bool:
    return total.defer and defers(backend)


# FLOPs: of the products alone, two per multiply-accumulate, as torch counts its own. Arguments are
# shapes. What is deferred is counted with its call.


@register_flop_formula(torch.ops.moebius.routed_mlp)
def _(
    x: Any,
    w_up: Any,
    w_down: Any,
    b_up: Any,
    b_down: Any,
    activation: str,
    weight: Any,
    *_: Any,
    **_kw: Any,
) -> int:
    return 2 * weight[0] * (w_up[1] * w_up[2] + w_down[1] * w_down[2])


@register_flop_formula(
    [getattr(torch.ops.moebius, f"routed_mlp_backward{end}") for end in ("", "_into", "_rows")]
)
def _(
    grad: Any,
    x: Any,
    w_up: Any,
    w_down: Any,
    b_up: Any,
    b_down: Any,
    act: str,
    weight: Any,
    *_: Any,
    **_kw: Any,
) -> int:
    return 4 * weight[0] * (w_up[1] * w_up[2] + w_down[1] * w_down[2])


@register_flop_formula(torch.ops.moebius.routed_linear)
def _(x: Any, w: Any, weight: Any, *_: Any, **_kw: Any) -> int:
    return 2 * weight[0] * w[1] * w[2]


@register_flop_formula(
    [getattr(torch.ops.moebius, f"routed_linear_backward{end}") for end in ("", "_into", "_rows")]
)
def _(grad: Any, x: Any, w: Any, weight: Any, *_: Any, **_kw: Any) -> int:
    return 4 * weight[0] * w[1] * w[2]
