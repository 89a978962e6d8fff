"""The Triton backend of the expert operations: which kernels a call launches, and in which order.

    first       tile tables and sorted rows, once for all products over a list of routes
    forward     K1 (activation); K2 in route order; Rd over each target's outputs
    backward    K1 (hidden gradient, gate's gradient); K2 with w_up transposed; Rd over each
                source's; K3 twice

Nothing is read from the device: grids follow from the number of routes alone, so a call may be
captured in a CUDA graph. What lives longer than a call is `saved`. In between there is one N × D
tensor of outputs; `Options.scatter_add` avoids it.

Legend: U source rows, T targets, N routes, E experts, D input width, F hidden width, W columns
before the activation (F or 2F), O output width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activations import GATES
from ..calls import LinearCall, MLPBank, MLPCall, MLPGradients, SortedRoutes
from ..interface import ROW_SLACK
from .grouped_gemm import (
    fused_mlp,
    gathered_activation,
    gathered_gate,
    gathered_hidden_gradient,
    gathered_input_gradient,
    rows_product,
)
from .guard import check_tensor, launch, triton
from .routing import SortedRows, plan_of
from .rows import sum_rows
from .tiles import WIDEST_HIDDEN, Tile, choose
from .weight_gradients import (
    Operands,
    Work,
    cut_work,
    ragged_gradient,
    segment_sums,
    tile_of,
)


@dataclass(frozen=True)
class Options:
    """Asks the kernels for more than their defaults, which are deterministic and exact in float32.

    tf32: float32 products in TensorFloat-32.
    scatter_add: outputs are added to their targets by float32 atomics, not stored and summed: no
        N × O tensor, but another order of the sum each time.
    fused: the perceptron's forward is one kernel (K12), where its hidden rows are narrow enough.
    """

    tf32: bool = False
    scatter_add: bool = False
    fused: bool = False


DEFAULT = Options()


class _Pass:
    """Holds what the launches of one call share: sorted rows, tile tables, tiles."""

    def __init__(self, routes: SortedRoutes, rows: Tensor, options: Options) -> None:
        check_tensor(rows)
        self.routes, self.options, self.dtype = routes, options, rows.dtype
        self.num_experts = routes.starts_E1.shape[0] - 1
        self.precision = "tf32" if options.tf32 else "ieee"
        self._plan = plan_of(routes)

    @property
    def rows(self) -> SortedRows:
        return self._plan.rows(self.routes)

    def tile(self, kernel: str, **widths: int) -> Tile:
        return choose(kernel, self.dtype, self.routes.num_routes, self.num_experts).fit(**widths)

    def launch(
        self, kernel: Any, tile: Tile, column_tiles: int, *args: Any, **constants: Any
    ) -> None:
        """Launches one program per row tile and column tile.

        The row tiles' table goes last among the arguments.
        """
        table = self._plan.table(self.routes, tile.rows)
        index = (table.expert_L, table.first_L, self.routes.starts_E1)
        numbers = constants.pop("numbers", ())
        launch(
            kernel,
            table.length * column_tiles if self.routes.num_routes else 0,
            *args,
            *index,
            *numbers,
            **constants,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            PRECISION=self.precision,
            **tile.options(),
        )


@dataclass(frozen=True)
class _Destination:
    """Says where a product's outputs go: to rows in route order, or added to targets' rows."""

    out: Tensor
    out_rows: Tensor | None
    index_N: Tensor | None
    num_rows: int
    per_row: int
    add: bool
    dtype: torch.dtype

    def result(self) -> Tensor:
        """Returns the sums, (num_rows, O)."""
        return (
            self.out.to(self.dtype)
            if self.add
            else sum_rows(self.out, self.index_N, self.num_rows, self.per_row)
        )


def _towards(
    p: _Pass, like: Tensor, width: int, *, targets: bool, num_rows: int, stored: bool = False
) -> _Destination:
    """Allocates what a product's outputs are written to.

    `stored`: rows in route order whatever the options say; K1 has no other way to write, and its
    outputs are narrow.
    """
    routes = p.routes
    index_N, per_row = (
        (routes.target_N, routes.per_target) if targets else (routes.source_N, routes.per_source)
    )
    if p.options.scatter_add and not stored:
        out = torch.zeros(num_rows, width, dtype=torch.float32, device=like.device)
        out_rows = p.rows.target_N if targets else p.rows.source_N
        return _Destination(out, out_rows, index_N, num_rows, per_row, True, like.dtype)
    out = like.new_empty(routes.num_routes, width)
    return _Destination(out, routes.order_N, index_N, num_rows, per_row, False, like.dtype)


def mlp_forward(
    x_UD: Tensor, bank: MLPBank, routes: SortedRoutes, *, options: Options = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Implements `Backend.mlp_forward`.

    Returns y (T, O), and the saved rows (N + slack, W) in sorted order: relu's hidden rows, of
    others the rows before the activation.
    """
    p, x_UD, bank = _Pass(routes, x_UD, options), x_UD.contiguous(), _contiguous(bank)
    w_up, w_down = bank.w_up_EDW, bank.w_down_EFO
    (_, width_in, columns), (_, hidden_width, width_out) = w_up.shape, w_down.shape
    saved = x_UD.new_empty(routes.num_routes + ROW_SLACK, columns)
    to = _towards(p, x_UD, width_out, targets=True, num_rows=routes.num_targets)
    if options.fused and hidden_width <= WIDEST_HIDDEN:
        tile = p.tile(
            "fused_two" if bank.activation in GATES else "fused", columns=width_out, depth=width_in
        )
        p.launch(
            fused_mlp,
            tile,
            1,
            x_UD,
            p.rows.source_N,
            w_up,
            bank.b_up_EW,
            saved,
            w_down,
            bank.b_down_EO,
            p.rows.gate_N,
            to.out,
            to.out_rows,
            D=width_in,
            F=hidden_width,
            OUT=width_out,
            ACT=bank.activation,
            ADD=to.add,
            HIDDEN=max(16, triton.next_power_of_2(hidden_width)),
        )
        return to.result(), saved
    hidden = None if bank.activation == "relu" else x_UD.new_empty(routes.num_routes, hidden_width)
    kind = "gather_two" if bank.activation in GATES else "gather"
    tile = p.tile(kind, columns=hidden_width, depth=width_in)
    p.launch(
        gathered_activation,
        tile,
        triton.cdiv(hidden_width, tile.columns),
        x_UD,
        p.rows.source_N,
        w_up,
        bank.b_up_EW,
        saved,
        hidden,
        D=width_in,
        F=hidden_width,
        ACT=bank.activation,
    )
    rows = saved if hidden is None else hidden
    _rows_product(p, rows, None, w_down, to, transposed=False, gated=True, bias=bank.b_down_EO)
    return to.result(), saved


