"""The public functional interface of the expert layers: `routed_mlp` and `routed_linear`.

The `reference` backend is plain PyTorch under autograd. All others implement one op per function
(ops.py): gather, matrix products, activation, gate weight and scatter-add together, with one
backward, so that a backend may fuse them and save as little as it can.

Legend: U source rows, N routes, E experts, D input width, F hidden width, O output width.
"""

from torch import Tensor

from . import ops, reference
from .backend import reads_unused, resolve_backend
from .calls import MLPBank, RouteList, check_counts
from .gradients import shared_weights


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
    defer: bool = False,
) -> Tensor:
    """Computes the weighted sum of every target's perceptrons.

    y[target] += weight · (W_down[expert]ᵀ a(W_up[expert]ᵀ x[source] + b_up[expert])
                           + b_down[expert]) over all routes.

    Args:
        x_UD: source rows, cast to the weights' dtype, as the biases are.
        w_up_EDF, w_down_EFO: one two-layer perceptron per expert.
        routes: indices in range (experts 0 … E−1); weights float32, differentiable. Where
            `per_expert` is positive nothing is sorted and no count is read from the device.
        activation: a. "relu", "gelu" (with erf), "silu"; or gated, "swiglu" (silu) and "geglu"
            (gelu): `w_up` and `b_up` then have 2F columns, and the hidden row is a(first half) ·
            second half.
        b_up_EF, b_down_EO: biases, each only if wanted.
        backend: an entry of `BACKENDS`, or "auto": the fastest that there is for this device and
            dtype.
        defer: inside `gradients.accumulate_weight_gradients`, a backend that can may make the
            weights' gradients of all calls in one product at the end of the backward pass; their
            operands wait that long.

    Returns:
        (num_targets, O) in the weights' dtype. A target without a route is zero.

    Raises:
        ValueError: an unknown activation or backend; shapes that do not fit; a `per_expert` that
            does not.
    """
    dtype = w_up_EDF.dtype
    x_UD = x_UD.to(dtype).contiguous()
    w_up_EDF, w_down_EFO = w_up_EDF.contiguous(), w_down_EFO.contiguous()
    b_up_EF = None if b_up_EF is None else b_up_EF.to(dtype).contiguous()
    b_down_EO = None if b_down_EO is None else b_down_EO.to(dtype).contiguous()
    bank = MLPBank(w_up_EDF, w_down_EFO, b_up_EF, b_down_EO, activation)
    bank.check()
    check_counts(routes, w_up_EDF.shape[0])
    backend = resolve_backend(backend, x_UD.device, dtype)
    routes = routes if reads_unused(backend) else routes.used()
    if backend == "reference":
        return reference.routed_mlp(x_UD, bank, routes)
    (w_up_EDF, w_down_EFO), number = shared_weights(w_up_EDF, w_down_EFO, defer=defer)
    y_TO, _ = ops.routed_mlp(
        x_UD, w_up_EDF, w_down_EFO, b_up_EF, b_down_EO, activation, *_flat(routes), backend, number
    )
    return y_TO


def routed_linear(
    x_UD: Tensor, w_EDO: Tensor, routes: RouteList, *, backend: str = "auto", defer: bool = False
) -> Tensor:
    """Computes the weighted sum of every target's matrix products.

    y[target] += weight · W[expert]ᵀ x[source] over all routes. Arguments, result and errors are
    those of `routed_mlp`.
    """
    x_UD, w_EDO = x_UD.to(w_EDO.dtype).contiguous(), w_EDO.contiguous()
    check_counts(routes, w_EDO.shape[0])
    backend = resolve_backend(backend, x_UD.device, x_UD.dtype)
    routes = routes if reads_unused(backend) else routes.used()
    if backend == "reference":
        return reference.routed_linear(x_UD, w_EDO, routes)
    (w_EDO,), number = shared_weights(w_EDO, defer=defer)
    y_TO, _ = ops.routed_linear(x_UD, w_EDO, *_flat(routes), backend, number)
    return y_TO


def _flat(routes: RouteList) -> tuple:
    """Lists a route list's fields as an op takes them: tensors and numbers, no records.

    `SortedRoutes(*…)` puts them together again.
    """
    sorting = routes.sorting
    return (
        routes.weight_N.contiguous(),
        sorting.order_N,
        sorting.place_N,
        sorting.starts_E1,
        None if routes.per_source else routes.source_N,
        None if routes.per_target else routes.target_N,
        routes.num_targets,
        routes.per_source,
        routes.per_target,
        routes.per_expert,
    )
