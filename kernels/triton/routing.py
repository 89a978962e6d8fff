"""Sorts routes by expert and prepares the order for the grouped products, without host synchronisation.

  1. `sort_routes`: a histogram per block of routes, one scan per expert over the blocks, and a stable
     scatter: three small kernels.
  2. `TileTable`: each program's expert and first row in a grouped product. Its length is fixed,
     ceil(N/rows) + E, so grids are static and can be captured in a CUDA graph. Surplus programs find
     expert −1 and exit.
  3. `sorted_rows`: source row, target row and gate weight of every sorted place, so a product reads
     one index per row.
  4. `sum_rows` (Rd): sums each target's outputs in route order and float32, and rounds once. It is
     memory-bound. Outputs are in route order, so targets with equally many routes need no index.

All products over one list of routes, forward and backward, share these tables (`plan_of`).

All atomics are on integers, so runs agree bit for bit.

Legend: N routes, E experts, B blocks of routes, L entries of a table, U target rows, O columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..calls import SortedRoutes
from .guard import cdiv, launch, next_power_of_2, tl, triton

# routes per program of the sort: comparing all pairs of a block stays in registers
_BLOCK = 256
_COMPARED = 32
_SCAN = 1024
_LEAST_BINS = 128
_COLUMNS = 1024  # of a program that sums rows
_ELEMENTS = 4096  # of its tile
_COMPARISONS = 8192  # of a program of the tile table: more would not fit in registers


@triton.jit(do_not_specialize=["num_routes", "num_blocks"])
def _histogram(
    expert_N,
    counts_EB,
    totals_E,
    num_routes,
    num_blocks,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the routes of each expert in one block and adds the counts to the totals."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_N + route, mask=route < num_routes, other=E).to(tl.int32)
    counts = tl.histogram(expert, BINS)  # bin E takes what lies past the end
    bins = tl.arange(0, BINS)
    tl.store(counts_EB + bins * num_blocks + block, counts, mask=bins < E)
    tl.atomic_add(totals_E + bins, counts, mask=(bins < E) & (counts > 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _scan(
    counts_EB,
    totals_E,
    starts_E1,
    num_blocks,
    E: tl.constexpr,
    BINS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Computes expert e's first row (one program per expert), and turns its block counts into offsets."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    base = tl.sum(tl.load(totals_E + bins, mask=bins < expert, other=0))
    tl.store(starts_E1 + expert, base)
    for first in range(0, num_blocks, SCAN):
        blocks = first + tl.arange(0, SCAN)
        at = counts_EB + expert * num_blocks + blocks
        counts = tl.load(at, mask=blocks < num_blocks, other=0)
        tl.store(at, base + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        base += tl.sum(counts)
    if expert == E - 1:
        tl.store(starts_E1 + E, base)


@triton.jit
def rank_in_block(
    keys_N,
    own,
    block,
    num_routes,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Counts for each route the earlier routes of its block with the same key; `own` are the keys."""
    lane = tl.arange(0, BLOCK)
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, BLOCK, COMPARED):
        other_lane = first + tl.arange(0, COMPARED)
        other_route = block * BLOCK + other_lane
        other = tl.load(keys_N + other_route, mask=other_route < num_routes, other=PAST)
        same = own[:, None] == other.to(tl.int32)[None, :]
        rank += tl.sum((same & (other_lane[None, :] < lane[:, None])).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["num_routes", "num_blocks"])
