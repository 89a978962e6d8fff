"""The expert operations on a library's grouped matrix product, with a hand-written backward.

A library provides `Operators`; this module uses them for torch (grouped_mm.py) and MegaBlocks
(megablocks.py). Flow of a call:
  1. gather the rows of all routes in expert order;
  2. one grouped product per matrix, the activation, and the gate weight on the narrow side;
  3. sum the outputs of each target row in route order.

Saved for the backward: x, the index and the hidden rows (N × F), or the rows before an activation
other than relu. A call allocates two N × D tensors, the gathered rows and the outputs. A kernel that
gathers while it multiplies avoids their memory traffic, about half of the time on a GPU with hidden
layers as narrow as 128.

Legend: U source rows, T targets, N routes, E experts, D input width, F hidden width, W columns
before the activation (F or 2F), O output width.
"""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from ..calls import Backend, GradientBuffers, LinearCall, MLPCall, RowGradients, SortedRoutes
from ..reference import hidden_and_pullback, hidden_in_place


class Operators(Protocol):
    """A library's operations on the rows of one list of routes.

    Tensors of sorted rows may have extra rows and columns, whose values are undefined.
    """

    def gather_sources(self, x_UD: Tensor) -> Tensor:
        """Gathers the source row of each route in sorted order."""
        ...

    def gather_targets(self, grad_TO: Tensor) -> Tensor:
        """Gathers the target row of each route in sorted order."""
        ...

    def add_to_targets(self, rows_NO: Tensor) -> Tensor:
        """Sums each target's rows in route order, (T, O)."""
        ...

    def add_to_sources(self, rows_ND: Tensor, num_sources: int) -> Tensor:
        """Sums each source's rows in route order, (U, D)."""
        ...

    def product(self, rows_ND: Tensor, w_EDO: Tensor) -> Tensor:
        """Multiplies each row by its expert's matrix; gathered rows give N + ROW_SLACK rows."""
        ...

    def product_transposed(self, rows_NO: Tensor, w_EDO: Tensor) -> Tensor:
        """Multiplies each row by its expert's transposed matrix, D columns."""
        ...

    def add_weight_gradient(self, into_EDO: Tensor, rows_ND: Tensor, rows_NO: Tensor) -> None:
        """Adds Σ rows_NDᵀ · rows_NO over each expert's rows to into[e]."""
        ...


class GroupedProducts(Backend):
    """Implements the operations on a library's operators."""

    @abstractmethod
    def operators(self, routes: SortedRoutes) -> Operators:
        """Returns the library's operators for one list of routes."""

    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        ops, gate = self.operators(call), call.gates(call.x_UD.dtype)[:, None]
        saved = ops.product(ops.gather_sources(call.x_UD), call.w_up_EDW).contiguous()
        z = saved[: call.num_routes]
        if call.b_up_EW is not None:
            z += call.b_up_EW.index_select(0, _experts(call))
        outputs = ops.product(hidden_in_place(z, call.activation) * gate, call.w_down_EFO)
        if call.b_down_EO is not None:
            bias = call.b_down_EO.index_select(0, _experts(call))
            outputs[: call.num_routes].addcmul_(gate, bias)
        return ops.add_to_targets(outputs), saved

    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.mlp_backward`.

        Computes the gate's gradient from hidden rows, d/dg (g·h·W) · dy = h · (dy·Wᵀ), so no output
        row is saved. The biases' gradients are grouped products with one column, not atomics, so
        they are deterministic.
        """
        ops, num_routes = self.operators(call), call.num_routes
        gate = call.gates(call.x_UD.dtype)[:, None]
        grad_b_up, grad_b_down = (
            None if b is None else torch.zeros_like(b) for b in (call.b_up_EW, call.b_down_EO)
        )
        dy = ops.gather_targets(grad_TO)
        h, pullback = hidden_and_pullback(saved[:num_routes], call.activation)
        d_gated = ops.product_transposed(dy, call.w_down_EFO)[:num_routes]
        grad_gate = (h * d_gated).sum(-1, dtype=call.weight_N.dtype)
        if call.b_down_EO is not None and grad_b_down is not None:
            grad_gate += ops.product(dy, call.b_down_EO[:, :, None])[:num_routes, 0]
            ops.add_weight_gradient(grad_b_down[:, None], gate, dy)
        into_up, into_down = into.weights
        ops.add_weight_gradient(into_down, h * gate, dy)
        d_z = pullback(d_gated * gate)
        if grad_b_up is not None:
            ops.add_weight_gradient(grad_b_up[:, None], torch.ones_like(gate), d_z)
        ops.add_weight_gradient(into_up, ops.gather_sources(call.x_UD), d_z)
        grad_rows = ops.product_transposed(d_z, call.w_up_EDW)
        grad_x = ops.add_to_sources(grad_rows, call.x_UD.shape[0])
        return RowGradients(grad_x, call.gate_gradient(grad_gate), grad_b_up, grad_b_down)

    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        ops, num_routes = self.operators(call), call.num_routes
        gate, x = call.gates(call.x_UD.dtype)[:, None], ops.gather_sources(call.x_UD)
        _, width_in, width_out = call.w_EDO.shape
        if width_out > width_in:
            outputs = ops.product(x[:num_routes] * gate, call.w_EDO)
            return ops.add_to_targets(outputs), x.new_empty(0)
        saved = ops.product(x, call.w_EDO).contiguous()
        return ops.add_to_targets(saved[:num_routes] * gate), saved

    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.linear_backward`; computes the gate's gradient on the narrow side."""
        ops, num_routes = self.operators(call), call.num_routes
        gate, dtype = call.gates(call.x_UD.dtype)[:, None], call.weight_N.dtype
        _, width_in, width_out = call.w_EDO.shape
        x = ops.gather_sources(call.x_UD)[:num_routes]
        dy = ops.gather_targets(grad_TO)[:num_routes]
        if width_out > width_in:
            d_x = ops.product_transposed(dy, call.w_EDO)[:num_routes]
            grad_gate = (x[:, : d_x.shape[1]] * d_x).sum(-1, dtype=dtype)
            d_x, x = d_x * gate, x * gate
        else:
            grad_gate = (saved[:num_routes] * dy[:, : saved.shape[1]]).sum(-1, dtype=dtype)
            dy = dy * gate
            d_x = ops.product_transposed(dy, call.w_EDO)
        ops.add_weight_gradient(into.weights[0], x, dy)
        grad_x = ops.add_to_sources(d_x, call.x_UD.shape[0])
        return RowGradients(grad_x, call.gate_gradient(grad_gate))


def _experts(routes: SortedRoutes) -> Tensor:
    """Returns the expert at each sorted place, (N,) int64, without host synchronisation."""
    places_N = torch.arange(routes.num_routes, device=routes.starts_E1.device, dtype=torch.int32)
    return torch.searchsorted(routes.starts_E1[1:], places_N, right=True)
