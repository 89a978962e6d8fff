"""Records of the operations' arguments: a list of routes, a bank of perceptrons, a saved call.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F, or 2F where it is gated), O output width.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from .activations import ACTIVATIONS, columns_of


@dataclass(frozen=True)
class Sorting:
    """Holds N routes sorted by expert, within an expert in their old order.

    It is made once (permute.py) and used by all. `order_N` and `place_N` are None where the routes
    stand in that order already.
    """

    order_N: Tensor | None  # int32: the route that stands at a sorted place
    place_N: Tensor | None  # int32: the sorted place of a route
    # int32, on the routes' device: expert e has the places starts[e] … starts[e+1] − 1
    starts_E1: Tensor


class RouteList(Protocol):
    """Declares what an operation reads of a list of routes (the model's `Routes` is one).

    Route n reads row source_N[n], goes through expert_N[n], is weighed by weight_N[n] and added
    into row target_N[n].
    """

    @property
    def source_N(self) -> Tensor:
        """Returns the row that each route reads."""
        ...

    @property
    def expert_N(self) -> Tensor:
        """Returns the expert of each route."""
        ...

    @property
    def weight_N(self) -> Tensor:
        """Returns the gate weight of each route."""
        ...

    @property
    def target_N(self) -> Tensor:
        """Returns the row that each route is added into."""
        ...

    @property
    def num_targets(self) -> int:
        """Returns the number of target rows."""
        ...

    @property
    def per_source(self) -> int:
        """Returns 0, or k where route n belongs to source row n // k."""
        ...

    @property
    def per_target(self) -> int:
        """Returns 0, or k where route n belongs to target row n // k."""
        ...

    @property
    def per_expert(self) -> int:
        """Returns 0, or k where route n goes through expert n // k."""
        ...

    @property
    def sorting(self) -> Sorting:
        """Returns the routes' order by expert."""
        ...

    @property
    def has_unused(self) -> bool:
        """Returns whether places of the list may name no expert."""
        ...

    def used(self) -> Self:
        """Returns the list without them."""
        ...


@dataclass(frozen=True)
class SortedRoutes:
    """Holds what a backend gets of a list of routes.

    An op, whose arguments are flat, builds it anew from its fields in their order. `weight_N`,
    `source_N` and `target_N` are in route order. The indices are None where a rule stands for them:
    route n then belongs to source row n // per_source, or to target row n // per_target.
    """

    weight_N: Tensor
    order_N: Tensor | None
    place_N: Tensor | None
    starts_E1: Tensor
    source_N: Tensor | None
    target_N: Tensor | None
    num_targets: int
    per_source: int
    per_target: int
    per_expert: int

    @property
    def num_routes(self) -> int:
        """Returns N."""
        return self.weight_N.shape[0]

    def source_rows(self) -> Tensor:
        """Returns (N,) in sorted order: the source row at each place."""
        return self._rows(self.source_N, self.per_source)

    def target_rows(self) -> Tensor:
        """Returns (N,) in sorted order: the target row at each place."""
        return self._rows(self.target_N, self.per_target)

    def gates(self, dtype: torch.dtype) -> Tensor:
        """Returns (N,) in sorted order: the gate weights, in that dtype."""
        return self._sorted(self.weight_N).to(dtype)

    def starts(self) -> list[int]:
        """Returns `starts_E1` on the host.

        It is known, or read from the device: the one synchronisation of backends that loop.
        """
        if self.per_expert:
            return [expert * self.per_expert for expert in range(self.starts_E1.shape[0])]
        return self.starts_E1.tolist()

    def unsorted(self, values_N: Tensor) -> Tensor:
        """Brings values from sorted order into the order of the routes."""
        return values_N if self.place_N is None else values_N.index_select(0, self.place_N)

    def _sorted(self, values_N: Tensor) -> Tensor:
        return values_N if self.order_N is None else values_N.index_select(0, self.order_N)

    def _rows(self, index_N: Tensor | None, per_row: int) -> Tensor:
        if index_N is not None:
            return self._sorted(index_N)
        order_N = self.order_N
        if order_N is None:
            order_N = torch.arange(self.num_routes, device=self.weight_N.device, dtype=torch.int32)
        return order_N if per_row == 1 else torch.div(order_N, per_row, rounding_mode="floor")


@dataclass(frozen=True)
class MLPBank:
    """Holds one two-layer perceptron per expert: W_down[e]ᵀ a(W_up[e]ᵀ x + b_up[e]) + b_down[e]."""

    w_up_EDW: Tensor
    w_down_EFO: Tensor
    b_up_EW: Tensor | None
    b_down_EO: Tensor | None
    activation: str

    def check(self) -> None:
        """Checks that the activation is known and that the weights' shapes fit.

        Raises:
            ValueError: one of both is not so.
        """
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} is unknown: choose {', '.join(ACTIVATIONS)}"
            )
        experts, hidden, out = self.w_down_EFO.shape
        columns = columns_of(hidden, self.activation)
        shapes = {"w_up": (self.w_up_EDW, (experts, self.w_up_EDW.shape[1], columns))}
        shapes |= {
            "b_up": (self.b_up_EW, (experts, columns)),
            "b_down": (self.b_down_EO, (experts, out)),
        }
        for name, (tensor, expected) in shapes.items():
            if tensor is not None and tensor.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; activation={self.activation!r} with "
                    "w_down of shape "
                    f"{tuple(self.w_down_EFO.shape)} wants {tuple(expected)}"
                )


@dataclass(frozen=True)
class MLPGradients:
    """Holds gradients of a bank, as a backend adds to them and as a pass returns them.

    Args:
        are_new: nobody has written them yet: they are to be written, and not added to. Only for
            WRITING_BACKENDS (backend.py); others get zeros.
    """

    w_up_EDW: Tensor
    w_down_EFO: Tensor
    are_new: bool = False


@dataclass(frozen=True)
class MLPCall:
    """Holds a call's operands of the weights' gradients, saved by a backward that defers them."""

    grad_TO: Tensor
    x_UD: Tensor
    routes: SortedRoutes
    saved: Tensor
    d_z: Tensor  # the gradient of the rows before the activation, laid out as `saved` is
    bank: MLPBank


@dataclass(frozen=True)
class LinearCall:
    """Holds the same of a call on a bank of matrices."""

    grad_TO: Tensor
    x_UD: Tensor
    routes: SortedRoutes
    w_EDO: Tensor


def check_counts(routes: RouteList, num_experts: int) -> None:
    """Checks a route list's claim that all experts have equally many routes.

    Raises:
        ValueError: they cannot.
    """
    num_routes = routes.expert_N.shape[0]
    if routes.per_expert and routes.per_expert * num_experts != num_routes:
        raise ValueError(
            f"per_expert={routes.per_expert} is not that of {num_routes} routes over {num_experts} "
            "experts: "
            "give their quotient, or 0 where the counts differ"
        )
