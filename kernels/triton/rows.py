"""Rd: sums every target's outputs in route order and float32, rounded once.

It is bound by memory: every output is read once. The outputs stand in route order (a grouped
product stores them so), hence where each target has equally many routes, one after another, they
are one stream and no index is read. Otherwise the routes are listed by target first.

Legend: N routes, U target rows, O columns.
"""

import torch
from torch import Tensor

from .guard import launch, tl, triton

_COLUMNS = 1024
_ELEMENTS = 4096  # of a program's tile


@triton.jit(do_not_specialize=["num_rows"])
def _sum_equal(
    outputs,
    out,
    num_rows,
    PER: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums a tile of rows that have `PER` routes each, one after another."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row = ((tl.program_id(0) // TILES) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (cols < OUT)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(PER):
        total += tl.load(
            outputs + (row * PER + k)[:, None] * OUT + cols[None, :], mask=mask, other=0.0
        ).to(tl.float32)
    tl.store(out + row[:, None] * OUT + cols[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_listed(outputs, routes, starts, out, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums one row's routes, which `routes` lists from starts[row] on."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // TILES
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        route = tl.load(routes + at).to(tl.int64)
        total += tl.load(outputs + route * OUT + cols, mask=cols < OUT, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * OUT + cols, total.to(out.dtype.element_ty), mask=cols < OUT)


def sum_rows(outputs_NO: Tensor, index_N: Tensor | None, num_rows: int, per_row: int) -> Tensor:
    """Sums the outputs of every row's routes: (num_rows, O).

    Those are the routes with index u or, by the rule, n // per_row = u. A row without a route is
    zero. With one route for each row the result is the outputs themselves.
    """
    if per_row == 1:
        return outputs_NO
    out_UO = outputs_NO.new_empty(num_rows, outputs_NO.shape[1])
    width = outputs_NO.shape[1]
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(width)))
    tiles = triton.cdiv(width, columns)
    if per_row:
        rows = max(1, _ELEMENTS // columns)
        launch(
            _sum_equal,
            triton.cdiv(num_rows, rows) * tiles,
            outputs_NO,
            out_UO,
            num_rows,
            PER=per_row,
            OUT=width,
            ROWS=rows,
            COLUMNS=columns,
        )
        return out_UO
    assert index_N is not None
    index_N, routes_N = torch.sort(index_N, stable=True)
    starts_U1 = torch.searchsorted(index_N, torch.arange(num_rows + 1, device=index_N.device))
    launch(
        _sum_listed,
        num_rows * tiles,
        outputs_NO,
        routes_N,
        starts_U1,
        out_UO,
        OUT=width,
        COLUMNS=columns,
    )
    return out_UO
