"""A plain loop over rows and experts: the oracle for layers called with routes.

It shares no code with what it checks. Use it as `Layer.reference` if the layer could be wrong on
one rank in the same way as on many.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class LoopMoE(nn.Module):
    """Runs perceptron experts, one row and one route at a time.

    Call it as `(x, experts, gates)`. With a router, call it as `(x)`: softmax over all experts, the
    `top_k` largest, normalized to sum to 1.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        router: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.top_k, self.activation = top_k, activation
        self.w_up = nn.Parameter(torch.zeros(num_experts, width, hidden, dtype=dtype))
        self.w_down = nn.Parameter(torch.zeros(num_experts, hidden, width, dtype=dtype))
        self.router = nn.Linear(width, num_experts, bias=False, dtype=dtype) if router else None

    def forward(
        self, x_TD: Tensor, experts_TK: Tensor | None = None, gates_TK: Tensor | None = None
    ) -> Tensor:
        """Maps (T, D) -> (T, D)."""
        if experts_TK is None or gates_TK is None:
            experts_TK, gates_TK = self.route(x_TD)
        rows = [self._row(*row) for row in zip(x_TD, experts_TK, gates_TK, strict=True)]
        return torch.stack(rows) if rows else x_TD * 1

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (T, K) experts and gate weights."""
        assert self.router is not None, "this layer has no router; call it with routes"
        chosen = self.router(x_TD).softmax(-1).topk(self.top_k)
        return chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True)

    def _row(self, x_D: Tensor, experts_K: Tensor, gates_K: Tensor) -> Tensor:
        y_D = torch.zeros_like(x_D)
        for expert, gate in zip(experts_K.tolist(), gates_K, strict=True):
            hidden = self.activation(x_D @ self.w_up[expert])
            y_D = y_D + gate * (hidden @ self.w_down[expert])
        return y_D
