"""The meaning of the expert operations: loops that anyone believes.

Every other backend is tested against these, in value and in every gradient. They take any dtype
(float64 included) and are differentiated by autograd. Cost: one gather, two products and one
scatter per expert; nothing is fused, and autograd saves everything.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F, or 2F where it is gated), O output width.
"""

from torch import Tensor

from .activations import activate
from .calls import RouteList


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
    """Computes the weighted sum of every target's perceptrons, one expert after another.

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
    """Computes the weighted sum of every target's matrix products, one expert after another.

    y[target] += weight · W[expert]ᵀ x[source] (SwitchHead's V and O, arXiv 2312.07987, eq. 7 to 9).
    """
    y_TO = x_UD.new_zeros(routes.num_targets, w_EDO.shape[2])
    for expert, w_DO in enumerate(w_EDO.unbind(0)):
        chosen = (routes.expert_N == expert).nonzero().squeeze(1)
        output = x_UD[routes.source_N[chosen]] @ w_DO
        weighted = routes.weight_N[chosen, None].to(x_UD.dtype) * output
        y_TO = y_TO.index_add(0, routes.target_N[chosen], weighted)
    return y_TO
