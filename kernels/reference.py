"""The meaning of the expert operations: loops that anyone believes.

Every other backend is tested against these, in value and in every gradient. They take any dtype (float64 included) and are
differentiated by autograd. Cost: one gather, two products and one scatter per expert; nothing is fused, all is kept.

Legend: U source rows, N routes, E experts, D input width, F hidden width, O output width.
A route n reads row source_N[n], goes through expert_N[n], is weighed by weight_N[n] and added into row target_N[n].
"""

import torch
from torch import Tensor


def routed_mlp(
    x_UD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    num_targets: int,
) -> Tensor:
    """y[target] += weight · W_down[expert]ᵀ relu(W_up[expert]ᵀ x[source]) (σ-MoE, arXiv 2310.10837, eq. 10)."""
    y_TO = x_UD.new_zeros(num_targets, w_down_EFO.shape[2])
    for expert, (w_up_DF, w_down_FO) in enumerate(zip(w_up_EDF.unbind(0), w_down_EFO.unbind(0), strict=True)):
        routes = (expert_N == expert).nonzero().squeeze(1)
        hidden = torch.relu(x_UD[source_N[routes]] @ w_up_DF)
        answer = weight_N[routes, None].to(x_UD.dtype) * (hidden @ w_down_FO)
        y_TO = y_TO.index_add(0, target_N[routes], answer)
    return y_TO


def routed_linear(
    x_UD: Tensor,
    w_EDO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    num_targets: int,
) -> Tensor:
    """y[target] += weight · W[expert]ᵀ x[source] (SwitchHead's V and O, arXiv 2312.07987, eq. 7 to 9)."""
    y_TO = x_UD.new_zeros(num_targets, w_EDO.shape[2])
    for expert, w_DO in enumerate(w_EDO.unbind(0)):
        routes = (expert_N == expert).nonzero().squeeze(1)
        answer = weight_N[routes, None].to(x_UD.dtype) * (x_UD[source_N[routes]] @ w_DO)
        y_TO = y_TO.index_add(0, target_N[routes], answer)
    return y_TO
