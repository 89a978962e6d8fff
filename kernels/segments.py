"""The expert operations over rows sorted by expert: one matrix product per expert's segment, backward by hand.

Flow of a call:
  1. one stable sort of the routes by expert (16-bit keys: 3 times faster than 64-bit ones), shared with the backward, and one
     read of their counts on the host; neither where the routes have `per_expert`;
  2. per expert: gather its rows, the products, the activation, the gate weight applied on the narrow side;
  3. the answers of a target row are added in route order, so the result does not depend on how rows were grouped.

Saved for the backward: x, the index and the hidden rows (N × F); of an activation other than relu the rows before it, (N × F)
or gated (N × 2F), from which the backward makes the hidden rows anew. No N × D tensor lives longer than the call.

Row counts are quantised (`_padded`): a segment's tail runs on into the next segment's rows, which that expert then
overwrites. Two reasons. oneDNN compiles a kernel for every new row count (about 0.6 ms), and dropless routing makes new
counts at every step, so bfloat16 is padded to multiples of 64. MKL's float32 product gives another rounding to a thread's
last 1 to 3 rows, so float32 is padded to multiples of 4: a row's result then never depends on its neighbours, which makes expert
parallelism on CPUs bitwise equal to one rank. (A GPU's libraries choose their kernels by shape and promise nothing of the kind.)

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the activation (F or 2F), O output
width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .activations import hidden_and_pullback, hidden_in_place
from .operands import MLPBank, RouteList
from .permute import add_rows, inverse_order, sort_by_expert

ROW_SLACK = 64  # rows past the end that the last segment may run into
_ROW_QUANTUM = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 4, torch.float64: 4}


@dataclass(frozen=True)
class MLPGradients:
    """Of all that a perceptron's call is differentiated by; the biases' are None where it has none."""

    x_UD: Tensor
    w_up_EDW: Tensor
    w_down_EFO: Tensor
    b_up_EW: Tensor | None
    b_down_EO: Tensor | None
    weight_N: Tensor


def mlp_forward(x_UD: Tensor, bank: MLPBank, routes: RouteList) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns y (num_targets, O), what the activation keeps (N + slack, W) in sorted order, and the order."""
    order_N, num_rows = _order(routes, bank.w_up_EDW.shape[0]), routes.expert_N.shape[0] + ROW_SLACK
    source_rows, gate = _padded_rows(routes.source_N, order_N), _padded_rows(routes.weight_N.to(x_UD.dtype), order_N)
    kept = x_UD.new_empty(num_rows, bank.w_up_EDW.shape[2])
    answers = x_UD.new_empty(num_rows, bank.w_down_EFO.shape[2])
    w_up, w_down = bank.w_up_EDW.unbind(0), bank.w_down_EFO.unbind(0)
    for expert, rows, _ in _segments(routes, len(w_up), x_UD.dtype):
        g = gate[rows, None]
        z = torch.mm(x_UD.index_select(0, source_rows[rows]), w_up[expert], out=kept[rows])
        if bank.b_up_EW is not None:
            z += bank.b_up_EW[expert]
        answer = torch.mm(hidden_in_place(z, bank.activation) * g, w_down[expert], out=answers[rows])
        if bank.b_down_EO is not None:
            answer += g * bank.b_down_EO[expert]
    return _sum_rows(answers, order_N, routes.target_N, routes.num_targets, routes.per_target), kept, order_N


def mlp_backward(
    grad_TO: Tensor, x_UD: Tensor, bank: MLPBank, routes: RouteList, kept: Tensor, order_N: Tensor | None
) -> MLPGradients:
    """The gate's gradient is taken in the hidden space: d/dg (g·h·W) · dy = h · (dy·Wᵀ), so no answer row is kept for it."""
    source_rows, target_rows = _padded_rows(routes.source_N, order_N), _padded_rows(routes.target_N, order_N)
    gate = _padded_rows(routes.weight_N.to(x_UD.dtype), order_N)
    grad_rows, grad_gate = x_UD.new_empty(len(gate), x_UD.shape[1]), torch.zeros_like(gate)
    grad_up, grad_down = torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO)
    grad_b_up, grad_b_down = (None if b is None else torch.zeros_like(b) for b in (bank.b_up_EW, bank.b_down_EO))
    w_up, w_down = bank.w_up_EDW.unbind(0), bank.w_down_EFO.unbind(0)
    for expert, rows, count in _segments(routes, len(w_up), x_UD.dtype):
        g, dy = gate[rows, None], grad_TO.index_select(0, target_rows[rows])
        h, pullback = hidden_and_pullback(kept[rows], bank.activation)
        d_gated = dy @ w_down[expert].T
        grad_gate[rows] = (h * d_gated).sum(-1)
        if bank.b_down_EO is not None and grad_b_down is not None:
            grad_gate[rows] += (dy * bank.b_down_EO[expert]).sum(-1)
            torch.sum((dy * g)[:count], 0, out=grad_b_down[expert])
        d_z = pullback(d_gated * g)
        if grad_b_up is not None:
            torch.sum(d_z[:count], 0, out=grad_b_up[expert])
        gated = h * g
        d_z[count:], gated[count:] = 0, 0  # the surplus rows belong to the next expert
        torch.mm(gated.T, dy, out=grad_down[expert])
        torch.mm(x_UD.index_select(0, source_rows[rows]).T, d_z, out=grad_up[expert])
        torch.mm(d_z, w_up[expert].T, out=grad_rows[rows])
    grad_x = _sum_rows(grad_rows, order_N, routes.source_N, x_UD.shape[0], routes.per_source)
    return MLPGradients(grad_x, grad_up, grad_down, grad_b_up, grad_b_down, _unsorted(grad_gate, order_N, routes))


def linear_forward(x_UD: Tensor, w_EDO: Tensor, routes: RouteList) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns y (num_targets, O), the ungated answers where they are the narrow side (else empty), and the order."""
    order_N = _order(routes, w_EDO.shape[0])
    source_rows, gate = _padded_rows(routes.source_N, order_N), _padded_rows(routes.weight_N.to(x_UD.dtype), order_N)
    answers = x_UD.new_empty(len(gate), w_EDO.shape[2])
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w = w_EDO.unbind(0)
    for expert, rows, _ in _segments(routes, len(w), x_UD.dtype):
        x = x_UD.index_select(0, source_rows[rows])
        torch.mm(x if narrow_output else x * gate[rows, None], w[expert], out=answers[rows])
    gated = answers * gate[:, None] if narrow_output else answers
    y_TO = _sum_rows(gated, order_N, routes.target_N, routes.num_targets, routes.per_target)
    return y_TO, answers if narrow_output else x_UD.new_empty(0), order_N


def linear_backward(
    grad_TO: Tensor, x_UD: Tensor, w_EDO: Tensor, routes: RouteList, answers: Tensor, order_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and the gate weights; the gate's on whichever side is narrow."""
    source_rows, target_rows = _padded_rows(routes.source_N, order_N), _padded_rows(routes.target_N, order_N)
    gate = _padded_rows(routes.weight_N.to(x_UD.dtype), order_N)
    grad_rows, grad_gate = x_UD.new_empty(len(gate), x_UD.shape[1]), torch.zeros_like(gate)
    grad_w = torch.zeros_like(w_EDO)
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w = w_EDO.unbind(0)
    for expert, rows, count in _segments(routes, len(w), x_UD.dtype):
        x, dy = x_UD.index_select(0, source_rows[rows]), grad_TO.index_select(0, target_rows[rows])
        g = gate[rows, None]
        if narrow_output:
            grad_gate[rows] = (answers[rows] * dy).sum(-1)
            dy = dy * g
            torch.mm(dy, w[expert].T, out=grad_rows[rows])
        else:
            d_x = dy @ w[expert].T
            grad_gate[rows] = (x * d_x).sum(-1)
            torch.mul(d_x, g, out=grad_rows[rows])
            x = x * g
        torch.mm(x[:count].T, dy[:count], out=grad_w[expert])
    grad_x = _sum_rows(grad_rows, order_N, routes.source_N, x_UD.shape[0], routes.per_source)
    return grad_x, grad_w, _unsorted(grad_gate, order_N, routes)


def _order(routes: RouteList, num_experts: int) -> Tensor | None:
    """None where the routes stand in expert order already."""
    return None if routes.per_expert else sort_by_expert(routes.expert_N, num_experts)


def _segments(routes: RouteList, num_experts: int, dtype: torch.dtype) -> Iterator[tuple[int, slice, int]]:
    """(expert, its padded rows, its true number of rows) for every expert that has any."""
    start = 0
    for expert, count in enumerate(_counts(routes, num_experts)):
        if count:
            yield expert, slice(start, start + _padded(count, dtype)), count
        start += count


def _counts(routes: RouteList, num_experts: int) -> list[int]:
    """Rows of every expert. Known, or read from the device: the one synchronisation."""
    if routes.per_expert:
        return [routes.per_expert] * num_experts
    return torch.bincount(routes.expert_N, minlength=num_experts).tolist()


def _padded(count: int, dtype: torch.dtype) -> int:
    quantum = _ROW_QUANTUM[dtype]
    return -(-count // quantum) * quantum


def _padded_rows(values_N: Tensor, order_N: Tensor | None) -> Tensor:
    """values[order], then zeros for the slack rows (row 0 exists whenever there is a route)."""
    num_routes = values_N.shape[0]
    padded = values_N.new_zeros(num_routes + ROW_SLACK)
    if order_N is None:
        padded[:num_routes] = values_N
    else:
        torch.index_select(values_N, 0, order_N, out=padded[:num_routes])
    return padded


def _unsorted(grad_gate: Tensor, order_N: Tensor | None, routes: RouteList) -> Tensor:
    """The gate weights' gradient in route order and in their dtype."""
    values_N = grad_gate[: routes.weight_N.shape[0]].to(routes.weight_N.dtype)
    return values_N if order_N is None else torch.empty_like(values_N).index_copy_(0, order_N, values_N)


def _sum_rows(rows: Tensor, order_N: Tensor | None, index_N: Tensor, num_rows: int, per_row: int) -> Tensor:
    return add_rows(rows, inverse_order(order_N), index_N, num_rows, per_row)
