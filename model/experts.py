"""Banks of experts: weights and the kernel door they go through. They never ask which rank they are on."""

import torch
from torch import Tensor, nn

from ..kernels.doors import routed_linear, routed_mlp
from .routing import Routes


class ExpertMLPs(nn.Module):
    """E two-layer perceptrons with ReLU and no bias: W_down[e]ᵀ relu(W_up[e]ᵀ x)."""

    def __init__(self, num_experts: int, d_model: int, d_expert: int, *, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, d_expert))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_expert, d_model))

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        return self.w_up.dtype

    def forward(self, x_UD: Tensor, routes: Routes) -> Tensor:
        """(U, D) rows to (num_targets, D) sums of weighted answers."""
        return routed_mlp(x_UD, self.w_up, self.w_down, routes, backend=self.backend)


class ExpertLinears(nn.Module):
    """E matrices without bias: W[e]ᵀ x."""

    def __init__(self, num_experts: int, d_in: int, d_out: int, *, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, d_in, d_out))

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        return self.weight.dtype

    def forward(self, x_UD: Tensor, routes: Routes) -> Tensor:
        """(U, d_in) rows to (num_targets, d_out) sums of weighted answers."""
        return routed_linear(x_UD, self.weight, routes, backend=self.backend)
