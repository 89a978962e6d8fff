"""The expert operations over rows sorted by expert: one matrix product per expert's segment, backward by hand.

Flow of a call:
  1. one stable sort of the routes by expert (16-bit keys: 3 times faster than 64-bit ones); shared with the backward;
  2. per expert: gather its rows, the products, the gate weight applied on the narrow side;
  3. the answers of a target row are added in route order, so the result does not depend on how rows were grouped.

Saved for the backward: x, the hidden rows (N × F) and the index; no N × D tensor lives longer than the call.

Row counts are quantised (`_padded`): a segment's tail runs on into the next segment's rows, which that expert then
overwrites. Two reasons. oneDNN compiles a kernel for every new row count (about 0.6 ms), and dropless routing makes new
counts at every step, so bfloat16 is padded to multiples of 64. MKL's float32 product gives another rounding to a thread's
last 1 to 3 rows, so float32 is padded to multiples of 4: a row's result then never depends on its neighbours, which makes expert
parallelism on CPUs bitwise equal to one rank. (A GPU's libraries choose their kernels by shape and promise nothing of the kind.)

Legend: U source rows, N routes, E experts, D input width, F hidden width, O output width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .permute import add_rows, inverse_order, sort_by_expert

ROW_SLACK = 64  # rows past the end that the last segment may run into
_ROW_QUANTUM = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 4, torch.float64: 4}


def mlp_forward(
    x_UD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    num_targets: int,
    per_target: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y (num_targets, O), the hidden rows h (N + slack, F) in sorted order, and the order (N,)."""
    order_N = sort_by_expert(expert_N, w_up_EDF.shape[0])
    source_rows, gate = _sorted_padded(source_N, order_N), _sorted_padded(weight_N.to(x_UD.dtype), order_N)
    hidden = x_UD.new_empty(order_N.numel() + ROW_SLACK, w_up_EDF.shape[2])
    answers = x_UD.new_empty(order_N.numel() + ROW_SLACK, w_down_EFO.shape[2])
    w_up, w_down = w_up_EDF.unbind(0), w_down_EFO.unbind(0)
    for expert, rows, _ in _segments(expert_N, len(w_up), x_UD.dtype):
        torch.mm(x_UD.index_select(0, source_rows[rows]), w_up[expert], out=hidden[rows]).relu_()
        torch.mm(hidden[rows] * gate[rows, None], w_down[expert], out=answers[rows])
    return _sum_rows(answers, order_N, target_N, num_targets, per_target), hidden, order_N


