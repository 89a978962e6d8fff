"""The expert operations over rows sorted by expert: matrix products over one expert's rows at a
time, backward by hand.

Plain torch operations, for every device and dtype. Flow of a call:
  1. the routes come sorted by expert (once per routing; the backward uses the same order). Their
     counts are read on the host, unless the routes have `per_expert`;
  2. per expert, in chunks of at most 512 rows: gather its rows, the products, the activation, the
     gate weight on the narrow side;
  3. the outputs of a target row are added in route order, so the result does not depend on how rows
     were grouped.

Saved for the backward: x, the index and the hidden rows (N × F); of an activation other than relu
the rows before it, (N × F) or gated (N × 2F), from which the backward makes the hidden rows anew.
No N × D tensor outlives the call: on CPUs such rows lie in a workspace that all calls share
(workspace.py), for the first touch of fresh memory costs ten times the copy. The weights' gradients
are added where the caller says, so a weight that serves many depth steps has one buffer.

Row counts are quantised: a chunk's tail runs on into the next expert's rows, which that expert then
overwrites; in sums over a chunk's rows both sides are zero there. Two reasons. oneDNN compiles a
kernel for every new row count (about 0.6 ms), and dropless routing makes new counts at every step,
so bfloat16 is padded to multiples of 64, and so is float32 where it goes through oneDNN
(onednn.py). MKL's float32 product gives another rounding to a thread's last 1 to 3 rows, so float32
is padded to multiples of 4: a row's result then never depends on its neighbours, which makes expert
parallelism on CPUs bitwise equal to one rank.
(A GPU's libraries choose their kernels by shape and promise nothing of the kind.)

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .activations import hidden_and_pullback, hidden_in_place
from .interface import ROW_SLACK
from .onednn import float32_is_onednn
from .operands import MLPBank, MLPGradients, SortedRoutes
from .permute import add_rows
from .workspace import workspace

_CHUNK = 512  # rows: what is gathered stays in the second-level cache


def mlp_forward(x_UD: Tensor, bank: MLPBank, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.mlp_forward`."""
    source_rows, gate = _padded_rows(routes.source_rows()), _padded_rows(routes.gates(x_UD.dtype))
    saved = x_UD.new_empty(len(gate), bank.w_up_EDW.shape[2])
    outputs = _output_rows(
        x_UD, bank.w_down_EFO.shape[2], routes.place_N, routes.per_target, len(gate)
    )
    w_up, w_down = bank.w_up_EDW.unbind(0), bank.w_down_EFO.unbind(0)
    for expert, rows, _ in _chunks(routes, x_UD):
        g = gate[rows, None]
        z = torch.mm(_gather("x", x_UD, source_rows[rows]), w_up[expert], out=saved[rows])
        if bank.b_up_EW is not None:
            z += bank.b_up_EW[expert]
        output = torch.mm(
            hidden_in_place(z, bank.activation) * g, w_down[expert], out=outputs[rows]
        )
        if bank.b_down_EO is not None:
            output += g * bank.b_down_EO[expert]
    return add_rows(
        outputs, routes.place_N, routes.target_N, routes.num_targets, routes.per_target
    ), saved


def mlp_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    bank: MLPBank,
    routes: SortedRoutes,
    saved: Tensor,
    into: MLPGradients,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Implements `Backend.mlp_backward`.

    The gate's gradient is taken in the hidden space: d/dg (g·h·W) · dy = h · (dy·Wᵀ), so no output
    row is saved for it.
    """
    source_rows = _padded_rows(routes.source_rows())
    target_rows = _padded_rows(routes.target_rows())
    gate = _padded_rows(routes.gates(x_UD.dtype))
    grad_rows = _output_rows(x_UD, x_UD.shape[1], routes.place_N, routes.per_source, len(gate))
    grad_gate = torch.zeros_like(gate)
    grad_b_up, grad_b_down = (
        None if b is None else torch.zeros_like(b) for b in (bank.b_up_EW, bank.b_down_EO)
    )
    w_up, w_down = bank.w_up_EDW.unbind(0), bank.w_down_EFO.unbind(0)
    grad_up, grad_down = into.w_up_EDW.unbind(0), into.w_down_EFO.unbind(0)
    for expert, rows, count in _chunks(routes, x_UD):
        g, dy = gate[rows, None], _gather("dy", grad_TO, target_rows[rows])
        h, pullback = hidden_and_pullback(saved[rows], bank.activation)
        d_gated = dy @ w_down[expert].T
        grad_gate[rows] = (h * d_gated).sum(-1)
        if bank.b_down_EO is not None and grad_b_down is not None:
            grad_gate[rows] += (dy * bank.b_down_EO[expert]).sum(-1)
            grad_b_down[expert] += torch.sum((dy * g)[:count], 0)
        d_z = pullback(d_gated.mul_(g))
        if grad_b_up is not None:
            grad_b_up[expert] += torch.sum(d_z[:count], 0)
        gated, x = h * g, _gather("x", x_UD, source_rows[rows])
        _clear_surplus(count, dy, gated, x, d_z)
        grad_down[expert].addmm_(gated.T, dy)
        grad_up[expert].addmm_(x.T, d_z)
        torch.mm(d_z, w_up[expert].T, out=grad_rows[rows])
    grad_x = add_rows(grad_rows, routes.place_N, routes.source_N, x_UD.shape[0], routes.per_source)
    return grad_x, _grad_gate(grad_gate, routes), grad_b_up, grad_b_down


def linear_forward(x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_forward`."""
    source_rows, gate = _padded_rows(routes.source_rows()), _padded_rows(routes.gates(x_UD.dtype))
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w = w_EDO.unbind(0)
    if narrow_output:
        outputs = x_UD.new_empty(len(gate), w_EDO.shape[2])
    else:
        outputs = _output_rows(x_UD, w_EDO.shape[2], routes.place_N, routes.per_target, len(gate))
    for expert, rows, _ in _chunks(routes, x_UD):
        x = _gather("x", x_UD, source_rows[rows])
        torch.mm(x if narrow_output else x.mul_(gate[rows, None]), w[expert], out=outputs[rows])
    gated = outputs * gate[:, None] if narrow_output else outputs
    y_TO = add_rows(gated, routes.place_N, routes.target_N, routes.num_targets, routes.per_target)
    return y_TO, outputs if narrow_output else x_UD.new_empty(0)


