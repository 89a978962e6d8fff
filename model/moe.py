"""One sparse layer: routes → dispatch → experts → combine. One rank or a thousand, these are the lines.

On one rank `LocalDispatcher` hands back what it got: no copy, no sort. Across ranks another dispatcher (distributed/) takes its
place; the layer, its experts and their kernels stay the same.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .config import ModelConfig
from .experts import ExpertLinears, ExpertMLPs
from .routers import SigmoidTopK
from .routing import Routes, Routing, token_routes


@dataclass(frozen=True)
class Sent:
    """What a rank must serve after dispatch: rows, their routes with local expert numbers, and the way home."""

    x_UD: Tensor
    routes: Routes
    way_home: Any = None  # the dispatcher's own


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts, and brings the answers home."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective over the dispatcher's ranks. Every rank must call it, with or without rows."""
        ...

    def combine(self, y_UD: Tensor, sent: Sent) -> Tensor:
        """(num_targets, D): the answers of all experts, weighted and added up where their routes say."""
        ...


class LocalDispatcher:
    """Every expert is here."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Hands back what it got."""
        return Sent(x_UD, routes)

    def combine(self, y_UD: Tensor, sent: Sent) -> Tensor:
        """The experts have added up their answers already."""
        return y_UD


class SparseLayer(nn.Module):
    """A bank of experts behind a dispatcher: the one place where rows may leave this rank."""

    def __init__(self, experts: ExpertMLPs | ExpertLinears) -> None:
        super().__init__()
        self.experts = experts
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(self, x_UD: Tensor, routes: Routes) -> Tensor:
        """(U, D_in) source rows to (num_targets, D_out)."""
        # In the experts' own precision before they travel: half the bytes in bfloat16, and sums of the same rounding on
        # one rank and on many.
        sent = self.dispatcher.dispatch(x_UD.to(self.experts.dtype), routes)
        y_UD = self.experts(sent.x_UD, sent.routes)
        return self.dispatcher.combine(y_UD, sent)


class SigmaMoE(nn.Module):
    """σ-MoE feed-forward: y = Σ_{i ∈ top-K} σ(z_i) · W_down,iᵀ relu(W_up,iᵀ x) with z = W_r n (arXiv 2405.16039, eq. 1 to 3).

    Router and experts read different inputs: in peri-layernorm the router sees the normalised row, the experts the raw one.
    """

    def __init__(self, config: ModelConfig, *, backend: str) -> None:
        super().__init__()
        self.router = SigmoidTopK(config.d_model, config.num_experts, config.top_k)
        self.sparse = SparseLayer(
            ExpertMLPs(config.num_experts, config.d_model, config.d_expert, backend=backend)
        )  # fmt: skip

    def forward(self, x_TD: Tensor, router_input_TD: Tensor) -> tuple[Tensor, Routing]:
        """(T, D) to (T, D), with the routing for losses and metrics."""
        experts_T1K, weights_T1K, logits_T1E = self.router(router_input_TD)
        routes = token_routes(
            experts_T1K.squeeze(1), weights_T1K.squeeze(1), num_experts=self.router.num_experts
        )  # fmt: skip
        return self.sparse(x_TD, routes), Routing(routes, logits_T1E)
