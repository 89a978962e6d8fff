"""Declares what every backend of the expert layers implements."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .calls import LinearCall, MLPBank, MLPCall, MLPGradients, SortedRoutes

ROW_SLACK = 64  # rows that a backend's saved rows have past the end


class Backend(Protocol):
    """Declares the functions of a backend's module.

    Rows, weights and gradients are of one dtype, gate weights of float32 or wider; all are
    contiguous.
    """

    def mlp_forward(
        self, x_UD: Tensor, bank: MLPBank, routes: SortedRoutes
    ) -> tuple[Tensor, Tensor]:
        """Computes all perceptrons' weighted outputs, summed per target.

        Returns:
            y (num_targets, O), and in sorted order what the activation's backward reads: rows of W
            columns, N + ROW_SLACK of them.
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
        """Computes the gradients of x, the gate weights (in route order) and the biases.

        Those of the weights are added to `into`, or written there where `into.are_new`.
        """
        ...

    def linear_forward(
        self, x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes
    ) -> tuple[Tensor, Tensor]:
        """Computes all matrices' weighted outputs, summed per target.

        Returns:
            y (num_targets, O), and the ungated outputs (N + ROW_SLACK, O) if O ≤ D, else empty.
        """
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
        """Computes the gradients of x and the gate weights; the weights' is added to `into_EDO`."""
        ...


class DefersWeightGradients(Backend, Protocol):
    """Declares a backend that makes the weights' gradients of several calls in one product."""

    def mlp_backward_rows(
        self, grad_TO: Tensor, x_UD: Tensor, bank: MLPBank, routes: SortedRoutes, saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Computes what `mlp_backward` does, without the weights' gradients.

        Returns beside it the gradient of the rows before the activation, laid out as `saved` is.
        """
        ...

    def mlp_weight_gradients(self, calls: Sequence[MLPCall]) -> tuple[Tensor, Tensor]:
        """Computes the gradients of w_up and w_down, over all calls."""
        ...

    def linear_backward_rows(
        self, grad_TO: Tensor, x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes, saved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes what `linear_backward` does, without the weights' gradient."""
        ...

    def linear_weight_gradients(self, calls: Sequence[LinearCall]) -> tuple[Tensor]:
        """Computes the gradient of w, over all calls."""
        ...
