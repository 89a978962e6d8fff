"""How long the Triton kernels of a bank of experts take: K1, K2, Rd, K3 and what sorts the routes
(kernels/triton/backend.py says which of them a call launches).

Tiles are those of kernels/triton/tiles.py for the GPU; how many programs of each run at once is what
the compiler said (occupancy.py). Rows of an expert fill whole tiles but for the last one: loads are
taken at evenly spaced quantiles of a log-normal distribution, so that an expert's last tile is as
empty as it is on average, and few experts have many rows.

Legend: N routes, E experts, D the wide side, F the narrow one (hidden columns or a head's channels),
U rows of the source, T of the target.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, exp, log
from statistics import NormalDist

import torch

from ..kernels.triton import tiles
from .hardware import Hardware
from .occupancy import compiled_programs, kernel_key
from .roofline import (
    Grid,
    Precision,
    TileShape,
    Time,
    grid_time,
    matrix_bytes,
    missed_bytes,
    stream_time,
)

_INDEX_BYTES = 12  # of a sorted place: source row, target row, gate weight
_QUANTILES = 256
# Rows of K3's chunks, and programs that there should be (kernels/triton/weight_gradients.py).
_LEAST_CHUNK, _PROGRAMS = 2048, 4 * 132


@dataclass(frozen=True)
class ExpertCall:
    """One use of a bank by one rank."""

    routes: float  # N
    experts: float  # E, of this rank
    wide: int  # D
    narrow: int  # F: before the activation; a gated one has twice as many saved columns
    source_rows: float  # U
    target_rows: float  # T
    precision: Precision
    spread: float = 0.0  # coefficient of variation of the experts' loads
    activation: str = "relu"

    @property
    def element(self) -> int:
        """Returns the bytes of an element of rows and weights."""
        return 2 if self.precision == "bf16" else 4

    @property
    def saved_columns(self) -> int:
        """Returns the columns of the rows that the forward pass keeps."""
        return self.narrow * (2 if self.activation in ("swiglu", "geglu") else 1)

    @cached_property
    def loads(self) -> tuple[tuple[float, float], ...]:
        """Returns rows of an expert, and how many experts have so many."""
        shares = _load_quantiles(self.spread, min(_QUANTILES, max(1, round(self.experts))))
        of_each = self.experts / len(shares)
        return tuple((share * self.routes / self.experts, of_each) for share in shares)

    def row_tiles(self, rows: int) -> float:
        """Returns the tiles of so many rows that the experts' rows fill."""
        return sum(ceil(load / rows) * experts for load, experts in self.loads)


