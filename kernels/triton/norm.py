"""Residual, norm and casts: one pass over the rows forward, one backward, and a sum of partial sums.

    forward     s = x + y; n = norm(s); low-precision copies of n and s
    backward    adds all gradients of n and s in float32; dx, dy; partial sums for weight and bias
    sum         adds the partial sums in order

The kernels are memory-bound. A row is read once and stays in registers, where a second pass takes
its variance around the mean. Statistics and sums are float32 in every dtype.

Legend: T rows, D columns, P programs of the backward pass.
"""

import torch
from torch import Tensor

from .guard import cdiv, launch, next_power_of_2, tl, triton

_ELEMENTS = 2048  # of a program's tile, unless one row has more
_PROGRAMS = 512  # of the backward pass; fixed, so that sums do not depend on the GPU
_SUM_ROWS, _SUM_COLUMNS = 64, 32


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    x,
    y,
    weight,
    bias,
    total,
    normed,
    low_normed,
    low_total,
    mean,
    inverse,
    num_rows,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds, normalises and casts a tile of whole rows; None marks absent inputs and outputs."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (cols < WIDTH)[None, :]
    at = row[:, None] * WIDTH + cols[None, :]
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if y is not None:
        s += tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        s = rounded.to(tl.float32)  # the norm is of what is stored
    if low_total is not None:
        tl.store(low_total + at, s.to(low_total.dtype.element_ty), mask=mask)
    average = tl.sum(s, 1) / WIDTH
    off = tl.where(mask, s - average[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(off * off, 1) / WIDTH + EPS)
    tl.store(mean + row, average, mask=row < num_rows)
    tl.store(inverse + row, scale, mask=row < num_rows)
    n = off * scale[:, None]
    if weight is not None:
        n *= tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        n += tl.load(bias + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
    if normed is not None:
        tl.store(normed + at, n.to(normed.dtype.element_ty), mask=mask)
    if low_normed is not None:
        tl.store(low_normed + at, n.to(low_normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_backward(
    s,
    weight,
    mean,
    inverse,
    grad_total,
    grad_normed,
    grad_first,
    grad_second,
    dx,
    dy,
    partial_weight,
    partial_bias,
    num_rows,
    SECOND_IS_NORMED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes the rows' gradients tile by tile, and this program's partial sums."""
    cols = tl.arange(0, COLUMNS)
    w = tl.full((COLUMNS,), 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < num_rows)[:, None] & (cols < WIDTH)[None, :]
        at = row[:, None] * WIDTH + cols[None, :]
        g = tl.zeros((ROWS, COLUMNS), tl.float32)
        if grad_normed is not None:
            g += tl.load(grad_normed + at, mask=mask, other=0.0).to(tl.float32)
        if grad_first is not None:
            g += tl.load(grad_first + at, mask=mask, other=0.0).to(tl.float32)
        if SECOND_IS_NORMED:
            g += tl.load(grad_second + at, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < num_rows, other=0.0)[:, None]
        scale = tl.load(inverse + row, mask=row < num_rows, other=0.0)[:, None]
        value = tl.load(s + at, mask=mask, other=0.0).to(tl.float32)
        unit = tl.where(mask, (value - average) * scale, 0.0)
        if partial_weight is not None:
            sum_weight += g * unit
        if partial_bias is not None:
            sum_bias += g
        g *= w[None, :]
        along = (tl.sum(g * unit, 1) / WIDTH)[:, None]
        grad = (g - (tl.sum(g, 1) / WIDTH)[:, None] - unit * along) * scale
        if grad_total is not None:
            grad += tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
        if grad_second is not None and not SECOND_IS_NORMED:
            grad += tl.load(grad_second + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=mask)
        if dy is not None:
            tl.store(dy + at, grad.to(dy.dtype.element_ty), mask=mask)
    place = tl.program_id(0) * WIDTH + cols
    if partial_weight is not None:
        tl.store(partial_weight + place, tl.sum(sum_weight, 0), mask=cols < WIDTH)
    if partial_bias is not None:
        tl.store(partial_bias + place, tl.sum(sum_bias, 0), mask=cols < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_partial(
    partial_weight,
    partial_bias,
    d_weight,
    d_bias,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums a tile of columns over all rows in a fixed order."""
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (cols < WIDTH)[None, :]
        at = row[:, None] * WIDTH + cols[None, :]
        of_weight += tl.load(partial_weight + at, mask=mask, other=0.0)
        if partial_bias is not None:
            of_bias += tl.load(partial_bias + at, mask=mask, other=0.0)
    out = tl.sum(of_weight, 0).to(d_weight.dtype.element_ty)
    tl.store(d_weight + cols, out, mask=cols < WIDTH)
    if partial_bias is not None:
        out = tl.sum(of_bias, 0).to(d_bias.dtype.element_ty)
        tl.store(d_bias + cols, out, mask=cols < WIDTH)


def add_norm(
    x_TD: Tensor,
    y_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    outputs: tuple[Tensor | None, ...],
    statistics: tuple[Tensor, Tensor],
) -> None:
    """Fills `outputs` (x + y, the norm, a low-precision copy of the norm and of the sum) unless None.

    `statistics` receives each row's mean and inverse deviation, (T,) float32.
    """
    num_rows, width = x_TD.shape
    tile = _tile(width)
    launch(
        _add_norm,
        cdiv(num_rows, tile["ROWS"]),
        *(x_TD, y_TD, weight_D, bias_D, *outputs, *statistics, num_rows),
        EPS=eps,
        WIDTH=width,
        **tile,
    )


def add_norm_backward(
    s_TD: Tensor,
    weight_D: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, ...],
    outputs: tuple[Tensor, Tensor | None],
    parameters: tuple[Tensor | None, Tensor | None],
    *,
    second_is_normed: bool,
) -> None:
    """Fills dx and dy (`outputs`) and the gradients of weight and bias (`parameters`).

    `gradients` are those of the sum, the norm, a copy of the norm, and a second copy of either. A
    bias requires a weight.
    """
    num_rows, width = s_TD.shape
    tile = _tile(width, backward=True)
    programs = min(_PROGRAMS, cdiv(num_rows, tile["ROWS"]))
    partial = [
        None if out is None else s_TD.new_empty(programs, width, dtype=torch.float32)
        for out in parameters
    ]
    launch(
        _add_norm_backward,
        programs,
        *(s_TD, weight_D, *statistics, *gradients, *outputs, *partial, num_rows),
        SECOND_IS_NORMED=second_is_normed and gradients[-1] is not None,
        WIDTH=width,
        **tile,
    )
    if weight_D is not None:
        launch(
            _sum_partial,
            cdiv(width, _SUM_COLUMNS),
            *(*partial, *parameters, programs),
            WIDTH=width,
            ROWS=_SUM_ROWS,
            COLUMNS=_SUM_COLUMNS,
        )


def _tile(width: int, *, backward: bool = False) -> dict[str, int]:
    """Returns rows, columns and warps: 32 elements per thread, 16 in the backward pass."""
    columns = max(16, next_power_of_2(width))
    rows = max(1, _ELEMENTS // columns)
    per_warp = 512 if backward else 1024
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": max(4, rows * columns // per_warp)}
