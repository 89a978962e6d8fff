"""The expert operations as torch sees them: custom ops with schemas, fake and autograd
registrations, and FLOP formulas.

So meta-device dry runs, torch.compile and torch's FlopCounterMode work, with or without data. The
arguments of an op are the fields of its call's record, in their order, and are put together again at
once (`MLPCall(*call)`). Of each of the two operations there are

    NAME                 the result, and what the backward reads: hidden or ungated rows in
                         sorted order
    NAME_backward        all gradients; those of the weights are added to buffers, new ones or those
                         of a pass (gradients.py)
    NAME_backward_rows   those of the weights come later, of all calls of a pass at once (backends
                         that defer)

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .backend import implementation
from .calls import (
    ROW_SLACK,
    DeferredLinear,
    DeferredMLP,
    DeferringBackend,
    LinearCall,
    MLPCall,
    MLPGradients,
    RowGradients,
    SortedRoutes,
)
from .gradients import GradientSum, gradient_sum

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", str: "str"}


def _operator(
    name: str,
    record: type[SortedRoutes],
    num_results: int,
    *,
    before: str = "",
    mutates: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Makes an op of a record's fields, and of the arguments that come before them."""
    given = [f"{_SCHEMA_TYPES[field.type]} {field.name}" for field in fields(record)]
    schema = f"({before}{', '.join(given)}) -> ({', '.join(['Tensor'] * num_results)})"
    return torch.library.custom_op(f"moebius::{name}", mutates_args=mutates, schema=schema)


def _or_empty(like: Tensor, value: Tensor | None) -> Tensor:
    """Replaces None, a bias that there is not, by an empty tensor: an op returns tensors."""
    return like.new_empty(0) if value is None else value


def _keep(ctx: Any, call: MLPCall | LinearCall, saved: Tensor) -> None:
    """Keeps a call and its saved rows for the backward pass."""
    values = vars(call)
    ctx.record = type(call)
    ctx.names = [name for name, value in values.items() if isinstance(value, Tensor)]
    ctx.others = {name: value for name, value in values.items() if name not in ctx.names}
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)  # no zeros for what is not differentiable
    ctx.save_for_backward(*(values[name] for name in ctx.names), saved)


def _kept(ctx: Any) -> tuple[Any, Tensor]:
    *tensors, saved = ctx.saved_tensors
    return ctx.record(**dict(zip(ctx.names, tensors, strict=True)), **ctx.others), saved


def _in_order(record: type[SortedRoutes], gradients: dict[str, Tensor | None]) -> tuple:
    """Lists gradients as autograd wants them: one for each argument, None where there is none."""
    return tuple(gradients.get(field.name) for field in fields(record))


# Perceptrons --------------------------------------------------------------------------------------

_GRAD = "Tensor grad_TO, Tensor saved, "


