"""Rotates queries and keys in one memory-bound pass over both.

A program processes a tile of whole rows of both, so cosines and sines are read once. The partner
half of a row is read a second time, from the cache. Rows are numbered (sequence, position, head),
the memory order of the results and usually of the inputs.

Legend: R rows, C channels of a head, W of them rotated.
"""

from torch import Tensor

from .guard import cdiv, launch, next_power_of_2, tl, triton

_ELEMENTS = 2048  # of a program's tile of queries, and of keys


@triton.jit
def _turned(rows, at, partner_at, cos, sin, mask, turns, SCALE: tl.constexpr, BACK: tl.constexpr):
    """Rotates a tile, given the offsets of channels and partners; other channels are only scaled."""
    x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32) * SCALE
    partner = tl.load(rows + partner_at, mask=mask & turns, other=0.0).to(tl.float32) * SCALE
    return tl.where(turns, x * cos - partner * sin if BACK else x * cos + partner * sin, x)


@triton.jit(do_not_specialize=["num_rows", "length", "table_batch"])
def _rotate_pair(
    q,
    k,
    cos,
    sin,
    out_q,
    out_k,
    num_rows,
    length,
    table_batch,
    q_batch,
    q_head,
    q_row,
    q_column,
    k_batch,
    k_head,
    k_row,
    k_column,
    SCALE: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Scales and rotates a tile of rows of q and k; strides are in elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows) & (cols < WIDTH)
    turns = cols < TURNED
    partner = tl.where(cols < TURNED // 2, cols + TURNED // 2, cols - TURNED // 2)
    head = row % HEADS
    position = row // HEADS % length
    batch = row // HEADS // length
    angle = batch * table_batch + position * TURNED + cols
    c = tl.load(cos + angle, mask=mask & turns, other=0.0)
    s = tl.load(sin + angle, mask=mask & turns, other=0.0)
    first = batch * q_batch + head * q_head + position * q_row
    y = _turned(
        q, first + cols * q_column, first + partner * q_column, c, s, mask, turns, SCALE, BACK
    )
    tl.store(out_q + row * WIDTH + cols, y.to(out_q.dtype.element_ty), mask=mask)
    first = batch * k_batch + head * k_head + position * k_row
    y = _turned(
        k, first + cols * k_column, first + partner * k_column, c, s, mask, turns, SCALE, BACK
    )
    tl.store(out_k + row * WIDTH + cols, y.to(out_k.dtype.element_ty), mask=mask)


def rotate_pair(
    pair: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    *,
    scale: float,
    back: bool,
) -> None:
    """Scales and rotates `pair` (B, H, S, C) into `outputs`, whose memory layout is (B, S, H, C).

    `table`: cosine and sine, (S, W) or (B, 1, S, W).
    """
    (batch, heads, length, channels), width = pair[0].shape, table[0].shape[-1]
    num_rows = batch * heads * length
    columns = max(16, next_power_of_2(channels))
    rows = max(1, _ELEMENTS // columns)
    launch(
        _rotate_pair,
        cdiv(num_rows, rows) if channels else 0,
        *pair,
        *(each.contiguous() for each in table),
        *outputs,
        num_rows,
        length,
        length * width if table[0].dim() > 2 else 0,
        *pair[0].stride(),
        *pair[1].stride(),
        SCALE=scale,
        BACK=back,
        HEADS=heads,
        WIDTH=channels,
        TURNED=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