def _scatter(
    expert_N,
    bases_EB,
    order_N,
    place_N,
    num_routes,
    num_blocks,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Writes every route's place: its expert's base in this block plus its rank within the block."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)
    live = route < num_routes
    expert = tl.load(expert_N + route, mask=live, other=E).to(tl.int32)
    rank = rank_in_block(expert_N, expert, block, num_routes, E, BLOCK, COMPARED)
    base = tl.load(bases_EB + expert * num_blocks + block, mask=live, other=0)
    tl.store(order_N + base + rank, route, mask=live)
    tl.store(place_N + route, base + rank, mask=live)


def sort_routes(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts (N,) experts into order (N,), place (N,) and starts (E + 1,) of a `Sorting`.

    Stable, and without host synchronisation.
    """
    expert_N, num_routes = expert_N.contiguous(), expert_N.shape[0]
    num_blocks = max(1, cdiv(num_routes, _BLOCK))
    order_N, place_N, starts_E1, counts_EB, totals_E = (
        torch.empty(shape, dtype=torch.int32, device=expert_N.device)
        for shape in (
            num_routes,
            num_routes,
            num_experts + 1,
            (num_experts, num_blocks),
            num_experts,
        )
    )
    totals_E.zero_()
    bins = max(_LEAST_BINS, next_power_of_2(num_experts + 1))
    numbers = (num_routes, num_blocks)
    launch(
        _histogram,
        num_blocks,
        expert_N,
        counts_EB,
        totals_E,
        *numbers,
        E=num_experts,
        BINS=bins,
        BLOCK=_BLOCK,
    )
    launch(
        _scan,
        num_experts,
        counts_EB,
        totals_E,
        starts_E1,
        num_blocks,
        E=num_experts,
        BINS=bins,
        SCAN=_SCAN,
    )
    constants = {"E": num_experts, "BLOCK": _BLOCK, "COMPARED": _COMPARED}
    launch(_scatter, num_blocks, expert_N, counts_EB, order_N, place_N, *numbers, **constants)
    return order_N, place_N, starts_E1


@dataclass(frozen=True)
class TileTable:
    """Row tiles in expert order; entries past the last tile have expert −1.

    Every tile but an expert's first has a `slot`, numbered over all experts; expert e's slots are
    slots_E1[e] … slots_E1[e+1]−1.
    """

    expert_L: Tensor
    first_L: Tensor
    slot_L: Tensor
    slots_E1: Tensor

    @property
    def length(self) -> int:
        """Returns the number of entries."""
        return self.expert_L.shape[0]


@triton.jit
def _tile_table(
    starts_E1,
    expert_L,
    first_L,
    slot_L,
    slots_E1,
    length,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    LEAST: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Finds the expert, first row and slot of a block of table entries."""
    bins = tl.arange(0, BINS)
    starts = tl.load(starts_E1 + bins, mask=bins < E, other=0)
    counts = tl.load(starts_E1 + bins + 1, mask=bins < E, other=0) - starts
    tiles = tl.where(bins < E, tl.maximum((counts + ROWS - 1) // ROWS, LEAST), 0)
    ends = tl.cumsum(tiles, 0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    # how many experts end before this entry
    expert = tl.sum((ends[None, :] <= entry[:, None]).to(tl.int32), 1)
    here = bins[None, :] == expert[:, None]
    tile = entry - tl.sum(tl.where(here, (ends - tiles)[None, :], 0), 1)
    first = tl.sum(tl.where(here, starts[None, :], 0), 1) + tile * ROWS
    slots = tl.cumsum(tl.maximum(tiles - 1, 0), 0)
    slot = tl.sum(tl.where(here, (slots - tl.maximum(tiles - 1, 0))[None, :], 0), 1) + tile - 1
    live = entry < length
    tl.store(expert_L + entry, tl.where(expert < E, expert, -1), mask=live)
    tl.store(first_L + entry, first, mask=live)
    tl.store(slot_L + entry, tl.where(tile > 0, slot, -1), mask=live)
    if tl.program_id(0) == 0:
        tl.store(slots_E1, 0)
        tl.store(slots_E1 + 1 + bins, slots, mask=bins < E)


def tile_table(starts_E1: Tensor, num_rows: int, *, rows: int, least: int = 0) -> TileTable:
    """Cuts each expert's rows into tiles of `rows`; `least`=1 gives empty experts one empty tile."""
    num_experts = starts_E1.shape[0] - 1
    length = cdiv(num_rows, rows) + num_experts
    expert_L, first_L, slot_L, slots_E1 = (
        starts_E1.new_empty(n) for n in (length, length, length, num_experts + 1)
    )
    bins = max(_LEAST_BINS, next_power_of_2(num_experts))
    entries = max(1, min(64, _COMPARISONS // bins))
    launch(
        _tile_table,
        cdiv(length, entries),
        starts_E1,
        expert_L,
        first_L,
        slot_L,
        slots_E1,
        length,
        E=num_experts,
        BINS=bins,
        ROWS=rows,
        LEAST=least,
        ENTRIES=entries,
    )
    return TileTable(expert_L, first_L, slot_L, slots_E1)


@dataclass(frozen=True)
class SortedRows:
    """Source row, target row (int32) and gate weight of every sorted place."""

    source_N: Tensor
    target_N: Tensor
    gate_N: Tensor


@triton.jit(do_not_specialize=["num_routes"])
def _sorted_rows(
    order_N,
    source_N,
    target_N,
    weight_N,
    source_rows,
    target_rows,
    gate_rows,
    num_routes,
    PER_SOURCE: tl.constexpr,
    PER_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes source row, target row and gate weight of a block of sorted places."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_routes
    route = row
    if order_N is not None:
        route = tl.load(order_N + row, mask=live, other=0)
    source = route // max(PER_SOURCE, 1)
    if source_N is not None:
        source = tl.load(source_N + route, mask=live, other=0).to(tl.int32)
    target = route // max(PER_TARGET, 1)
    if target_N is not None:
        target = tl.load(target_N + route, mask=live, other=0).to(tl.int32)
    tl.store(source_rows + row, source, mask=live)
    tl.store(target_rows + row, target, mask=live)
    tl.store(gate_rows + row, tl.load(weight_N + route, mask=live, other=0), mask=live)


def sorted_rows(routes: SortedRoutes) -> SortedRows:
    """Resolves source row, target row and gate weight of N sorted places; 12 bytes each."""
    num_routes, device = routes.weight_N.shape[0], routes.weight_N.device
    source_N, target_N = (
        torch.empty(num_routes, dtype=torch.int32, device=device) for _ in range(2)
    )
    gate_N = torch.empty(num_routes, dtype=torch.float32, device=device)
    given = (routes.order_N, routes.source_N, routes.target_N, routes.weight_N)
    launch(
        _sorted_rows,
        cdiv(num_routes, _SCAN),
        *(None if values is None else values.contiguous() for values in given),
        source_N,
        target_N,
        gate_N,
        num_routes,
        PER_SOURCE=routes.per_source,
        PER_TARGET=routes.per_target,
        BLOCK=_SCAN,
    )
    return SortedRows(source_N, target_N, gate_N)


class RoutePlan:
    """Tables that all products over one list of sorted routes share, each created on first use.

    It holds no strong reference to the list's tensors, because it lives as long as one of them.
    """

    def __init__(self, routes: SortedRoutes) -> None:
        self._of = [None if each is None else TensorWeakRef(each) for each in _lists(routes)]
        self._rules = routes.per_source, routes.per_target
        self._rows: SortedRows | None = None
        self._tables: dict[int, TileTable] = {}

    def is_of(self, routes: SortedRoutes) -> bool:
        """Returns whether this plan was made for these very tensors."""
        known = [None if each is None else each() for each in self._of]
        same = all(a is b for a, b in zip(known, _lists(routes), strict=True))
        return same and self._rules == (routes.per_source, routes.per_target)

    def rows(self, routes: SortedRoutes) -> SortedRows:
        """Returns the rows and gates of the sorted places; 12 bytes each, kept with the routes."""
        if self._rows is None:
            self._rows = sorted_rows(routes)
        return self._rows

    def table(self, routes: SortedRoutes, rows: int) -> TileTable:
        """Returns the table for tiles of `rows` rows."""
        if rows not in self._tables:
            self._tables[rows] = tile_table(routes.starts_E1, routes.num_routes, rows=rows)
        return self._tables[rows]


_plans = WeakTensorKeyDictionary()  # by `starts_E1`, which lives as long as the pass's routes


def plan_of(routes: SortedRoutes) -> RoutePlan:
    """Returns the plan of these routes, created once for the same tensors."""
    found = _plans.get(routes.starts_E1)
    if found is None or not found.is_of(routes):
        found = _plans[routes.starts_E1] = RoutePlan(routes)
    return found


def _lists(routes: SortedRoutes) -> tuple[Tensor | None, ...]:
    return routes.weight_N, routes.order_N, routes.source_N, routes.target_N


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
