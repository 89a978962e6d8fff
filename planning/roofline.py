"""How long one kernel takes on one GPU: a roofline over tensor cores, shared memory, second-level
cache and memory, with programs that come in waves.

    programs   a grid of tiles; a multiprocessor gets ⌈programs / multiprocessors⌉ of them, and runs
               `at_once` together (occupancy.py)
    busy       what one program keeps its multiprocessor busy for: the longer of its FLOPs on the
               tensor cores (padding included) and its bytes through shared memory, 128 a clock
    alone      what it takes by itself: two dependent loads (its tile's expert, its rows) and the
               first tile, a memory latency each; then busy, or what a pipeline of `stages` can fetch:
               steps · latency / (stages − 1) (Little's law)
    kernel     max(⌈programs / multiprocessors⌉ · busy, ⌈… / at_once⌉ · alone)
               no less than its bytes from memory and from the second-level cache take, + a gap

What is assumed, beside the figures of hardware.py: nothing is lost where two limits meet (a maximum,
not a sum); programs are dealt evenly; writes leave without being waited for; weights that
neighbouring programs share are read from memory once; a gathered tensor stays in the second-level
cache up to `CACHED` of its size, and beyond that misses by the share that does not fit; empty programs
of a grid cost nothing. So it is a lower bound of a kind, and by how much is for a GPU to say.

Pure Python, about 10 µs for a kernel.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, isqrt
from typing import Literal

from ..kernels.triton.tiles import target_of
from .hardware import Hardware

Precision = Literal["bf16", "tf32", "fp32"]  # fp32: exact, on the plain cores
# Of the second-level cache, what a gathered tensor may fill before it is driven out: the rest holds
# weights and what is written. A guess.
CACHED = 0.6
_SHARED_BYTES_A_CLOCK = 128  # of a multiprocessor, on every chip of the catalogue
_DEPENDENT_LOADS = 3


@dataclass(frozen=True)
class Time:
    """How long one kernel takes, and what bounds it."""

    seconds: float
    # compute, instructions, shared memory, latency, longest program, L2, HBM; launch: mostly the gaps
    bound: str
    launches: float = 1.0  # by the host: of one kernel, or of some one after the other

    def times(self, ratio: float) -> "Time":
        """Returns a time that is so many times as long."""
        return replace(self, seconds=ratio * self.seconds)


@dataclass(frozen=True)
class TileShape:
    """A program's tile: its result is rows × columns, made `depth` of the inner width at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Grid:
    """What the programs of a kernel do; alike but for rows that the last tile of an expert lacks."""

    programs: float
    flops: float  # of one program, with padding
    steps: float  # of one program's pipeline
    step_bytes: float  # that a step brings into shared memory
    matrix_bytes: float  # that one program's tensor cores read from shared memory
    stages: int
    at_once: int


def rate(hardware: Hardware, precision: Precision) -> float:
    """Returns the FLOP/s that a huge product sustains in that precision."""
    peaks = {
        "bf16": hardware.peak_bf16,
        "tf32": hardware.peak_tf32,
        "fp32": hardware.peak_fp32,
    }
    return peaks[precision] * hardware.product_ceiling


def stream_time(hardware: Hardware, num_bytes: float, *, launches: float = 1) -> Time:
    """Returns what passes over memory take, in so many kernels: sums, casts, norms."""
    moved = num_bytes / (hardware.memory_bandwidth * hardware.copy_ceiling)
    gaps = launches * hardware.kernel_gap_s
    return Time(moved + gaps, "HBM" if moved > gaps else "launch", launches)


