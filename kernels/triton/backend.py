"""The `triton` backend: the kernels that a call launches, in order.

    forward     K1 (activation); K2 in route order; Rd sums each target's outputs
    backward    K1 (gradients of hidden rows and gates); K2 with w_up transposed; Rd sums each
                source's gradients; K3 twice

Grids depend only on the number of routes, so nothing is read from the device and a call can be
captured in a CUDA graph. Only `saved` outlives a call. A call allocates one N × D tensor of outputs.

Legend: U source rows, T targets, N routes, E experts, D input width, F hidden width, W columns
before the activation (F or 2F), O output width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls import (
    ROW_SLACK,
    Deferred,
    DeferringBackend,
    GradientBuffers,
    LinearCall,
    MLPCall,
    RowGradients,
    SortedRoutes,
)
from ..reference import GATES
from .grouped_gemm import (
    gathered_activation,
    gathered_gate,
    gathered_hidden_gradient,
    gathered_input_gradient,
    rows_product,
)
from .guard import cdiv, launch
from .routing import experts_of, num_tiles, sum_rows
from .tiles import Tile, choose
from .weight_gradients import Operands, aligned, chunk_of, ragged_gradient, segment_sums


class TritonKernels(DeferringBackend):
    """Implements the operations with Triton kernels, in float32 (exact) and bfloat16."""

    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        """Implements `Backend.mlp_forward`.

        The saved rows (N + slack, W) are the hidden rows for relu, else the rows before the
        activation.
        """
        products, x_UD = _Products(call, call.x_UD), call.x_UD
        _, width_in, columns = call.w_up_EDW.shape
        _, hidden_width, width_out = call.w_down_EFO.shape
        saved = x_UD.new_empty(call.num_routes + ROW_SLACK, columns)
        hidden = None
        if call.activation != "relu":
            hidden = x_UD.new_empty(call.num_routes, hidden_width)
        kind = "gather_two" if call.activation in GATES else "gather"
        tile = products.tile(kind, columns=hidden_width, depth=width_in)
        products.launch(
            gathered_activation,
            tile,
            cdiv(hidden_width, tile.columns),
            *(x_UD, call.order_N, call.source_N, call.w_up_EDW, call.b_up_EW, saved, hidden),
            D=width_in,
            F=hidden_width,
            ACT=call.activation,
            PER_SOURCE=call.per_source,
        )
        out_NO = x_UD.new_empty(call.num_routes, width_out)
        rows = saved if hidden is None else hidden
        products.narrow_to_wide(rows, call.w_down_EFO, out_NO, bias=call.b_down_EO)
        return _sum_to_targets(out_NO, call), saved

    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        found = self.mlp_backward_rows(call, grad_TO, saved)
        _mlp_weight_gradients([Deferred(call, grad_TO, saved, found.z_NW)], into)
        return found

    def mlp_backward_rows(self, call: MLPCall, grad_TO: Tensor, saved: Tensor) -> RowGradients:
        products = _Products(call, grad_TO)
        width_in, (_, hidden_width, width_out) = call.w_up_EDW.shape[1], call.w_down_EFO.shape
        d_z = torch.empty_like(saved)
        kind = "gather_back" if call.activation == "relu" else "gather_back_smooth"
        tile = products.tile(kind, columns=hidden_width, depth=width_out)
        grad_gate = products.new_gate_gradient(cdiv(hidden_width, tile.columns))
        products.launch(
            gathered_hidden_gradient,
            tile,
            len(grad_gate),
            *(grad_TO, call.order_N, call.target_N, call.w_down_EFO, call.b_down_EO, saved),
            *(call.weight_N, d_z, grad_gate),
            numbers=(call.num_routes,),
            OUT=width_out,
            F=hidden_width,
            ACT=call.activation,
            PER_TARGET=call.per_target,
        )
        out_ND = grad_TO.new_empty(call.num_routes, width_in)
        products.narrow_to_wide(d_z, call.w_up_EDW, out_ND, transposed=True, gated=False)
        b_up = None if call.b_up_EW is None else segment_sums(d_z, call, of_targets=False)
        b_down = None if call.b_down_EO is None else segment_sums(grad_TO, call, of_targets=True)
        grad_x = _sum_to_sources(out_ND, call, call.x_UD.shape[0])
        return RowGradients(grad_x, _sum_parts(grad_gate, call), b_up, b_down, d_z)

    def mlp_weight_gradients(self, calls: Sequence[Deferred[MLPCall]]) -> tuple[Tensor, Tensor]:
        return _mlp_weight_gradients(calls, None)

    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        products, x_UD = _Products(call, call.x_UD), call.x_UD
        _, width_in, width_out = call.w_EDO.shape
        out_NO = x_UD.new_empty(call.num_routes, width_out)
        if width_out > width_in:
            index = call.source_N, call.per_source
            products.narrow_to_wide(x_UD, call.w_EDO, out_NO, index=index)
            return _sum_to_targets(out_NO, call), x_UD.new_empty(0)
        saved = x_UD.new_empty(call.num_routes + ROW_SLACK, width_out)
        tile = products.tile("gather", columns=width_out, depth=width_in)
        products.launch(
            gathered_gate,
            tile,
            cdiv(width_out, tile.columns),
            *(x_UD, call.order_N, call.source_N, call.w_EDO, call.weight_N, saved, out_NO),
            D=width_in,
            OUT=width_out,
            PER_SOURCE=call.per_source,
        )
        return _sum_to_targets(out_NO, call), saved

    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        found = self.linear_backward_rows(call, grad_TO, saved)
        _linear_weight_gradient([Deferred(call, grad_TO, saved)], into)
        return found

    def linear_backward_rows(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor
    ) -> RowGradients:
        """Implements `linear_backward_rows`; computes the gate's gradient on the narrow side."""
        products = _Products(call, grad_TO)
        x_UD, (_, width_in, width_out) = call.x_UD, call.w_EDO.shape
        out_ND = grad_TO.new_empty(call.num_routes, width_in)
        if width_out <= width_in:
            grad_gate = products.new_gate_gradient(1)
            products.narrow_to_wide(
                *(grad_TO, call.w_EDO, out_ND),
                index=(call.target_N, call.per_target),
                transposed=True,
                saved=saved,
                grad_gate=grad_gate,
            )
        else:
            tile = products.tile("gather_back", columns=width_in, depth=width_out)
            grad_gate = products.new_gate_gradient(cdiv(width_in, tile.columns))
            products.launch(
                gathered_input_gradient,
                tile,
                len(grad_gate),
                *(grad_TO, call.order_N, call.target_N, call.w_EDO, x_UD, call.source_N),
                *(call.weight_N, out_ND, grad_gate),
                numbers=(call.num_routes,),
                OUT=width_out,
                D=width_in,
                PER_SOURCE=call.per_source,
                PER_TARGET=call.per_target,
            )
        grad_x = _sum_to_sources(out_ND, call, x_UD.shape[0])
        return RowGradients(grad_x, _sum_parts(grad_gate, call))

    def linear_weight_gradients(self, calls: Sequence[Deferred[LinearCall]]) -> tuple[Tensor]:
        return (_linear_weight_gradient(calls, None),)