def mlp_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    hidden: Tensor,
    order_N: Tensor,
    per_source: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w_up, w_down and the gate weights.

    The gate's gradient is taken in the hidden space: d/dg (g·h·W) · dy = h · (dy·Wᵀ), so no answer row is kept for it.
    """
    source_rows, target_rows = _sorted_padded(source_N, order_N), _sorted_padded(target_N, order_N)
    gate = _sorted_padded(weight_N.to(x_UD.dtype), order_N)
    grad_rows = x_UD.new_empty(order_N.numel() + ROW_SLACK, x_UD.shape[1])
    grad_gate = x_UD.new_zeros(order_N.numel() + ROW_SLACK)
    grad_up, grad_down = torch.zeros_like(w_up_EDF), torch.zeros_like(w_down_EFO)
    w_up, w_down = w_up_EDF.unbind(0), w_down_EFO.unbind(0)
    for expert, rows, count in _segments(expert_N, len(w_up), x_UD.dtype):
        h, g, dy = hidden[rows], gate[rows, None], grad_TO.index_select(0, target_rows[rows])
        d_gated = dy @ w_down[expert].T
        grad_gate[rows] = (h * d_gated).sum(-1)
        d_hidden = (d_gated * g).masked_fill_(h <= 0, 0)
        gated = h * g
        d_hidden[count:], gated[count:] = 0, 0  # the surplus rows belong to the next expert
        torch.mm(gated.T, dy, out=grad_down[expert])
        torch.mm(x_UD.index_select(0, source_rows[rows]).T, d_hidden, out=grad_up[expert])
        torch.mm(d_hidden, w_up[expert].T, out=grad_rows[rows])
    grad_x = _sum_rows(grad_rows, order_N, source_N, x_UD.shape[0], per_source)
    return grad_x, grad_up, grad_down, _unsorted(grad_gate, order_N).to(weight_N.dtype)


def linear_forward(
    x_UD: Tensor,
    w_EDO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    num_targets: int,
    per_target: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y (num_targets, O), the ungated answers where they are the narrow side (else empty), and the order."""
    order_N = sort_by_expert(expert_N, w_EDO.shape[0])
    source_rows, gate = _sorted_padded(source_N, order_N), _sorted_padded(weight_N.to(x_UD.dtype), order_N)
    answers = x_UD.new_empty(order_N.numel() + ROW_SLACK, w_EDO.shape[2])
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w = w_EDO.unbind(0)
    for expert, rows, _ in _segments(expert_N, len(w), x_UD.dtype):
        x = x_UD.index_select(0, source_rows[rows])
        torch.mm(x if narrow_output else x * gate[rows, None], w[expert], out=answers[rows])
    if not narrow_output:
        return _sum_rows(answers, order_N, target_N, num_targets, per_target), x_UD.new_empty(0), order_N
    gated = answers * gate[:, None]
    return _sum_rows(gated, order_N, target_N, num_targets, per_target), answers, order_N


def linear_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_EDO: Tensor,
    source_N: Tensor,
    expert_N: Tensor,
    weight_N: Tensor,
    target_N: Tensor,
    answers: Tensor,
    order_N: Tensor,
    per_source: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and the gate weights; the gate's on whichever side is narrow."""
    source_rows, target_rows = _sorted_padded(source_N, order_N), _sorted_padded(target_N, order_N)
    gate = _sorted_padded(weight_N.to(x_UD.dtype), order_N)
    grad_rows = x_UD.new_empty(order_N.numel() + ROW_SLACK, x_UD.shape[1])
    grad_gate = x_UD.new_zeros(order_N.numel() + ROW_SLACK)
    grad_w = torch.zeros_like(w_EDO)
    narrow_output = w_EDO.shape[2] <= w_EDO.shape[1]
    w = w_EDO.unbind(0)
    for expert, rows, count in _segments(expert_N, len(w), x_UD.dtype):
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
    grad_x = _sum_rows(grad_rows, order_N, source_N, x_UD.shape[0], per_source)
    return grad_x, grad_w, _unsorted(grad_gate, order_N).to(weight_N.dtype)


def _segments(expert_N: Tensor, num_experts: int, dtype: torch.dtype) -> Iterator[tuple[int, slice, int]]:
    """(expert, its padded rows, its true number of rows) for every expert that has any."""
    start = 0
    for expert, count in enumerate(torch.bincount(expert_N, minlength=num_experts).tolist()):
        if count:
            yield expert, slice(start, start + _padded(count, dtype)), count
        start += count


def _padded(count: int, dtype: torch.dtype) -> int:
    quantum = _ROW_QUANTUM[dtype]
    return -(-count // quantum) * quantum


def _sorted_padded(values_N: Tensor, order_N: Tensor) -> Tensor:
    """values[order], then zeros for the slack rows (row 0 exists whenever there is a route)."""
    padded = values_N.new_zeros(order_N.numel() + ROW_SLACK)
    torch.index_select(values_N, 0, order_N, out=padded[: order_N.numel()])
    return padded


def _unsorted(values: Tensor, order_N: Tensor) -> Tensor:
    out = torch.empty_like(values[: order_N.numel()])
    out[order_N] = values[: order_N.numel()]
    return out


def _sum_rows(rows: Tensor, order_N: Tensor, index_N: Tensor, num_rows: int, per_row: int) -> Tensor:
    return add_rows(rows, inverse_order(order_N), index_N, num_rows, per_row)