def grid_time(
    hardware: Hardware,
    grid: Grid,
    precision: Precision,
    *,
    hbm_bytes: float,
    l2_bytes: float,
    longest: float = 1.0,
) -> Time:
    """Returns what a kernel of tiles takes.

    Args:
        hbm_bytes: read from and written to memory, by the whole kernel.
        l2_bytes: read out of the second-level cache by all programs together.
        longest: the longest program over the mean one.
    """
    of_one = hardware.multiprocessors
    tensor = grid.flops * of_one / rate(hardware, precision)
    shared_rate = _SHARED_BYTES_A_CLOCK * hardware.clock_hz
    shared = (grid.matrix_bytes + grid.steps * grid.step_bytes) / shared_rate
    busy = max(tensor, shared)
    fetched = grid.steps * hardware.memory_latency_s / max(1, grid.stages - 1)
    fill = _DEPENDENT_LOADS * hardware.memory_latency_s
    alone = fill + max(busy, fetched)
    programs = ceil(grid.programs / of_one)
    limits = {
        "compute": programs * tensor + fill,
        "shared memory": programs * shared + fill,
        "latency": ceil(programs / grid.at_once) * alone,
        "longest program": longest * alone,
        "HBM": hbm_bytes / (hardware.memory_bandwidth * hardware.copy_ceiling),
        "L2": l2_bytes / hardware.l2_bandwidth,
    }
    bound = max(limits, key=limits.__getitem__)
    if grid.programs == 0:
        return Time(hardware.kernel_gap_s, "launch")
    return Time(limits[bound] + hardware.kernel_gap_s, bound)


def missed_bytes(hardware: Hardware, tensor_bytes: float, read_bytes: float) -> float:
    """Returns what a gather reads from memory: the tensor once, and again what the cache lost."""
    held = min(1.0, CACHED * hardware.l2_bytes / tensor_bytes) if tensor_bytes else 1.0
    once = min(tensor_bytes, read_bytes)
    return once + (read_bytes - once) * (1 - held)


def matrix_bytes(hardware: Hardware, tile: TileShape, inner: float, element: int) -> float:
    """Returns what tensor cores read from shared memory for a tile over an inner width.

    Warp groups of Hopper's stand one above the other, each reading all columns; warps before it
    stand in a rectangle; Blackwell's tensor cores read both operands once. Exact float32 products
    read from registers, and are not bounded here.
    """
    name = target_of(hardware.capability)
    if name == "sm_100":
        across, down = 1, 1
    elif name == "sm_90":
        across, down = 1, max(1, tile.warps // 4)
    else:
        down = isqrt(tile.warps)
        across = tile.warps // down
    return (tile.rows * across + tile.columns * down) * inner * element


# Dense products -----------------------------------------------------------------------------------

# What a library's products choose from. Their programs stay and fetch the next tile while one is
# written, which is as good as two at once.
_LIBRARY_TILES = (
    TileShape(256, 128, 64, 8, 4),
    TileShape(128, 256, 64, 8, 4),
    TileShape(128, 128, 64, 8, 4),
    TileShape(128, 64, 64, 4, 4),
    TileShape(64, 64, 64, 4, 4),
)
_LIBRARY_AT_ONCE = 2
_SPLITS = (1, 2, 4, 8, 16)  # of the inner width, where a result has few tiles


@lru_cache(maxsize=4096)
def product_time(
    hardware: Hardware, rows: float, columns: float, inner: float, precision: Precision
) -> Time:
    """Returns what a library's product of (rows, inner) by (inner, columns) takes.

    It is taken to know its fastest tile and split, and to share what neighbouring tiles read, so that
    the second-level cache is no limit: `product_ceiling` was measured with such a product.
    """
    return min(
        (
            _with_tile(hardware, rows, columns, inner, precision, tile, split)
            for tile in _LIBRARY_TILES
            for split in _SPLITS
        ),
        key=lambda time: time.seconds,
    )


def _with_tile(
    hardware: Hardware,
    rows: float,
    columns: float,
    inner: float,
    precision: Precision,
    tile: TileShape,
    split: int,
) -> Time:
    element = 2 if precision == "bf16" else 4
    tile = replace(tile, depth=64 * 2 // element)
    steps = ceil(inner / split / tile.depth)
    programs = ceil(rows / tile.rows) * ceil(columns / tile.columns) * split
    depth = steps * tile.depth
    read = (tile.rows + tile.columns) * tile.depth * element
    exact = precision == "fp32"
    grid = Grid(
        programs,
        2 * tile.rows * tile.columns * depth,
        steps,
        0 if exact else read,
        0 if exact else matrix_bytes(hardware, tile, depth, element),
        tile.stages,
        _LIBRARY_AT_ONCE,
    )
    operands = (rows + columns) * inner * element + rows * columns * element
    # partial sums are written in float32 and read again
    partial = 8 * rows * columns * split if split > 1 else 0
    return grid_time(
        hardware,
        grid,
        precision,
        hbm_bytes=operands + partial,
        l2_bytes=0.0,
    )