@_operator("routed_mlp", MLPCall, 2)
def routed_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns y (num_targets, O), and the saved rows (N + ROW_SLACK, W)."""
    call = MLPCall(*arguments)
    return implementation(call.backend).mlp_forward(call)


@routed_mlp.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = MLPCall(*arguments)
    y_TO = call.x_UD.new_empty(call.num_targets, call.w_down_EFO.shape[2])
    return y_TO, call.x_UD.new_empty(call.num_routes + ROW_SLACK, call.w_up_EDW.shape[2])


@_operator(
    "routed_mlp_backward",
    MLPCall,
    4,
    before=_GRAD + "Tensor(a!) into_up, Tensor(b!) into_down, bool are_new, ",
    mutates=("into_up", "into_down"),
)
def _mlp_backward(
    grad_TO: Tensor,
    saved: Tensor,
    into_up: Tensor,
    into_down: Tensor,
    are_new: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, into = MLPCall(*arguments), MLPGradients(into_up, into_down, are_new)
    return _mlp_results(call, implementation(call.backend).mlp_backward(call, grad_TO, saved, into))


@_operator("routed_mlp_backward_rows", MLPCall, 5, before=_GRAD)
def _mlp_backward_rows(grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = MLPCall(*arguments)
    found = _deferring(call.backend).mlp_backward_rows(call, grad_TO, saved)
    return *_mlp_results(call, found), _or_empty(saved, found.z_NW)


def _mlp_results(call: MLPCall, found: RowGradients) -> tuple[Tensor, ...]:
    biases = found.b_up_EW, found.b_down_EO
    return found.x_UD, found.weight_N, *(_or_empty(call.x_UD, bias) for bias in biases)


def _fake_rows(call: MLPCall) -> tuple[Tensor, ...]:
    given = call.x_UD, call.weight_N, call.b_up_EW, call.b_down_EO
    return tuple(torch.empty_like(_or_empty(call.x_UD, value)) for value in given)


@_mlp_backward.register_fake
def _(
    grad_TO: Tensor,
    saved: Tensor,
    into_up: Tensor,
    into_down: Tensor,
    are_new: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    return _fake_rows(MLPCall(*arguments))


@_mlp_backward_rows.register_fake
def _(grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return *_fake_rows(MLPCall(*arguments)), torch.empty_like(saved)


def _mlp_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _keep(ctx, MLPCall(*inputs), output[1])


def _mlp_gradients(ctx: Any, grad_TO: Tensor | None, *_saved: Tensor) -> tuple:
    if grad_TO is None:
        return _in_order(MLPCall, {})
    call, saved = _kept(ctx)
    given = {"grad_TO": grad_TO.contiguous(), "saved": saved, **vars(call)}
    total, weights = gradient_sum(call.number), (None, None)
    if total is not None and total.defer and _defers(call.backend):
        x, gate, b_up, b_down, z_NW = _mlp_backward_rows(**given)
        deferred = DeferredMLP(call, given["grad_TO"], saved, z_NW)
        total.defer_call(deferred, _deferring(call.backend).mlp_weight_gradients)
    else:
        are_new = total is None and implementation(call.backend).writes
        into = _buffers(total, call.w_up_EDW, call.w_down_EFO, zeros=not are_new)
        weights = into if total is None else weights
        x, gate, b_up, b_down = _mlp_backward(
            into_up=into[0], into_down=into[1], are_new=are_new, **given
        )
    found = {"x_UD": x, "weight_N": gate}
    found |= dict(zip(("w_up_EDW", "w_down_EFO"), weights, strict=True))
    found["b_up_EW"] = None if call.b_up_EW is None else b_up
    found["b_down_EO"] = None if call.b_down_EO is None else b_down
    return _in_order(MLPCall, found)


routed_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_context)


# Matrices -----------------------------------------------------------------------------------------


@_operator("routed_linear", LinearCall, 2)
def routed_linear(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns y (num_targets, O), and the outputs before their gates if these are the narrow side.

    Else the second result is empty.
    """
    call = LinearCall(*arguments)
    return implementation(call.backend).linear_forward(call)


@routed_linear.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = LinearCall(*arguments)
    _, width_in, width_out = call.w_EDO.shape
    saved = (call.num_routes + ROW_SLACK, width_out) if width_out <= width_in else (0,)
    return call.x_UD.new_empty(call.num_targets, width_out), call.x_UD.new_empty(saved)