class _Products:
    """Launches the products of one call."""

    def __init__(self, call: SortedRoutes, rows: Tensor) -> None:
        self._routes, self._dtype = call, rows.dtype

    def tile(self, kernel: str, **widths: int) -> Tile:
        routes = self._routes
        return choose(kernel, self._dtype, routes.num_routes, routes.num_experts).fit(**widths)

    def new_gate_gradient(self, parts: int) -> Tensor:
        """Allocates partial sums of the gates' gradients, one per column tile, (parts, N)."""
        device = self._routes.weight_N.device
        return torch.empty(parts, self._routes.num_routes, dtype=torch.float32, device=device)

    def launch(
        self, kernel: Any, tile: Tile, column_tiles: int, *args: Any, **constants: Any
    ) -> None:
        """Launches one program per row tile and column tile; the experts' starts are the last argument."""
        num_routes, num_experts = self._routes.num_routes, self._routes.num_experts
        launch(
            kernel,
            num_tiles(num_routes, num_experts, tile.rows) * column_tiles if num_routes else 0,
            *(*args, self._routes.starts_E1, *constants.pop("numbers", ())),
            **constants,
            **experts_of(num_experts),
            **tile.options(),
        )

    def narrow_to_wide(
        self,
        rows: Tensor,
        w: Tensor,
        out: Tensor,
        *,
        index: tuple[Tensor | None, int] = (None, 0),
        transposed: bool = False,
        gated: bool = True,
        bias: Tensor | None = None,
        saved: Tensor | None = None,
        grad_gate: Tensor | None = None,
    ) -> None:
        """Launches K2, which writes outputs in route order so that each target's are contiguous.

        `index` is a route's row by index or by rule; without it the rows are sorted.
        """
        inner, wide = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
        (index_N, per_row), routes = index, self._routes
        self.launch(
            rows_product,
            self.tile("rows", columns=wide, depth=inner),
            1,
            *(rows, routes.order_N, index_N, w, bias, routes.weight_N if gated else None, out),
            *(saved, grad_gate),
            K=inner,
            OUT=wide,
            PER=per_row,
            TRANSPOSED=transposed,
        )


def _sum_to_targets(out_NO: Tensor, call: SortedRoutes) -> Tensor:
    return sum_rows(out_NO, call.target_N, call.num_targets, call.per_target)


def _sum_to_sources(out_ND: Tensor, call: SortedRoutes, num_sources: int) -> Tensor:
    return sum_rows(out_ND, call.source_N, num_sources, call.per_source)


def _sum_parts(parts: Tensor, call: SortedRoutes) -> Tensor:
    """Sums (column tiles, N) to (N,) in order, in the gate weights' dtype."""
    return (parts[0] if len(parts) == 1 else parts.sum(0)).to(call.weight_N.dtype)


# K3 -----------------------------------------------------------------------------------------------


def _mlp_weight_gradients(
    calls: Sequence[Deferred[MLPCall]], into: GradientBuffers | None
) -> tuple[Tensor, Tensor]:
    """Computes both gradients over all calls, summed in float32, and adds them to `into` if given."""
    first, up, down = calls[0].call, list[Operands](), list[Operands]()
    for each in calls:
        assert each.z_NW is not None, "perceptrons have it"
        up.append(Operands(aligned(each.call.x_UD), each.z_NW, each.call))
        down.append(Operands(each.saved, aligned(each.grad_TO), each.call))
    activation = None if first.activation == "relu" else first.activation
    into_up, into_down = (None, None) if into is None else into.weights
    chunk = chunk_of(up, first.w_up_EDW)
    w_up = ragged_gradient(up, first.w_up_EDW, chunk, of_targets=False, into=into_up)
    w_down = ragged_gradient(
        down, first.w_down_EFO, chunk, of_sources=False, into=into_down, activation=activation
    )
    return w_up, w_down


def _linear_weight_gradient(
    calls: Sequence[Deferred[LinearCall]], into: GradientBuffers | None
) -> Tensor:
    operands, w_EDO = list[Operands](), calls[0].call.w_EDO
    for each in calls:
        operands.append(Operands(aligned(each.call.x_UD), aligned(each.grad_TO), each.call))
    [into_EDO] = [None] if into is None else into.weights
    return ragged_gradient(operands, w_EDO, chunk_of(operands, w_EDO), into=into_EDO)
