"""Sequence-level balancing over time and repeats, and what the monitor needs to know of a routing.

For one group member and one sequence, the router's softmax is averaged over all positions *and all repeats of the same
weights*; minus the entropy of that average is the loss (arXiv 2405.16039, eq. 8 to 10). Each repeat returns its sums; they are
added up and the loss is computed once at the end, so recomputing a layer cannot count it twice.

Legend: B sequences, S positions, H heads (1 for the feed-forward), A experts of a head, N experts in all (H·A), L depth steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .routing import Routing


@dataclass(frozen=True)
class RouterReport:
    """What one router did in one depth step."""

    softmax_sum_BHA: Tensor  # float32, differentiable: Σ over positions of softmax over the experts of each head
    load_N: Tensor  # int64: routes per expert
    gate_sum: Tensor  # float32 scalar: Σ of gate weights


def report_routing(routing: Routing, batch_size: int) -> RouterReport:
    """Sums over positions; nothing of size T survives."""
    softmax_THA = routing.logits_THA.softmax(-1)
    return RouterReport(
        softmax_sum_BHA=softmax_THA.unflatten(0, (batch_size, -1)).sum(1),
        load_N=torch.bincount(routing.routes.expert_N, minlength=routing.routes.num_experts),
        gate_sum=routing.routes.weight_N.detach().sum(),
    )


def negative_entropy(softmax_sum_BHA: Tensor, num_terms: int) -> Tensor:
    """ℓ per sequence, (B,): Σ_i p_i ln p_i with p the mean of `num_terms` softmaxes, averaged over heads.

    It is negative, at least −ln A, and reaches that bound where all experts are used equally.
    """
    p_BHA = softmax_sum_BHA / num_terms
    tiny = torch.finfo(p_BHA.dtype).tiny  # an expert whose softmax underflows everywhere adds 0, and no NaN gradient
    return (p_BHA * p_BHA.clamp_min(tiny).log()).sum(-1).mean(-1)


@dataclass(frozen=True)
class DepthLoad:
    """Load of one kind of router over the depth steps of one forward pass."""

    load_LN: Tensor  # int64: routes per depth step and expert
    gate_sum_L: Tensor  # float32


def collect_loads(steps: list[dict[str, RouterReport]]) -> dict[str, DepthLoad]:
    """Stacks the reports of all depth steps, per kind of router."""
    kinds = steps[0].keys() if steps else ()
    return {
        kind: DepthLoad(
            torch.stack([step[kind].load_N for step in steps]), torch.stack([step[kind].gate_sum for step in steps])
        )
        for kind in kinds
    }
