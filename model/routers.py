"""Routers: from token rows to gate weights. A router never moves data."""

import torch
from torch import Tensor, nn


class SigmoidTopK(nn.Module):
    """Sigmoid gates, top-k, no renormalisation (σ-MoE, arXiv 2310.10837 §5; SwitchHead, arXiv 2312.07987 §2).

    One independent choice per head; the feed-forward has one head. Experts are numbered head · num_experts + choice.
    The router gets gradient through the gate weights and, from the balancing term, through the logits.
    """

    def __init__(self, d_model: int, num_experts: int, top_k: int, *, num_heads: int = 1) -> None:
        super().__init__()
        self.num_heads, self.num_experts, self.top_k = num_heads, num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_heads * num_experts, d_model))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns experts (T, H, K) int64, gate weights (T, H, K) float32, and logits (T, H, A) float32.

        Float32 whatever the compute dtype: a choice must not flip with it. The choice is made on the logits, which do
        not saturate as their sigmoids do.
        """
        logits_THA = (x_TD.float() @ self.weight.float().T).unflatten(1, (self.num_heads, self.num_experts))
        chosen_THK = logits_THA.topk(self.top_k, dim=-1)
        first_H1 = torch.arange(self.num_heads, device=x_TD.device)[:, None] * self.num_experts
        return chosen_THK.indices + first_H1, torch.sigmoid(chosen_THK.values), logits_THA
