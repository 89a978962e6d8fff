"""Banks of experts: their weights and the kernel operation that applies them."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..kernels.functional import routed_linear, routed_mlp
from ..kernels.reference import activation_function, columns_of
from ..plugins import is_own
from .execution.recompute import keeps_operands
from .initialise import Initializer, parameter
from .routing import Routes


class ExpertMLPs(nn.Module):
    """Holds E two-layer perceptrons, W_down[e]ᵀ a(W_up[e]ᵀ x + b_up[e]) + b_down[e].

    Biases exist only with `bias_inits`.
    """

    roles: ClassVar = {"w_up": "bank", "w_down": "bank", "b_up": "vector", "b_down": "vector"}

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_expert: int,
        *,
        backend: str,
        up_init: Initializer,
        down_init: Initializer,
        activation: str = "relu",
        bias_inits: tuple[Initializer, Initializer] | None = None,
    ) -> None:
        super().__init__()
        self.backend, self.activation = backend, activation
        self.own_activation = activation_function(activation) if is_own(activation) else None
        self.products_dtype: torch.dtype | None = None
        columns = columns_of(d_expert, activation)
        self.maps = {"w_up": columns // d_expert}
        self.w_up = parameter(num_experts, d_model, columns, init=up_init)
        self.w_down = parameter(num_experts, d_expert, d_model, init=down_init)
        self.b_up = (
            None if bias_inits is None else parameter(num_experts, columns, init=bias_inits[0])
        )
        self.b_down = (
            None if bias_inits is None else parameter(num_experts, d_model, init=bias_inits[1])
        )

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the products; sharded weights have it once gathered."""
        return self.products_dtype or self.w_up.dtype

    def forward(self, x_UD: Tensor, routes: Routes) -> Tensor:
        """Applies experts to (U, D) rows and returns weighted sums, (num_targets, D)."""
        if self.own_activation is not None:
            return self._by_two_products(x_UD, routes, self.own_activation)
        return routed_mlp(
            x_UD,
            self.w_up,
            self.w_down,
            routes,
            activation=self.activation,
            b_up_EF=self.b_up,
            b_down_EO=self.b_down,
            backend=self.backend,
            defer=keeps_operands(),
        )

    def _by_two_products(
        self, x_UD: Tensor, routes: Routes, activate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Applies a user's own activation between two products, on any backend.

        Keeps the hidden rows of all routes, before and after the activation.
        """
        given = {"backend": self.backend, "defer": keeps_operands()}
        own_N = torch.arange(len(routes.expert_N), device=x_UD.device)
        up = replace(
            routes,
            weight_N=torch.ones_like(routes.weight_N),
            target_N=own_N,
            num_targets=len(own_N),
            per_target=1,
        )
        z_NF = routed_linear(x_UD, self.w_up, up, **given)
        if self.b_up is not None:
            z_NF = z_NF + self.b_up.to(z_NF.dtype)[routes.expert_N]
        down = replace(routes, source_N=own_N, per_source=1)
        y_TD = routed_linear(activate(z_NF), self.w_down, down, **given)
        if self.b_down is None:
            return y_TD
        bias_ND = self.b_down[routes.expert_N] * routes.weight_N[:, None]
        return y_TD.index_add(0, routes.target_N, bias_ND.to(y_TD.dtype))


class ExpertLinears(nn.Module):
    """Holds E matrices without bias, W[e]ᵀ x."""

    roles: ClassVar = {"weight": "bank"}

    def __init__(
        self, num_experts: int, d_in: int, d_out: int, *, backend: str, init: Initializer
    ) -> None:
        super().__init__()
        self.backend = backend
        self.products_dtype: torch.dtype | None = None
        self.weight = parameter(num_experts, d_in, d_out, init=init)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the products; sharded weights have it once gathered."""
        return self.products_dtype or self.weight.dtype

    def forward(self, x_UD: Tensor, routes: Routes) -> Tensor:
        """Applies experts to (U, d_in) rows and returns weighted sums, (num_targets, d_out)."""
        return routed_linear(
            x_UD, self.weight, routes, backend=self.backend, defer=keeps_operands()
        )
