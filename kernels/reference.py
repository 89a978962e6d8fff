"""Reference loops that define the expert operations, and activations with hand-written gradients.

Every other backend is tested against the loops, in value and in every gradient. They take any dtype,
float64 included, and autograd differentiates them. Cost: one gather, two products and one scatter
per expert; nothing is fused, and autograd saves everything.

Backends of torch operations take an activation's value and slope from here, because a row's result
must not depend on its position in a tensor (segments.py says why). On CPUs, torch's silu, gelu and
sigmoid break this: a loop's vectorised body and its scalar tail round differently. exp and erfc have
no such tail, and IEEE additions, products and quotients are correctly rounded, so only these are used
here. (On ARM, erf rounds the four elements of a vector differently if one of them is large.) Cost:
five to ten passes over a segment's hidden rows instead of one, beside two products that cost more.

Legend: U source rows, N routes, E experts, D input width, R rows of one expert, F hidden width, W
columns before the activation (F, or 2F where it is gated), O output width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plugins import PluginError, Registry, is_own
from .calls import RouteList

# gpt-oss's activation, by the names in its config.json; kernels/cpu/brgemm.cpp has them too.
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


def _clamped_swiglu(gate: Tensor, content: Tensor) -> Tensor:
    gate, content = gate.clamp(max=SWIGLU_LIMIT), content.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (content + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


# A gated activation is a function of the first F columns, the gate, and the last F, the content
# (arXiv 2002.05202).
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, content: F.silu(gate) * content,
    "geglu": lambda gate, content: F.gelu(gate) * content,
    "clamped_swiglu": _clamped_swiglu,
}
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "gelu": F.gelu,
    "silu": F.silu,
}
ACTIVATIONS = (*_PLAIN, *GATES)
ACTIVATION = Registry(
    "model.feed_forward.activation",
    "an activation",
    {**_PLAIN, **GATES},
    "a function of a tensor, element by element",
    takes=1,
)


def columns_of(width: int, activation: str) -> int:
    """Returns W, the number of columns before the activation for `width` hidden ones."""
    return 2 * width if activation in GATES else width


def activate(z_RW: Tensor, activation: str) -> Tensor:
    """Applies an activation, (R, W) to (R, F), under autograd; gelu is exact, with erf."""
    return activation_function(activation)(z_RW)


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """Looks up an activation by name, or imports the user's own (`module:function`).

    Raises:
        PluginError: it does not exist; the function, if it changes the shape.
    """
    if activation in GATES:
        return partial(_gated, GATES[activation])
    found = ACTIVATION.get(activation)
    return partial(_elementwise, activation, found) if is_own(activation) else found


def _elementwise(name: str, function: Callable[[Tensor], Tensor], z_RW: Tensor) -> Tensor:
    h_RW = function(z_RW)
    if h_RW.shape != z_RW.shape:
        raise PluginError(
            f"model.feed_forward.activation: {name} made {tuple(h_RW.shape)} of "
            f"{tuple(z_RW.shape)}: it must act element by element"
        )
    return h_RW


def _gated(function: Callable[[Tensor, Tensor], Tensor], z_RW: Tensor) -> Tensor:
    return function(*z_RW.chunk(2, dim=-1))


def routed_mlp(
    x_UD: Tensor,
    w_up_EDW: Tensor,
    w_down_EFO: Tensor,
    routes: RouteList,
    *,
    activation: str,
    b_up_EW: Tensor | None = None,
    b_down_EO: Tensor | None = None,
) -> Tensor:
    """Computes the weighted sum of each target's perceptrons, expert by expert.

    y[target] += weight · (W_down[expert]ᵀ a(W_up[expert]ᵀ x[source] + b_up[expert])
                           + b_down[expert]).
    σ-MoE has a = relu and no biases (arXiv 2310.10837, eq. 10), SUT has both (arXiv 2310.07096).
    """
    y_TO = x_UD.new_zeros(routes.num_targets, w_down_EFO.shape[2])
    banks = zip(w_up_EDW.unbind(0), w_down_EFO.unbind(0), strict=True)
    for expert, (w_up_DW, w_down_FO) in enumerate(banks):
        chosen = (routes.expert_N == expert).nonzero().squeeze(1)
        z = x_UD[routes.source_N[chosen]] @ w_up_DW
        if b_up_EW is not None:
            z = z + b_up_EW[expert]
        output = activate(z, activation) @ w_down_FO
        if b_down_EO is not None:
            output = output + b_down_EO[expert]
        weighted = routes.weight_N[chosen, None].to(x_UD.dtype) * output
        y_TO = y_TO.index_add(0, routes.target_N[chosen], weighted)
    return y_TO


def routed_linear(x_UD: Tensor, w_EDO: Tensor, routes: RouteList) -> Tensor:
    """Computes the weighted sum of each target's matrix products, expert by expert.

    y[target] += weight · W[expert]ᵀ x[source] (SwitchHead's V and O, arXiv 2312.07987, eq. 7 to 9).
    """
    y_TO = x_UD.new_zeros(routes.num_targets, w_EDO.shape[2])
    for expert, w_DO in enumerate(w_EDO.unbind(0)):
        chosen = (routes.expert_N == expert).nonzero().squeeze(1)
        output = x_UD[routes.source_N[chosen]] @ w_DO
        weighted = routes.weight_N[chosen, None].to(x_UD.dtype) * output
        y_TO = y_TO.index_add(0, routes.target_N[chosen], weighted)
    return y_TO


# Activations by hand ------------------------------------------------------------------------------


def hidden_in_place(z_RW: Tensor, activation: str) -> Tensor:
    """Applies an activation, (R, W) to (R, F), and leaves in `z_RW` what `hidden_and_pullback` reads.

    For relu these are the hidden rows; for others `z_RW` stays unchanged.
    """
    if activation == "relu":
        return z_RW.relu_()
    return hidden_and_pullback(z_RW, activation)[0]


def hidden_and_pullback(
    saved_RW: Tensor, activation: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the hidden rows (R, F) and their pullback, (R, F) to (R, W).

    The pullback may overwrite its argument. Half precision is computed in float32.
    """
    if activation == "relu":
        return saved_RW, lambda grad: grad.masked_fill_(saved_RW <= 0, 0)
    dtype = saved_RW.dtype
    z = saved_RW.to(torch.promote_types(dtype, torch.float32))
    if activation not in GATES:
        value, slope = _SMOOTH[activation](z)
        return value.to(dtype), lambda grad: grad.mul_(slope())
    gate, content = z.chunk(2, dim=-1)
    value, slope = _SMOOTH[activation](gate)
    factor, pullback = _factor(content, activation)
    return (value * factor).to(dtype), lambda grad: torch.cat(
        (grad * factor * slope(), pullback(grad * value)), -1
    ).to(dtype)


def _factor(content: Tensor, activation: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns what a gated activation multiplies its gate's value by, and the factor's pullback."""
    if activation != "clamped_swiglu":
        return content, lambda grad: grad
    factor = content.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1)
    return factor, lambda grad: grad.masked_fill_(content.abs() > SWIGLU_LIMIT, 0)


def _silu(z: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Returns z·σ(z), and a function that returns its slope σ + z·σ·(1 − σ)."""
    sigmoid = torch.exp(-z).add_(1).reciprocal_()
    value = z * sigmoid
    return value, lambda: (1 - sigmoid).mul_(value).add_(sigmoid)


def _clamped_silu(z: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Returns g·σ(α·g) of g = min(z, 7), and a function for its slope, 0 above 7."""
    gate = z.clamp(max=SWIGLU_LIMIT)
    sigmoid = torch.exp(gate * -SWIGLU_ALPHA).add_(1).reciprocal_()
    value = gate * sigmoid

    def slope() -> Tensor:
        of_gate = (1 - sigmoid).mul_(value).mul_(SWIGLU_ALPHA).add_(sigmoid)
        return of_gate.masked_fill_(z > SWIGLU_LIMIT, 0)

    return value, slope


def _gelu(z: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Returns z·Φ(z), and a function that returns its slope Φ + z·φ (the normal distribution's Φ, φ)."""
    cumulative = torch.erfc(z * -math.sqrt(0.5)).mul_(0.5)

    def slope() -> Tensor:
        density = torch.exp((z * z).mul_(-0.5)).mul_(1 / math.sqrt(2 * math.pi))
        return density.mul_(z).add_(cumulative)

    return z * cumulative, slope


def _relu2(z: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Returns relu(z)², and a function for its slope 2·relu(z)."""
    positive = torch.relu(z)
    return positive.square(), lambda: 2 * positive


_SMOOTH = {"silu": _silu, "gelu": _gelu, "relu2": _relu2}
_SMOOTH |= {"swiglu": _silu, "geglu": _gelu, "clamped_swiglu": _clamped_silu}