def mlp_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    bank: MLPBank,
    routes: SortedRoutes,
    saved: Tensor,
    into: MLPGradients,
    *,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Implements `Backend.mlp_backward`."""
    p = _Pass(routes, grad_TO, options)
    grad_x, grad_weight_N, b_up, b_down, d_z = _mlp_rows(p, grad_TO, x_UD, bank, saved)
    _mlp_weights([MLPCall(grad_TO, x_UD, routes, saved, d_z, bank)], [p], into)
    return grad_x, grad_weight_N, b_up, b_down


def mlp_backward_rows(
    grad_TO: Tensor,
    x_UD: Tensor,
    bank: MLPBank,
    routes: SortedRoutes,
    saved: Tensor,
    *,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Implements `DefersWeightGradients.mlp_backward_rows`.

    Its last result is d_z (N + slack, W), the gradient of the rows before the activation.
    """
    return _mlp_rows(_Pass(routes, grad_TO, options), grad_TO, x_UD, bank, saved)


def _mlp_rows(
    p: _Pass, grad_TO: Tensor, x_UD: Tensor, bank: MLPBank, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    routes, grad_TO, bank = p.routes, grad_TO.contiguous(), _contiguous(bank)
    width_in, (_, hidden_width, width_out) = bank.w_up_EDW.shape[1], bank.w_down_EFO.shape
    d_z = torch.empty_like(saved)
    tile = p.tile(
        "gather_back" if bank.activation == "relu" else "gather_back_smooth",
        columns=hidden_width,
        depth=width_out,
    )
    parts = triton.cdiv(hidden_width, tile.columns)
    grad_gate = torch.empty(parts, routes.num_routes, dtype=torch.float32, device=saved.device)
    p.launch(
        gathered_hidden_gradient,
        tile,
        parts,
        grad_TO,
        p.rows.target_N,
        bank.w_down_EFO,
        bank.b_down_EO,
        saved,
        p.rows.gate_N,
        d_z,
        grad_gate,
        routes.order_N,
        numbers=(routes.num_routes,),
        OUT=width_out,
        F=hidden_width,
        ACT=bank.activation,
    )
    to = _towards(p, grad_TO, width_in, targets=False, num_rows=x_UD.shape[0])
    _rows_product(p, d_z, None, bank.w_up_EDW, to, transposed=True, gated=False)
    b_up = None if bank.b_up_EW is None else segment_sums(d_z, None, None, routes.starts_E1)
    b_down = None
    if bank.b_down_EO is not None:
        b_down = segment_sums(grad_TO, p.rows.target_N, p.rows.gate_N, routes.starts_E1)
    return to.result(), _sum_parts(p, grad_gate), b_up, b_down, d_z


def mlp_weight_gradients(
    calls: Sequence[MLPCall], *, options: Options = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of w_up and w_down: one product each, added up in float32."""
    return _mlp_weights(calls, [_Pass(call.routes, call.x_UD, options) for call in calls], None)


def _mlp_weights(
    calls: Sequence[MLPCall], passes: Sequence[_Pass], into: MLPGradients | None
) -> tuple[Tensor, Tensor]:
    bank, up, down = calls[0].bank, [], []
    for call, p in zip(calls, passes, strict=True):
        starts_E1, rows = call.routes.starts_E1, p.rows
        up.append(Operands(_aligned(call.x_UD), call.d_z, rows.source_N, None, None, starts_E1))
        down.append(
            Operands(
                call.saved, _aligned(call.grad_TO), None, rows.target_N, rows.gate_N, starts_E1
            )
        )
    activation = None if bank.activation == "relu" else bank.activation
    into_up, into_down = (None, None) if into is None else (into.w_up_EDW, into.w_down_EFO)
    common = _ragged(passes, bank.w_up_EDW)
    w_up = ragged_gradient(up, *common, bank.w_up_EDW, into=into_up)
    w_down = ragged_gradient(down, *common, bank.w_down_EFO, into=into_down, activation=activation)
    return w_up, w_down


def linear_forward(
    x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes, *, options: Options = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_forward`."""
    p, x_UD, w_EDO = _Pass(routes, x_UD, options), x_UD.contiguous(), w_EDO.contiguous()
    _, width_in, width_out = w_EDO.shape
    if width_out > width_in:
        to = _towards(p, x_UD, width_out, targets=True, num_rows=routes.num_targets)
        _rows_product(p, x_UD, p.rows.source_N, w_EDO, to, transposed=False, gated=True)
        return to.result(), x_UD.new_empty(0)
    saved = x_UD.new_empty(routes.num_routes + ROW_SLACK, width_out)
    to = _towards(p, x_UD, width_out, targets=True, num_rows=routes.num_targets, stored=True)
    tile = p.tile("gather", columns=width_out, depth=width_in)
    p.launch(
        gathered_gate,
        tile,
        triton.cdiv(width_out, tile.columns),
        x_UD,
        p.rows.source_N,
        w_EDO,
        p.rows.gate_N,
        saved,
        to.out,
        to.out_rows,
        D=width_in,
        OUT=width_out,
    )
    return to.result(), saved


def linear_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_EDO: Tensor,
    routes: SortedRoutes,
    saved: Tensor,
    into_EDO: Tensor,
    *,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_backward`."""
    p = _Pass(routes, grad_TO, options)
    rows = _linear_rows(p, grad_TO, x_UD, w_EDO, saved)
    _linear_weights([LinearCall(grad_TO, x_UD, routes, w_EDO)], [p], into_EDO)
    return rows


def linear_backward_rows(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_EDO: Tensor,
    routes: SortedRoutes,
    saved: Tensor,
    *,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Implements `DefersWeightGradients.linear_backward_rows`.

    The gate's gradient is taken on whichever side is narrow.
    """
    return _linear_rows(_Pass(routes, grad_TO, options), grad_TO, x_UD, w_EDO, saved)


def _linear_rows(
    p: _Pass, grad_TO: Tensor, x_UD: Tensor, w_EDO: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    routes, grad_TO, w_EDO = p.routes, grad_TO.contiguous(), w_EDO.contiguous()
    _, width_in, width_out = w_EDO.shape
    device = grad_TO.device
    if width_out <= width_in:
        to = _towards(p, grad_TO, width_in, targets=False, num_rows=x_UD.shape[0])
        grad_gate = torch.empty(1, routes.num_routes, dtype=torch.float32, device=device)
        _rows_product(
            p,
            grad_TO,
            p.rows.target_N,
            w_EDO,
            to,
            transposed=True,
            gated=True,
            saved=saved,
            grad_gate=grad_gate,
        )
        return to.result(), _sum_parts(p, grad_gate)
    to = _towards(p, grad_TO, width_in, targets=False, num_rows=x_UD.shape[0], stored=True)
    tile = p.tile("gather_back", columns=width_in, depth=width_out)
    parts = triton.cdiv(width_in, tile.columns)
    grad_gate = torch.empty(parts, routes.num_routes, dtype=torch.float32, device=device)
    p.launch(
        gathered_input_gradient,
        tile,
        parts,
        grad_TO,
        p.rows.target_N,
        w_EDO,
        x_UD.contiguous(),
        p.rows.source_N,
        p.rows.gate_N,
        to.out,
        grad_gate,
        to.out_rows,
        numbers=(routes.num_routes,),
        OUT=width_out,
        D=width_in,
    )
    return to.result(), _sum_parts(p, grad_gate)


def linear_weight_gradients(
    calls: Sequence[LinearCall], *, options: Options = DEFAULT
) -> tuple[Tensor]:
    """Computes the gradient of w over all calls: one product, added up in float32."""
    return (
        _linear_weights(calls, [_Pass(call.routes, call.x_UD, options) for call in calls], None),
    )


def _linear_weights(
    calls: Sequence[LinearCall], passes: Sequence[_Pass], into: Tensor | None
) -> Tensor:
    w_EDO = calls[0].w_EDO
    operands = [
        Operands(
            _aligned(call.x_UD),
            _aligned(call.grad_TO),
            p.rows.source_N,
            p.rows.target_N,
            p.rows.gate_N,
            call.routes.starts_E1,
        )
        for call, p in zip(calls, passes, strict=True)
    ]
    return ragged_gradient(operands, *_ragged(passes, w_EDO), w_EDO, into=into)


def _ragged(passes: Sequence[_Pass], weights: Tensor) -> tuple[Work, str]:
    """What K3 shares between the matrices of a bank: how the rows are cut, and the precision.

    `weights`: one of them.
    """
    num_rows = sum(p.routes.num_routes for p in passes)
    _, tiles = tile_of(weights, num_rows, None)
    work = cut_work([p.routes.starts_E1 for p in passes], num_rows, tiles=tiles)
    return work, passes[0].precision


def _rows_product(
    p: _Pass,
    rows: Tensor,
    row_index: Tensor | None,
    w: Tensor,
    to: _Destination,
    *,
    transposed: bool,
    gated: bool,
    bias: Tensor | None = None,
    saved: Tensor | None = None,
    grad_gate: Tensor | None = None,
) -> None:
    """K2, towards `to`."""
    inner, out = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
    tile = p.tile("rows", columns=out, depth=inner)
    p.launch(
        rows_product,
        tile,
        1,
        rows,
        row_index,
        w,
        bias,
        p.rows.gate_N if gated else None,
        to.out,
        to.out_rows,
        saved,
        grad_gate,
        None if saved is None else p.routes.order_N,
        K=inner,
        OUT=out,
        TRANSPOSED=transposed,
        ADD=to.add,
    )


def _sum_parts(p: _Pass, parts: Tensor) -> Tensor:
    """(column tiles, N) to (N,), in order, in the gate weights' dtype."""
    return (parts[0] if parts.shape[0] == 1 else parts.sum(0)).to(p.routes.weight_N.dtype)


def _contiguous(bank: MLPBank) -> MLPBank:
    b_up, b_down = (
        None if bias is None else bias.contiguous() for bias in (bank.b_up_EW, bank.b_down_EO)
    )
    return MLPBank(
        bank.w_up_EDW.contiguous(), bank.w_down_EFO.contiguous(), b_up, b_down, bank.activation
    )


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows
