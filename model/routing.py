"""What a router decides: a list of routes.

A route says: read this source row, send it through this expert, weigh the answer so much, add it into this target row. Every
sparse layer is such a list, so one dispatcher and one set of kernels serve them all:

| layer | source row | experts | target row |
|---|---|---|---|
| feed-forward (σ-MoE) | token | E | the same token |
| V projection of SwitchHead | token | H·N_A: head h picks among its own N_A | (token, head) |
| O projection of SwitchHead | (token, head) | H·N_A | token: heads and slots add up |

Legend: T tokens, H heads, A experts of one head, K experts chosen, N routes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """N routes over `num_experts` experts, in the order in which a target row's answers are added up.

    `per_source` and `per_target` are positive where route n belongs to source row n // per_source and target row
    n // per_target, which lets a backend sum without an index; 0 where there is no such rule.
    """

    source_N: Tensor  # int64
    expert_N: Tensor  # int64
    weight_N: Tensor  # float32, differentiable: the gate weights
    target_N: Tensor  # int64
    num_experts: int
    num_targets: int
    per_source: int
    per_target: int

    def with_weights(self, weight_N: Tensor) -> "Routes":
        """The same routes with other gate weights."""
        return replace(self, weight_N=weight_N)


@dataclass(frozen=True)
class Routing:
    """A router's answer: the routes, and what losses and metrics need."""

    routes: Routes
    logits_THA: Tensor  # float32, before the gate's nonlinearity; the feed-forward has H = 1


def token_routes(experts_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> Routes:
    """Every token through its K experts and back into the token."""
    num_tokens, top_k = experts_TK.shape
    token_N = torch.arange(num_tokens, device=experts_TK.device).repeat_interleave(top_k)
    return Routes(
        token_N, experts_TK.reshape(-1), weights_TK.reshape(-1), token_N, num_experts, num_tokens, top_k, top_k
    )  # fmt: skip


def token_to_head_routes(experts_THK: Tensor, weights_THK: Tensor, *, num_experts: int) -> Routes:
    """Every token into each of its H heads: K experts for each (token, head). Experts are numbered over all heads."""
    num_tokens, num_heads, top_k = experts_THK.shape
    head_row_N = torch.arange(num_tokens * num_heads, device=experts_THK.device).repeat_interleave(top_k)
    return Routes(
        head_row_N // num_heads, experts_THK.reshape(-1), weights_THK.reshape(-1), head_row_N,
        num_experts, num_tokens * num_heads, num_heads * top_k, top_k,
    )  # fmt: skip


def head_to_token_routes(experts_THK: Tensor, weights_THK: Tensor, *, num_experts: int) -> Routes:
    """Every (token, head) row through its K experts into the token: heads and slots are summed in one go."""
    num_tokens, num_heads, top_k = experts_THK.shape
    head_row_N = torch.arange(num_tokens * num_heads, device=experts_THK.device).repeat_interleave(top_k)
    return Routes(
        head_row_N, experts_THK.reshape(-1), weights_THK.reshape(-1), head_row_N // num_heads,
        num_experts, num_tokens, top_k, num_heads * top_k,
    )  # fmt: skip