@_operator(
    "routed_linear_backward",
    LinearCall,
    2,
    before=_GRAD + "Tensor(a!) into_EDO, ",
    mutates=("into_EDO",),
)
def _linear_backward(
    grad_TO: Tensor, saved: Tensor, into_EDO: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    found = implementation(call.backend).linear_backward(call, grad_TO, saved, into_EDO)
    return found.x_UD, found.weight_N


@_operator("routed_linear_backward_rows", LinearCall, 2, before=_GRAD)
def _linear_backward_rows(grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    found = _deferring(call.backend).linear_backward_rows(call, grad_TO, saved)
    return found.x_UD, found.weight_N


@_linear_backward.register_fake
def _(grad_TO: Tensor, saved: Tensor, into_EDO: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    return torch.empty_like(call.x_UD), torch.empty_like(call.weight_N)


@_linear_backward_rows.register_fake
def _(grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = LinearCall(*arguments)
    return torch.empty_like(call.x_UD), torch.empty_like(call.weight_N)


def _linear_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _keep(ctx, LinearCall(*inputs), output[1])


def _linear_gradients(ctx: Any, grad_TO: Tensor | None, *_saved: Tensor) -> tuple:
    if grad_TO is None:
        return _in_order(LinearCall, {})
    call, saved = _kept(ctx)
    given = {"grad_TO": grad_TO.contiguous(), "saved": saved, **vars(call)}
    total, grad_w = gradient_sum(call.number), None
    if total is not None and total.defer and _defers(call.backend):
        x, gate = _linear_backward_rows(**given)
        deferred = DeferredLinear(call, given["grad_TO"])
        total.defer_call(deferred, _deferring(call.backend).linear_weight_gradients)
    else:
        [into_EDO] = _buffers(total, call.w_EDO, zeros=True)
        grad_w = into_EDO if total is None else None
        x, gate = _linear_backward(into_EDO=into_EDO, **given)
    return _in_order(LinearCall, {"x_UD": x, "weight_N": gate, "w_EDO": grad_w})


routed_linear.register_autograd(_linear_gradients, setup_context=_linear_context)


def _buffers(total: GradientSum | None, *weights: Tensor, zeros: bool) -> tuple[Tensor, ...]:
    """Returns what the weights' gradients are added to: the buffers of a pass, or new ones."""
    if total is not None:
        return total.buffers()
    new = torch.zeros_like if zeros else torch.empty_like
    return tuple(new(w) for w in weights)


def _defers(backend: str) -> bool:
    return isinstance(implementation(backend), DeferringBackend)


def _deferring(backend: str) -> DeferringBackend:
    found = implementation(backend)
    assert isinstance(found, DeferringBackend), backend
    return found


# FLOPs: of the products alone, two per multiply-accumulate, as torch counts its own. What is deferred
# is counted with its call. In the records stand shapes in place of tensors here.


@register_flop_formula(torch.ops.moebius.routed_mlp)
def _(*arguments: Any, **_: Any) -> int:
    return _mlp_flops(MLPCall(*arguments))


@register_flop_formula(torch.ops.moebius.routed_linear)
def _(*arguments: Any, **_: Any) -> int:
    return _linear_flops(LinearCall(*arguments))


@register_flop_formula(torch.ops.moebius.routed_mlp_backward)
def _(_grad: Any, _saved: Any, _up: Any, _down: Any, _new: Any, *arguments: Any, **_: Any) -> int:
    return 2 * _mlp_flops(MLPCall(*arguments))


@register_flop_formula(torch.ops.moebius.routed_mlp_backward_rows)
def _(_grad: Any, _saved: Any, *arguments: Any, **_: Any) -> int:
    return 2 * _mlp_flops(MLPCall(*arguments))


@register_flop_formula(torch.ops.moebius.routed_linear_backward)
def _(_grad: Any, _saved: Any, _into: Any, *arguments: Any, **_: Any) -> int:
    return 2 * _linear_flops(LinearCall(*arguments))


@register_flop_formula(torch.ops.moebius.routed_linear_backward_rows)
def _(_grad: Any, _saved: Any, *arguments: Any, **_: Any) -> int:
    return 2 * _linear_flops(LinearCall(*arguments))


def _mlp_flops(call: Any) -> int:
    (_, width_in, columns), (_, hidden, width_out) = call.w_up_EDW, call.w_down_EFO
    return 2 * call.weight_N[0] * (width_in * columns + hidden * width_out)


def _linear_flops(call: Any) -> int:
    _, width_in, width_out = call.w_EDO
    return 2 * call.weight_N[0] * width_in * width_out