@lru_cache(maxsize=64)
def _load_quantiles(spread: float, count: int) -> tuple[float, ...]:
    """Returns loads over their mean: evenly spaced quantiles of a log-normal distribution."""
    sigma = log(1 + spread**2) ** 0.5
    drawn = [exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    return tuple(value * count / sum(drawn) for value in drawn)


@dataclass(frozen=True)
class _Tiling:
    """A kernel's tile on a GPU, and how many of its programs run at once there."""

    tile: TileShape
    at_once: int


def _tiling(
    hardware: Hardware,
    call: ExpertCall,
    kernel: str,
    entry: str,
    variant: str = "",
    **widths: int,
) -> _Tiling:
    target = tiles.target_of(hardware.capability)
    dtype = torch.bfloat16 if call.precision == "bf16" else torch.float32
    key = tiles.entry_of(entry, dtype, call.routes, call.experts)
    found = tiles.tile_of(target, key).fit(**widths)
    odd = any(width * call.element % 16 for width in (call.wide, call.narrow))
    # what was not compiled (an activation whose code is another's) is taken to run alone
    at_once = compiled_programs(target).get(kernel_key(kernel, variant, key, odd=odd), 1)
    tile = TileShape(found.rows, found.columns, found.depth, found.warps, found.stages)
    return _Tiling(tile, max(1, at_once))


def gather_product(
    hardware: Hardware,
    call: ExpertCall,
    kernel: str,
    entry: str,
    *,
    gathered_rows: float,
    columns: int,
    moved_bytes: float,
    variant: str = "",
) -> Time:
    """Returns what K1 takes: gathered wide rows times every expert's (D, columns).

    Args:
        kernel: the function, by which its compiled form is found.
        entry: of the table of tiles.
        gathered_rows: of the tensor that is gathered from.
        columns: of the result, before a gated activation halves them.
        moved_bytes: beside the product's operands, read and written once.
    """
    gated = columns > call.narrow
    tiling = _tiling(hardware, call, kernel, entry, variant, columns=call.narrow, depth=call.wide)
    tile, inner = tiling.tile, call.wide
    across = ceil(call.narrow / tile.columns)
    wide_tile = replace(tile, columns=tile.columns * (2 if gated else 1))
    grid = _grid(
        hardware, call, wide_tile, call.row_tiles(tile.rows) * across, inner, tiling.at_once
    )
    row_bytes, weights = call.wide * call.element, call.experts * call.wide * columns * call.element
    gathered = missed_bytes(hardware, gathered_rows * row_bytes, call.routes * across * row_bytes)
    return grid_time(
        hardware,
        grid,
        call.precision,
        hbm_bytes=gathered + weights + moved_bytes + call.routes * _INDEX_BYTES,
        l2_bytes=grid.programs * grid.steps * grid.step_bytes + moved_bytes / 2,
    )


def rows_product(
    hardware: Hardware, call: ExpertCall, *, source_bytes: float, again_bytes: float = 0.0
) -> Time:
    """Returns what K2 takes: narrow rows times every expert's (F, D), stored in route order.

    Args:
        source_bytes: of the narrow rows, read once.
        again_bytes: read beside them, for the gate's gradient.
    """
    name, wide, narrow = "rows_product", call.wide, call.narrow
    tiling = _tiling(hardware, call, name, "rows", columns=wide, depth=narrow)
    if narrow > tiling.tile.depth:
        tiling = _tiling(hardware, call, name, "rows", "deep", columns=wide, depth=narrow)
    tile, passes = tiling.tile, ceil(call.wide / tiling.tile.columns)
    one = _grid(hardware, call, tile, call.row_tiles(tile.rows), call.narrow, tiling.at_once)
    kept = tile.rows * tile.depth * call.element if one.steps == 1 else 0  # rows stay, weights come
    of_weights = one.steps * one.step_bytes - kept
    grid = replace(
        one,
        flops=passes * one.flops,
        steps=passes * one.steps,
        step_bytes=of_weights / one.steps,
        matrix_bytes=passes * one.matrix_bytes,
    )
    answers = call.routes * call.wide * call.element
    weights = call.experts * call.wide * call.narrow * call.element
    return grid_time(
        hardware,
        grid,
        call.precision,
        hbm_bytes=answers + source_bytes + again_bytes + weights + call.routes * _INDEX_BYTES,
        l2_bytes=grid.programs * (passes * of_weights + kept) + again_bytes,
    )


def _grid(
    hardware: Hardware, call: ExpertCall, tile: TileShape, programs: float, inner: int, at_once: int
) -> Grid:
    steps = ceil(inner / tile.depth)
    depth = steps * tile.depth
    exact = call.precision == "fp32"
    return Grid(
        programs,
        2 * tile.rows * tile.columns * depth,
        steps,
        (tile.rows + tile.columns) * tile.depth * call.element,
        0 if exact else matrix_bytes(hardware, tile, depth, call.element),
        tile.stages,
        at_once,
    )


def row_sums(hardware: Hardware, routes: float, rows: float, width: int, element: int) -> Time:
    """Returns what Rd takes: every row's outputs read once, their sum written."""
    if routes <= rows:
        return Time(0.0, "launch", 0)  # one output for each row: nothing is launched
    return stream_time(hardware, (routes + rows) * width * element)


def weight_gradient(
    hardware: Hardware,
    call: ExpertCall,
    uses: int,
    *,
    tall: int,
    wide: int,
    gathered_rows: float,
    has_activation: bool = False,
    listed_bytes: float = 20,
    cut_by: tuple[int, int] | None = None,
) -> Time:
    """Returns what K3 takes, for one matrix over `uses` calls: rowsᵀ · rows of every expert.

    The programs of all experts are taken to walk through the calls side by side, so that one call's
    rows are in the second-level cache at a time.

    Args:
        uses: the calls whose rows are multiplied at once.
        tall, wide: the matrix (tall, wide).
        gathered_rows: of the tensor that the wider operand is gathered from.
        listed_bytes: of a route: the addresses of its rows, and its gate.
        cut_by: the sides of the bank's matrix by whose tiles rows are cut into chunks; None: this.
    """
    many = replace(call, routes=uses * call.routes)
    tiling = _gradient_tiling(hardware, many, tall, wide, has_activation=has_activation)
    tile, of_one = tiling.tile, _tiles_of_one(tiling.tile, tall, wide)
    chunk, chunks = _chunks(hardware, many, *(cut_by or (tall, wide)))
    rows = many.routes / chunks
    grid = _grid(hardware, many, tile, chunks * of_one, ceil(rows), tiling.at_once)
    longer, shorter = max(tall, wide), min(tall, wide)
    gathered = missed_bytes(
        hardware,
        gathered_rows * longer * call.element,
        call.routes * longer * call.element,
    )
    matrix = call.experts * tall * wide * call.element
    later = 4 * (chunks - call.experts) * tall * wide  # written in float32
    deepest = max(min(load, chunk) for load, _ in many.loads)
    listed = many.routes * listed_bytes
    read = rows * ((tile.rows + tile.columns) * call.element + listed_bytes)
    return grid_time(
        hardware,
        grid,
        call.precision,
        hbm_bytes=uses * gathered + many.routes * shorter * call.element + matrix + later + listed,
        l2_bytes=grid.programs * read,
        longest=max(1.0, deepest / rows),
    )


def _gradient_tiling(
    hardware: Hardware, many: ExpertCall, tall: int, wide: int, *, has_activation: bool = False
) -> _Tiling:
    """Returns K3's tile, with its longer side along the wider operand."""
    small = has_activation or any(width * many.element % 16 for width in (tall, wide))
    entry = "ragged_small" if small else "ragged"
    variant = many.activation if has_activation else ""
    tiling = _tiling(hardware, many, "ragged_product", entry, variant)
    tile = tiling.tile
    if tall < wide:
        tile = replace(tile, rows=tile.columns, columns=tile.rows)
    tile = replace(tile, rows=_least(tile.rows, tall), columns=_least(tile.columns, wide))
    return replace(tiling, tile=tile)


def _tiles_of_one(tile: TileShape, tall: int, wide: int) -> int:
    return ceil(tall / tile.rows) * ceil(wide / tile.columns)


def chunk_rows(rows: float, experts: float, tiles: int) -> int:
    """Returns the rows of K3's chunks, as `cut_work` of kernels/triton/weight_gradients.py has them.

    Twice an expert's mean load; fewer where there would be few programs.
    """
    chunk = 1 << (2 * ceil(rows / experts) - 1).bit_length()
    while chunk > _LEAST_CHUNK and tiles * max(experts, rows // chunk) < _PROGRAMS:
        chunk //= 2
    return max(_LEAST_CHUNK, chunk)


def _chunks(hardware: Hardware, many: ExpertCall, tall: int, wide: int) -> tuple[int, float]:
    """Returns the rows of a chunk, and the chunks of all experts."""
    tiles = _tiles_of_one(_gradient_tiling(hardware, many, tall, wide).tile, tall, wide)
    chunk = chunk_rows(many.routes, many.experts, tiles)
    return chunk, sum(max(1, ceil(load / chunk)) * experts for load, experts in many.loads)


def gradient_tables(hardware: Hardware, call: ExpertCall, uses: int, matrices: int) -> Time:
    """Returns what cutting the rows of all calls into chunks takes, for all matrices of a bank.

    Where experts' rows begin in each call is put together and added up; then comes the table, and
    for every matrix one of where the calls have their operands.
    """
    moved = 3 * 4 * uses * call.experts if uses > 1 else 0
    return stream_time(hardware, moved, launches=(3 if uses > 1 else 1) + matrices)


def gradient_lists(hardware: Hardware, call: ExpertCall, uses: int, read: float) -> Time:
    """Returns what listing the rows of all calls takes, for one matrix: 20 bytes are written.

    `read`: bytes of a route: indices and gates.
    """
    return stream_time(hardware, uses * call.routes * (read + 20))


def later_chunks(
    hardware: Hardware,
    call: ExpertCall,
    uses: int,
    *,
    tall: int,
    wide: int,
    cut_by: tuple[int, int],
) -> Time:
    """Returns what adding the chunks takes that are not their expert's first.

    Launched wherever there could be any. Sides are those of `weight_gradient`.
    """
    many = replace(call, routes=uses * call.routes)
    chunk, chunks = _chunks(hardware, many, *cut_by)
    if many.routes < chunk:
        return Time(0.0, "launch", 0)
    later = chunks - call.experts
    added_to = min(later, call.experts)
    moved = (4 * later + 2 * call.element * added_to) * tall * wide
    return stream_time(hardware, moved)


def _least(side: int, width: int) -> int:
    return min(side, max(16, 1 << (width - 1).bit_length()))


def route_sorting(hardware: Hardware, routes: float) -> Time:
    """Returns what sorting routes by expert takes: zeros, histogram, scan and scatter."""
    # read as int64 twice and in the comparisons of a block, written as order and place
    return stream_time(hardware, routes * (8 + 8 + 8), launches=4)


def route_tables(hardware: Hardware, routes: float, tables: int) -> Time:
    """Returns what a routing's sorted rows and its tables of tiles take, once for both passes.

    Of a route its place in the order and its gate weight are read.
    """
    return stream_time(hardware, routes * (8 + _INDEX_BYTES), launches=1 + tables)


def table_heights(hardware: Hardware, call: ExpertCall, entries: Iterable[str]) -> int:
    """Returns how many tables of tiles a routing has: one for each height of tiles."""
    target = tiles.target_of(hardware.capability)
    dtype = torch.bfloat16 if call.precision == "bf16" else torch.float32
    keys = (tiles.entry_of(entry, dtype, call.routes, call.experts) for entry in entries)
    return len({tiles.tile_of(target, key).rows for key in keys})
