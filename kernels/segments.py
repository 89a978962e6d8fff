"""The `segments` backend: matrix products one expert at a time, with a hand-written backward.

Plain torch operations for every device and dtype. Flow of a call:
  1. the routes arrive sorted by expert (sorted once per routing, also for the backward). Their
     counts are read on the host, unless the routes have `per_expert`;
  2. per expert, in chunks of at most 512 rows: gather, products, activation, and the gate weight on
     the narrow side;
  3. sum the outputs of each target row, in route order.

Saved for the backward: x, the index and the hidden rows (N × F). For activations other than relu it
is the rows before the activation, (N × F) or gated (N × 2F); the backward recomputes the hidden
rows. No N × D tensor outlives the call: on CPUs such rows use a shared workspace (cpu/library.py),
because the first touch of fresh memory costs ten times the copy. The weights' gradients are added to
the caller's buffers, so a weight that serves many depth steps has one buffer.

Row counts are padded: a chunk's tail extends into the next expert's rows, which that expert then
overwrites; sums over a chunk's rows zero both operands there. oneDNN compiles a kernel for every new
row count (about 0.6 ms), and dropless routing produces new counts at every step, so half precision
is padded to multiples of 64. MKL's float32 product rounds a thread's last 1 to 3 rows differently,
so float32 is padded to multiples of 4. At some shapes a row's result still depends on its neighbours
(docs/measured.md says what is promised).

For the same reason rows are aligned to 16 bytes: MKL takes other code paths, with other rounding,
for unaligned rows. Rows of odd widths (in float32, no multiple of 4) are padded in memory at the
cost of some copies; other widths cost nothing. Half precision goes through oneDNN, which is not
affected. (GPU libraries choose kernels by shape and give no such guarantee.)

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .calls import (
    ROW_SLACK,
    Backend,
    GradientBuffers,
    LinearCall,
    MLPCall,
    RowGradients,
    SortedRoutes,
)
from .cpu.library import workspace
from .permute import sum_to_sources, sum_to_targets
from .reference import hidden_and_pullback, hidden_in_place

_ALIGNMENT_BYTES = 16
_CHUNK = 512  # rows: gathered rows stay in the L2 cache


class Segments(Backend):
    """Implements the operations in plain torch, for every device and dtype."""

    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        x_UD, width_out = call.x_UD, call.w_down_EFO.shape[2]
        source_rows = _padded_rows(call.source_rows())
        gate = _padded_rows(call.gates(x_UD.dtype))
        x_rows = _with_aligned_rows(x_UD)
        saved = x_UD.new_empty(len(gate), call.w_up_EDW.shape[2])
        outputs = _output_rows(x_UD, width_out, call.place_N, call.per_target, len(gate))
        w_up, w_down = call.w_up_EDW.unbind(0), call.w_down_EFO.unbind(0)
        for expert, rows, _ in _chunks(call, x_UD):
            g, x = gate[rows, None], _gather("x", x_rows, source_rows[rows])
            z = saved[rows]
            if not _is_aligned(saved):
                z = _aligned_rows("z", x_UD, len(x), saved.shape[1])
            torch.mm(x, w_up[expert], out=z)
            if call.b_up_EW is not None:
                z += call.b_up_EW[expert]
            h = hidden_in_place(z, call.activation)
            if not _is_aligned(saved):
                saved[rows] = z
            gated = _aligned_product("gated", torch.mul, h, g, width=h.shape[1])
            output = torch.mm(gated, w_down[expert], out=outputs[rows])
            if call.b_down_EO is not None:
                output += g * call.b_down_EO[expert]
        return _sum_to_targets(outputs, call), saved

    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.mlp_backward`.

        Computes the gate's gradient from hidden rows, d/dg (g·h·W) · dy = h · (dy·Wᵀ), so no output
        row is saved.
        """
        x_UD = call.x_UD
        source_rows = _padded_rows(call.source_rows())
        target_rows = _padded_rows(call.target_rows())
        gate = _padded_rows(call.gates(x_UD.dtype))
        x_rows, dy_rows = _with_aligned_rows(x_UD), _with_aligned_rows(grad_TO)
        grad_rows = _output_rows(x_UD, x_UD.shape[1], call.place_N, call.per_source, len(gate))
        grad_gate = torch.zeros_like(gate)
        grad_b_up, grad_b_down = (
            None if b is None else torch.zeros_like(b) for b in (call.b_up_EW, call.b_down_EO)
        )
        w_up, w_down = call.w_up_EDW.unbind(0), call.w_down_EFO.unbind(0)
        grad_up, grad_down = (each.unbind(0) for each in into.weights)
        for expert, rows, count in _chunks(call, x_UD):
            g, dy = gate[rows, None], _gather("dy", dy_rows, target_rows[rows])
            h, pullback = hidden_and_pullback(saved[rows], call.activation)
            d_gated = _aligned_product("d_gated", torch.mm, dy, w_down[expert].T, width=h.shape[1])
            grad_gate[rows] = (h * d_gated).sum(-1)
            if call.b_down_EO is not None and grad_b_down is not None:
                grad_gate[rows] += (dy * call.b_down_EO[expert]).sum(-1)
                grad_b_down[expert] += torch.sum((dy * g)[:count], 0)
            d_z = pullback(d_gated.mul_(g))
            if grad_b_up is not None:
                grad_b_up[expert] += torch.sum(d_z[:count], 0)
            gated, x = h * g, _gather("x", x_rows, source_rows[rows])
            _clear_surplus(count, dy, gated, x, d_z)
            _add_product(grad_down[expert], gated.T, dy)
            _add_product(grad_up[expert], x.T, d_z)
            if not _is_aligned(d_z):
                d_z = _aligned_rows("d_z", d_z, *d_z.shape).copy_(d_z)
            torch.mm(d_z, w_up[expert].T, out=grad_rows[rows])
        grad_x = _sum_to_sources(grad_rows, call, x_UD.shape[0])
        return RowGradients(grad_x, call.gate_gradient(grad_gate), grad_b_up, grad_b_down)

    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        x_UD, (_, width_in, width_out) = call.x_UD, call.w_EDO.shape
        source_rows = _padded_rows(call.source_rows())
        gate = _padded_rows(call.gates(x_UD.dtype))
        narrow_output = width_out <= width_in
        x_rows, w = _with_aligned_rows(x_UD), call.w_EDO.unbind(0)
        if narrow_output:
            outputs = _new_aligned_rows(x_UD, len(gate), width_out)
        else:
            outputs = _output_rows(x_UD, width_out, call.place_N, call.per_target, len(gate))
        for expert, rows, _ in _chunks(call, x_UD):
            x = _gather("x", x_rows, source_rows[rows])
            torch.mm(x if narrow_output else x.mul_(gate[rows, None]), w[expert], out=outputs[rows])
        if not narrow_output:
            return _sum_to_targets(outputs, call), x_UD.new_empty(0)
        return _sum_to_targets(outputs * gate[:, None], call), outputs.contiguous()

    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.linear_backward`; computes the gate's gradient on the narrow side."""
        x_UD, (_, width_in, width_out) = call.x_UD, call.w_EDO.shape
        source_rows = _padded_rows(call.source_rows())
        target_rows = _padded_rows(call.target_rows())
        gate = _padded_rows(call.gates(x_UD.dtype))
        x_rows, dy_rows = _with_aligned_rows(x_UD), _with_aligned_rows(grad_TO)
        grad_rows = _output_rows(x_UD, width_in, call.place_N, call.per_source, len(gate))
        grad_gate = torch.zeros_like(gate)
        w, grad_w = call.w_EDO.unbind(0), into.weights[0].unbind(0)
        for expert, rows, count in _chunks(call, x_UD):
            x = _gather("x", x_rows, source_rows[rows])
            dy = _gather("dy", dy_rows, target_rows[rows])
            g = gate[rows, None]
            if width_out <= width_in:
                grad_gate[rows] = (saved[rows] * dy).sum(-1)
                dy.mul_(g)
                torch.mm(dy, w[expert].T, out=grad_rows[rows])
            else:
                d_x = torch.mm(dy, w[expert].T, out=grad_rows[rows])
                grad_gate[rows] = (x * d_x).sum(-1)
                d_x.mul_(g)
                x.mul_(g)
            _clear_surplus(count, x, dy)
            _add_product(grad_w[expert], x.T, dy)
        grad_x = _sum_to_sources(grad_rows, call, x_UD.shape[0])
        return RowGradients(grad_x, call.gate_gradient(grad_gate))


def _chunks(routes: SortedRoutes, like: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Yields each expert's chunks: (expert, rows with padding, number of its own rows)."""
    quantum = _quantum(like)
    for expert, (start, end) in enumerate(itertools.pairwise(routes.starts())):
        for first in range(start, end, _CHUNK):
            count = min(end - first, _CHUNK)
            yield expert, slice(first, first - (-count // quantum) * quantum), count


def _quantum(like: Tensor) -> int:
    """Returns the multiple to which row counts are padded."""
    return ROW_SLACK if like.dtype in (torch.bfloat16, torch.float16) else 4


def _clear_surplus(count: int, *rows: Tensor) -> None:
    """Zeros the next expert's rows in both operands of a sum over a chunk; NaN · 0 would be NaN."""
    for values in rows:
        if len(values) > count:
            values[count:] = 0


def _padded_rows(values_N: Tensor) -> Tensor:
    """Appends zeros for the slack rows (row 0 exists if there is a route)."""
    return torch.cat((values_N, values_N.new_zeros(ROW_SLACK)))


def _gather(name: str, rows_UD: Tensor, index: Tensor) -> Tensor:
    """Gathers rows[index], aligned like `rows_UD`, into the workspace `name`."""
    full, width = _full_rows(rows_UD), rows_UD.shape[1]
    out = workspace(name, (index.shape[0], full.shape[1]), full)
    torch.index_select(full, 0, index, out=out)
    return out if full is rows_UD else out[:, :width]


def _output_rows(
    like: Tensor, width: int, place_N: Tensor | None, per_row: int, num_rows: int
) -> Tensor:
    """Allocates rows to be summed at the end of the call.

    Uses a workspace unless `add_rows` may return a view of the rows.
    """
    if place_N is None and per_row <= 1:
        return _new_aligned_rows(like, num_rows, width)
    return _aligned_rows("outputs", like, num_rows, width)


def _sum_to_targets(rows_NO: Tensor, routes: SortedRoutes) -> Tensor:
    """Sums rows with their padding columns, because `add_rows` would copy a view."""
    return sum_to_targets(_full_rows(rows_NO), routes)[:, : rows_NO.shape[1]].contiguous()


def _sum_to_sources(rows_ND: Tensor, routes: SortedRoutes, num_sources: int) -> Tensor:
    summed = sum_to_sources(_full_rows(rows_ND), routes, num_sources)
    return summed[:, : rows_ND.shape[1]].contiguous()


# Aligned rows -------------------------------------------------------------------------------------


def _stride(width: int, like: Tensor) -> int:
    """Returns the stride, in elements, of an aligned row of `width` columns."""
    if like.device.type != "cpu" or like.element_size() < 4:
        return width
    step = _ALIGNMENT_BYTES // like.element_size()
    return -(-width // step) * step


def _is_aligned(rows: Tensor) -> bool:
    """Returns whether every row is aligned to _ALIGNMENT_BYTES if the first one is."""
    return _stride(rows.stride(0), rows) == rows.stride(0)


def _new_aligned_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    return like.new_empty(num_rows, _stride(width, like))[:, :width]


def _aligned_rows(name: str, like: Tensor, num_rows: int, width: int) -> Tensor:
    """Returns uninitialised aligned rows in the workspace `name`."""
    return workspace(name, (num_rows, _stride(width, like)), like)[:, :width]


def _aligned_product(
    name: str, multiply: Callable[..., Tensor], left: Tensor, right: Tensor, *, width: int
) -> Tensor:
    """Computes a product with aligned rows, in the workspace `name` if its width needs padding."""
    if _stride(width, left) == width:
        return multiply(left, right)
    return multiply(left, right, out=_aligned_rows(name, left, len(left), width))


def _with_aligned_rows(rows: Tensor) -> Tensor:
    """Returns contiguous rows, or an aligned copy if their width needs padding."""
    num_rows, width = rows.shape
    if _stride(width, rows) == width:
        return rows
    return _new_aligned_rows(rows, num_rows, width).copy_(rows)


def _full_rows(rows: Tensor) -> Tensor:
    """Returns aligned rows with their undefined padding columns; other rows unchanged."""
    num_rows, width = rows.shape
    stride = _stride(width, rows)
    if width == stride or rows.stride(0) != stride:
        return rows
    return rows.as_strided((num_rows, stride), (stride, 1))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product to a matrix of a bank, which may be unaligned if the sizes are odd."""
    if _stride(into.numel(), into) == into.numel():
        into.addmm_(left, right)
    else:
        into += left @ right
