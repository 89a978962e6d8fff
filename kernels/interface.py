"""What every backend of the expert layers implements, and what is agreed between the backends and
their callers.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .operands import LinearCall, MLPBank, MLPCall, MLPGradients, SortedRoutes

ROW_SLACK = 64  # rows that a backend's saved rows have past the end


class Backend(Protocol):
    """What a backend's module has.

    Rows, weights and gradients are of one dtype, gate weights of float32 or wider; all are
    contiguous.
    """

    def mlp_forward(
        self, x_UD: Tensor, bank: MLPBank, routes: SortedRoutes
    ) -> tuple[Tensor, Tensor]:
        """y (num_targets, O), and the rows saved for the activation's backward, (N + ROW_SLACK, W),
        in sorted order.
        """
        ...

    def mlp_backward(
        self,
        grad_TO: Tensor,
        x_UD: Tensor,
        bank: MLPBank,
        routes: SortedRoutes,
        saved: Tensor,
        into: MLPGradients,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, the gate weights (in route order) and the biases; those of the weights
        are added to `into`.
        """
        ...

    def linear_forward(
        self, x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes
    ) -> tuple[Tensor, Tensor]:
        """y (num_targets, O), and the ungated outputs (N + ROW_SLACK, O) if O ≤ D, else empty."""
        ...

    def linear_backward(
        self,
        grad_TO: Tensor,
        x_UD: Tensor,
        w_EDO: Tensor,
        routes: SortedRoutes,
        saved: Tensor,
        into_EDO: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and the gate weights; the weights' is added to `into_EDO`."""
        ...


class DefersWeightGradients(Backend, Protocol):
    """A backend that makes the weights' gradients of several calls in one product."""

    def mlp_backward_rows(
        self, grad_TO: Tensor, x_UD: Tensor, bank: MLPBank, routes: SortedRoutes, saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """As `mlp_backward` without the weights; beside it the gradient of the rows before the
        activation.
        """
        ...

    def mlp_weight_gradients(self, calls: Sequence[MLPCall]) -> tuple[Tensor, Tensor]:
        """Of w_up and w_down, over all calls."""
        ...

    def linear_backward_rows(
        self, grad_TO: Tensor, x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes, saved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `linear_backward` without the weights."""
        ...

    def linear_weight_gradients(self, calls: Sequence[LinearCall]) -> tuple[Tensor]:
        """Of w, over all calls."""
        ...
