"""What the doors read, as records: a list of routes, and a bank of perceptrons.

Legend: N routes, E experts, D input width, F hidden width, W columns before the activation (F, or 2F where it is gated),
O output width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .activations import ACTIVATIONS, columns_of


class RouteList(Protocol):
    """What a door reads of a list of routes (the model's `Routes` is one).

    Route n reads row source_N[n], goes through expert_N[n], is weighed by weight_N[n] and added into row target_N[n].
    """

    @property
    def source_N(self) -> Tensor: ...
    @property
    def expert_N(self) -> Tensor: ...
    @property
    def weight_N(self) -> Tensor: ...
    @property
    def target_N(self) -> Tensor: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def per_source(self) -> int:
        """Positive: route n belongs to source row n // per_source."""
        ...

    @property
    def per_target(self) -> int:
        """Positive: route n belongs to target row n // per_target."""
        ...

    @property
    def per_expert(self) -> int:
        """Positive: route n goes through expert n // per_expert."""
        ...


@dataclass(frozen=True)
class FlatRoutes:
    """A list of routes put together again behind an op, whose arguments are flat; in the order of those arguments."""

    source_N: Tensor
    expert_N: Tensor
    weight_N: Tensor
    target_N: Tensor
    num_targets: int
    per_source: int
    per_target: int
    per_expert: int


@dataclass(frozen=True)
class MLPBank:
    """One two-layer perceptron per expert: W_down[e]ᵀ a(W_up[e]ᵀ x + b_up[e]) + b_down[e]."""

    w_up_EDW: Tensor
    w_down_EFO: Tensor
    b_up_EW: Tensor | None
    b_down_EO: Tensor | None
    activation: str

    def check(self) -> None:
        """Raises ValueError: an unknown activation, or weights whose shapes do not fit."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown: choose {', '.join(ACTIVATIONS)}")
        experts, hidden, out = self.w_down_EFO.shape
        columns = columns_of(hidden, self.activation)
        shapes = {"w_up": (self.w_up_EDW, (experts, self.w_up_EDW.shape[1], columns))}
        shapes |= {"b_up": (self.b_up_EW, (experts, columns)), "b_down": (self.b_down_EO, (experts, out))}
        for name, (tensor, expected) in shapes.items():
            if tensor is not None and tensor.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; activation={self.activation!r} with w_down of shape "
                    f"{tuple(self.w_down_EFO.shape)} wants {tuple(expected)}"
                )


def check_counts(routes: RouteList, num_experts: int) -> None:
    """Raises ValueError: the routes claim equal counts that are not theirs."""
    num_routes = routes.expert_N.shape[0]
    if routes.per_expert and routes.per_expert * num_experts != num_routes:
        raise ValueError(
            f"per_expert={routes.per_expert} is not that of {num_routes} routes over {num_experts} experts: "
            "give their quotient, or 0 where the counts differ"
        )
