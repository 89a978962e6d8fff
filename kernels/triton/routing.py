"""Sorts routes by expert and cuts their experts' rows into tiles, without host synchronisation.

  1. `sort_routes`: counts per block of routes, then a stable scatter, whose programs sum the counts of
     all blocks themselves: two kernels. Nothing is added atomically, so nothing needs zeroing.
  2. `find_tile`: a program of a product finds its expert and rows in the sorted experts' starts. There
     are floor(N/rows) + E tiles, so grids are static and can be captured in a CUDA graph. Programs of
     surplus tiles find no rows and exit.
  3. `row_of`: source or target row of a sorted place, by an index or by rule.
  4. `sum_rows` (Rd): sums each target's outputs in route order and float32, and rounds once. It is
     memory-bound. Outputs are in route order, so targets with equally many routes need no index.

Legend: N routes, E experts, B blocks of routes, U target rows, O columns.
"""

import torch
from torch import Tensor

from .guard import INTERPRETED, cdiv, launch, next_power_of_2, tl, triton

# Routes that a program sorts at a time, and programs, each of which reads the counts of all. Small ones
# give the tests' small cases several.
_BLOCK, _PROGRAMS = (16, 4) if INTERPRETED else (2048, 128)
_COUNTS = 8192  # of these that it reads at a time
_LEAST_BINS = 256  # of a histogram: one per thread
_BINS = 1024  # starts that a tile compares at a time
_COLUMNS = 1024  # of a program that sums rows
_ELEMENTS = 4096  # of its tile