def linear_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_EDO: Tensor,
    routes: SortedRoutes,
    saved: Tensor,
    into_EDO: Tensor,
) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_backward`.

    The gate's gradient is taken on whichever side is narrow.
    """
    source_rows = _padded_rows(routes.source_rows())
    target_rows = _padded_rows(routes.target_rows())
    gate = _padded_rows(routes.gates(x_UD.dtype))
    grad_rows = _output_rows(x_UD, x_UD.shape[1], routes.place_N, routes.per_source, len(gate))
    grad_gate = torch.zeros_like(gate)
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w, grad_w = w_EDO.unbind(0), into_EDO.unbind(0)
    for expert, rows, count in _chunks(routes, x_UD):
        x, dy = _gather("x", x_UD, source_rows[rows]), _gather("dy", grad_TO, target_rows[rows])
        g = gate[rows, None]
        if narrow_output:
            grad_gate[rows] = (saved[rows] * dy).sum(-1)
            dy.mul_(g)
            torch.mm(dy, w[expert].T, out=grad_rows[rows])
        else:
            d_x = torch.mm(dy, w[expert].T, out=grad_rows[rows])
            grad_gate[rows] = (x * d_x).sum(-1)
            d_x.mul_(g)
            x.mul_(g)
        _clear_surplus(count, x, dy)
        grad_w[expert].addmm_(x.T, dy)
    grad_x = add_rows(grad_rows, routes.place_N, routes.source_N, x_UD.shape[0], routes.per_source)
    return grad_x, _grad_gate(grad_gate, routes)


def _chunks(routes: SortedRoutes, like: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Yields every expert's chunks of rows: (expert, rows with padding, how many are its own).

    Experts without rows have none.
    """
    quantum = _quantum(like)
    for expert, (start, end) in enumerate(itertools.pairwise(routes.starts())):
        for first in range(start, end, _CHUNK):
            count = min(end - first, _CHUNK)
            yield expert, slice(first, first - (-count // quantum) * quantum), count


def _quantum(like: Tensor) -> int:
    """Returns the number that row counts are padded to a multiple of."""
    narrow = like.dtype in (torch.bfloat16, torch.float16) or (
        like.dtype == torch.float32 and float32_is_onednn()
    )
    return ROW_SLACK if narrow else 4


def _clear_surplus(count: int, *rows: Tensor) -> None:
    """Writes zeros into both sides of a sum over a chunk's rows, past its expert's own.

    What stands there is the next expert's: one side of zeros would not do, for NaN · 0 is NaN.
    """
    for values in rows:
        if len(values) > count:
            values[count:] = 0


def _padded_rows(values_N: Tensor) -> Tensor:
    """Returns the values, then zeros for the slack rows (row 0 exists if there is a route)."""
    return torch.cat((values_N, values_N.new_zeros(ROW_SLACK)))


def _gather(name: str, rows_UD: Tensor, index: Tensor) -> Tensor:
    """Returns rows[index], in a workspace of that name."""
    out = workspace(name, (index.shape[0], rows_UD.shape[1]), rows_UD)
    return torch.index_select(rows_UD, 0, index, out=out)


def _output_rows(
    like: Tensor, width: int, place_N: Tensor | None, per_row: int, num_rows: int
) -> Tensor:
    """Returns room for rows that are summed up at the end of the call.

    They are a workspace, except where `add_rows` may return a view of them.
    """
    shape = (num_rows, width)
    return (
        like.new_empty(shape)
        if place_N is None and per_row <= 1
        else workspace("outputs", shape, like)
    )


def _grad_gate(grad_gate: Tensor, routes: SortedRoutes) -> Tensor:
    """Returns the gate weights' gradient in route order and in their dtype."""
    return routes.unsorted(grad_gate[: routes.num_routes].to(routes.weight_N.dtype))
