"""The public functional interface of the expert layers: `routed_mlp` and `routed_linear`.

The `reference` backend is plain PyTorch under autograd. Every other backend implements the forward and
the backward pass of each function (calls.py), from gather to scatter-add, and ops.py makes operators
of them. A backend can therefore fuse the steps and keep little for the backward pass.

Legend: U source rows, N routes, E experts; widths D in, F hidden, W of w_up (F; gated 2F), O out.
"""

from typing import Any

from torch import Tensor

from . import ops, reference
from .backend import resolve_backend
from .calls import RouteList, check_counts
from .gradients import shared_weights
from .reference import ACTIVATIONS, columns_of


def routed_mlp(
    x_UD: Tensor,
    w_up_EDW: Tensor,
    w_down_EFO: Tensor,
    routes: RouteList,
    *,
    activation: str = "relu",
    b_up_EF: Tensor | None = None,
    b_down_EO: Tensor | None = None,
    backend: str = "auto",
    defer: bool = False,
) -> Tensor:
    """Computes the weighted sum of each target's perceptrons.

    y[target] += weight · (W_down[expert]ᵀ a(W_up[expert]ᵀ x[source] + b_up[expert])
                           + b_down[expert]) over all routes.

    Args:
        x_UD: source rows, cast to the weights' dtype like the biases.
        w_up_EDW, w_down_EFO: one two-layer perceptron per expert.
        routes: indices in range (experts 0 … E−1); weights float32, differentiable. With a positive
            `per_expert` nothing is sorted and no count is read from the device.
        activation: a, one of "relu", "relu2" (its square), "gelu" (with erf), "silu", or the gated
            "swiglu" (silu), "geglu" (gelu) and "clamped_swiglu" (gpt-oss's). For gated ones `w_up`
            and `b_up` have 2F columns, gate first, and the hidden row is a(gate) · content; of
            gpt-oss (clamp(content, ±7) + 1) · g · σ(1.702 g) with g = min(gate, 7).
        b_up_EF, b_down_EO: optional biases.
        backend: an entry of `BACKENDS`, or "auto" for the fastest on this device and dtype.
        defer: inside `gradients.accumulate_weight_gradients`, let the backend compute the weight
            gradients of all calls in one product at the end of the backward pass. Their operands
            stay in memory until then.

    Returns:
        (num_targets, O) in the weights' dtype. A target without a route is zero.

    Raises:
        ValueError: an unknown activation or backend, or shapes or a `per_expert` that do not fit.
    """
    check_shapes(w_up_EDW, w_down_EFO, activation, b_up_EF=b_up_EF, b_down_EO=b_down_EO)
    check_counts(routes, w_up_EDW.shape[0])
    dtype = w_up_EDW.dtype
    x_UD = x_UD.to(dtype).contiguous()
    w_up_EDW, w_down_EFO = w_up_EDW.contiguous(), w_down_EFO.contiguous()
    b_up_EF = None if b_up_EF is None else b_up_EF.to(dtype).contiguous()
    b_down_EO = None if b_down_EO is None else b_down_EO.to(dtype).contiguous()
    backend = resolve_backend(backend, x_UD.device, dtype)
    if backend == "reference":
        return reference.routed_mlp(
            x_UD,
            w_up_EDW,
            w_down_EFO,
            routes,
            activation=activation,
            b_up_EW=b_up_EF,
            b_down_EO=b_down_EO,
        )
    (w_up_EDW, w_down_EFO), number = shared_weights(w_up_EDW, w_down_EFO, defer=defer)
    y_TO, _ = ops.routed_mlp(
        **sorted_fields(routes),
        x_UD=x_UD,
        w_up_EDW=w_up_EDW,
        w_down_EFO=w_down_EFO,
        b_up_EW=b_up_EF,
        b_down_EO=b_down_EO,
        activation=activation,
        backend=backend,
        number=number,
    )
    return y_TO


def routed_linear(
    x_UD: Tensor, w_EDO: Tensor, routes: RouteList, *, backend: str = "auto", defer: bool = False
) -> Tensor:
    """Computes the weighted sum of each target's matrix products.

    y[target] += weight · W[expert]ᵀ x[source] over all routes. Arguments, result and errors are
    those of `routed_mlp`.
    """
    check_counts(routes, w_EDO.shape[0])
    x_UD, w_EDO = x_UD.to(w_EDO.dtype).contiguous(), w_EDO.contiguous()
    backend = resolve_backend(backend, x_UD.device, x_UD.dtype)
    if backend == "reference":
        return reference.routed_linear(x_UD, w_EDO, routes)
    (w_EDO,), number = shared_weights(w_EDO, defer=defer)
    y_TO, _ = ops.routed_linear(
        **sorted_fields(routes), x_UD=x_UD, w_EDO=w_EDO, backend=backend, number=number
    )
    return y_TO


def sorted_fields(routes: RouteList) -> dict[str, Any]:
    """Returns the fields of a `SortedRoutes` by name, as ops take them."""
    sorting = routes.sorting
    return {
        "weight_N": routes.weight_N.contiguous(),
        "order_N": sorting.order_N,
        "place_N": sorting.place_N,
        "starts_E1": sorting.starts_E1,
        "source_N": None if routes.per_source else routes.source_N.contiguous(),
        "target_N": None if routes.per_target else routes.target_N.contiguous(),
        "num_targets": routes.num_targets,
        "per_source": routes.per_source,
        "per_target": routes.per_target,
        "per_expert": routes.per_expert,
    }


def check_shapes(
    w_up_EDW: Tensor, w_down_EFO: Tensor, activation: str, **biases: Tensor | None
) -> None:
    """Checks the activation's name and the shapes of weights and biases.

    Raises:
        ValueError: the activation is unknown, or a shape does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown: choose {', '.join(ACTIVATIONS)}")
    experts, hidden, out = w_down_EFO.shape
    columns = columns_of(hidden, activation)
    expected = {
        "w_up": (experts, w_up_EDW.shape[1], columns),
        "b_up_EF": (experts, columns),
        "b_down_EO": (experts, out),
    }
    for name, tensor in {"w_up": w_up_EDW, **biases}.items():
        if tensor is not None and tensor.shape != expected[name]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; activation={activation!r} with w_down of "
                f"shape {tuple(w_down_EFO.shape)} needs {expected[name]}"
            )