@triton.jit(do_not_specialize=["num_routes", "num_parts"])
def _count(
    expert_N,
    counts_BE,
    num_routes,
    num_parts,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the routes of each expert in one block of `num_parts` times BLOCK routes."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for part in range(num_parts):
        route = (block * num_parts + part) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(expert_N + route, mask=route < num_routes, other=E).to(tl.int32)
        counts += tl.histogram(expert, BINS)  # bin E takes what lies past the end
    tl.store(counts_BE + block * E + bins, counts, mask=bins < E)


@triton.jit
def _bases(
    counts_BE, starts_E1, num_blocks, E: tl.constexpr, BINS: tl.constexpr, READ: tl.constexpr
):
    """Computes each expert's first place in this block; the first block writes the experts' starts."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.zeros((BINS,), tl.int32)
    earlier = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, READ):
        blocks = first + tl.arange(0, READ)
        mask = (blocks < num_blocks)[:, None] & (bins < E)[None, :]
        counts = tl.load(counts_BE + blocks[:, None] * E + bins[None, :], mask=mask, other=0)
        totals += tl.sum(counts, 0)
        earlier += tl.sum(tl.where((blocks < block)[:, None], counts, 0), 0)
    starts = tl.cumsum(totals, 0) - totals
    if block == 0:
        tl.store(starts_E1 + bins, starts, mask=bins <= E)
    return starts + earlier


@triton.jit(do_not_specialize=["num_routes", "num_parts", "num_blocks"])
def _scatter(
    expert_N,
    counts_BE,
    order_N,
    place_N,
    starts_E1,
    num_routes,
    num_parts,
    num_blocks,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    READ: tl.constexpr,
):
    """Writes every route's place. A part's routes are sorted by expert, then number: stably."""
    bases = _bases(counts_BE, starts_E1, num_blocks, E, BINS, READ)
    lane = tl.arange(0, BLOCK)
    for part in range(num_parts):
        first = (tl.program_id(0) * num_parts + part) * BLOCK
        expert = tl.load(expert_N + first + lane, mask=first + lane < num_routes, other=E)
        keys = tl.sort(expert.to(tl.int32) * BLOCK + lane)
        expert, route = keys // BLOCK, first + keys % BLOCK
        counts = tl.histogram(expert, BINS)
        place = tl.gather(bases - (tl.cumsum(counts, 0) - counts), expert, 0) + lane
        tl.store(order_N + place, route, mask=route < num_routes)
        tl.store(place_N + route, place, mask=route < num_routes)
        bases += counts


def sort_routes(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts (N,) experts into order (N,), place (N,) and starts (E + 1,) of a `Sorting`.

    Stable, and without host synchronisation.
    """
    expert_N, num_routes = expert_N.contiguous(), expert_N.shape[0]
    num_parts = max(1, cdiv(num_routes, _BLOCK * _PROGRAMS))
    num_blocks = max(1, cdiv(num_routes, _BLOCK * num_parts))
    sizes = num_routes, num_routes, num_experts + 1, (num_blocks, num_experts)
    order_N, place_N, starts_E1, counts_BE = (
        torch.empty(size, dtype=torch.int32, device=expert_N.device) for size in sizes
    )
    bins = max(_LEAST_BINS, next_power_of_2(num_experts + 1))
    constants = {"E": num_experts, "BINS": bins, "BLOCK": _BLOCK, "num_warps": 8}
    numbers = num_routes, num_parts
    launch(_count, num_blocks, expert_N, counts_BE, *numbers, **constants)
    launch(
        _scatter,
        num_blocks,
        *(expert_N, counts_BE, order_N, place_N, starts_E1, *numbers, num_blocks),
        READ=max(1, min(_COUNTS // bins, next_power_of_2(num_blocks))),
        **constants,
    )
    return order_N, place_N, starts_E1


# Tiles and rows -----------------------------------------------------------------------------------


@triton.jit
def find_tile(starts, tile, rows, E: tl.constexpr, BINS: tl.constexpr):
    """Returns a tile's expert, its number among the expert's tiles, its first row and the expert's end.

    Expert e's tiles are numbered from starts[e] // rows + e, which leaves enough for all its rows and
    at least one. Surplus tiles begin at or behind the expert's end.
    """
    expert = -1
    for begin in range(0, E, BINS):
        bins = begin + tl.arange(0, BINS)
        firsts = tl.load(starts + bins, mask=bins < E, other=0) // rows + bins
        expert += tl.sum(((bins < E) & (firsts <= tile)).to(tl.int32), 0)
    start = tl.load(starts + expert)
    number = tile - start // rows - expert
    return expert, number, start + number * rows, tl.load(starts + expert + 1)


def num_tiles(num_rows: int, num_experts: int, rows: int) -> int:
    """Returns how many tiles of `rows` rows the rows of all experts have at most."""
    return num_rows // rows + num_experts


def experts_of(num_experts: int) -> dict[str, int]:
    """Returns the constants of kernels that call `find_tile`."""
    return {"E": num_experts, "BINS": min(_BINS, next_power_of_2(num_experts))}


@triton.jit
def look_up(index, rows, live):
    """Returns index[rows], or the rows themselves without an index; 0 where not live."""
    return tl.where(live, rows, 0) if index is None else tl.load(index + rows, mask=live, other=0)


@triton.jit
def row_of(order, index, rows, live, PER: tl.constexpr):
    """Returns the source or target rows of sorted places (int64), 0 where not live.

    Route n has row index[n] or, by rule, n // PER. With neither, the places are the rows.
    """
    if PER > 0:
        found = look_up(order, rows, live) // PER
    elif index is None:
        found = look_up(None, rows, live)
    else:
        found = look_up(index, look_up(order, rows, live), live)
    return found.to(tl.int64)


# Rd -----------------------------------------------------------------------------------------------


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
    """Sums a tile of rows that have `PER` consecutive routes each."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row = ((tl.program_id(0) // TILES) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (cols < OUT)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(PER):
        at = outputs + (row * PER + k)[:, None] * OUT + cols[None, :]
        total += tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + row[:, None] * OUT + cols[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_listed(outputs, routes, starts, out, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums one row's routes, which `routes` lists from starts[row]."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // TILES
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        read = outputs + tl.load(routes + at).to(tl.int64) * OUT + cols
        values = tl.load(read, mask=cols < OUT, other=0.0, eviction_policy="evict_first")
        total += values.to(tl.float32)
    tl.store(out + row.to(tl.int64) * OUT + cols, total.to(out.dtype.element_ty), mask=cols < OUT)


def sum_rows(outputs_NO: Tensor, index_N: Tensor | None, num_rows: int, per_row: int) -> Tensor:
    """Sums the outputs of each row's routes, (num_rows, O); rows without routes are zero.

    Row u's routes have index u or, with `per_row`, n // per_row = u. With one route per row this
    returns the outputs themselves.
    """
    if per_row == 1:
        return outputs_NO
    out_UO = outputs_NO.new_empty(num_rows, outputs_NO.shape[1])
    width = outputs_NO.shape[1]
    columns = min(_COLUMNS, max(16, next_power_of_2(width)))
    tiles = cdiv(width, columns)
    if per_row:
        rows = max(1, _ELEMENTS // columns)
        launch(
            _sum_equal,
            cdiv(num_rows, rows) * tiles,
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
