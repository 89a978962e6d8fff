"""Tiles of the grouped products: a fixed table {kernel, precision, load} -> tile.

There is no autotuning: it would try configurations on every rank at every new shape, and two ranks
could choose differently. `benchmarks/gpu/tune_tiles.py` measures on a GPU and rewrites the table;
`ORIGIN` says where its entries come from. Tests compile each entry without a GPU and check the
result (tensor cores, no spills, shared memory).

Load is "few" below 300 rows per expert on average, where a tile of 128 rows would be a third empty,
else "many".
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from .available import interpreted


@dataclass(frozen=True)
class Tile:
    """The sides of a program's tile, and its warps and pipeline stages.

    `rows` and `columns` are the sides of the result, `depth` the step along the inner width.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def fit(self, **widths: int) -> "Tile":
        """Shrinks sides to the next power of two of the actual widths, but at least 16."""
        return replace(
            self,
            **{side: min(getattr(self, side), _power(width)) for side, width in widths.items()},
        )

    def options(self) -> dict[str, Any]:
        """Returns the sides as a kernel's constants, and Triton's launch options."""
        sides = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return sides | {"num_warps": self.warps, "num_stages": self.stages}


Table = dict[tuple[str, str, str], Tile]  # by kernel, precision, load
FEW = 300  # rows per expert
ORIGIN = "chosen by hand for an H200, from bytes and registers; not measured"
# gather: K1 forward; gather_back: K1 backward; …_two: gated activations; rows: K2;
# ragged: K3 (_small: with an activation, or widths that are no multiple of 16 bytes).
TILES: dict[tuple[str, str, str], Tile] = {
    ("gather", "bf16", "many"): Tile(128, 128, 64, 8, 3),
    ("gather", "bf16", "few"): Tile(64, 128, 64, 4, 4),
    ("gather_two", "bf16", "many"): Tile(128, 128, 64, 8, 3),
    ("gather_two", "bf16", "few"): Tile(64, 128, 64, 8, 3),
    ("gather_back", "bf16", "many"): Tile(128, 128, 64, 8, 4),
    ("gather_back", "bf16", "few"): Tile(64, 128, 64, 4, 4),
    ("gather_back_smooth", "bf16", "many"): Tile(128, 64, 64, 8, 4),
    ("gather_back_smooth", "bf16", "few"): Tile(64, 64, 64, 4, 4),
    ("rows", "bf16", "many"): Tile(128, 64, 128, 8, 3),
    ("rows", "bf16", "few"): Tile(64, 64, 128, 4, 3),
    ("ragged", "bf16", "many"): Tile(256, 128, 64, 8, 5),
    ("ragged", "bf16", "few"): Tile(256, 128, 64, 8, 5),
    ("ragged_small", "bf16", "many"): Tile(128, 128, 64, 8, 5),
    ("ragged_small", "bf16", "few"): Tile(128, 128, 64, 8, 5),
    ("gather", "fp32", "many"): Tile(64, 64, 32, 4, 3),
    ("gather", "fp32", "few"): Tile(64, 64, 32, 4, 3),
    ("gather_two", "fp32", "many"): Tile(64, 64, 32, 8, 3),
    ("gather_two", "fp32", "few"): Tile(64, 64, 32, 8, 3),
    ("gather_back", "fp32", "many"): Tile(64, 64, 32, 4, 3),
    ("gather_back", "fp32", "few"): Tile(64, 64, 32, 4, 3),
    ("gather_back_smooth", "fp32", "many"): Tile(64, 64, 32, 8, 3),
    ("gather_back_smooth", "fp32", "few"): Tile(64, 64, 32, 8, 3),
    ("rows", "fp32", "many"): Tile(64, 64, 32, 4, 3),
    ("rows", "fp32", "few"): Tile(64, 64, 32, 4, 3),
    ("ragged_small", "fp32", "many"): Tile(64, 64, 32, 8, 3),
    ("ragged_small", "fp32", "few"): Tile(64, 64, 32, 8, 3),
    ("ragged", "fp32", "many"): Tile(64, 64, 32, 8, 3),
    ("ragged", "fp32", "few"): Tile(64, 64, 32, 8, 3),
}
# Entries of chips other than sm_90 (H100, H200), chosen by compiler output, not measured. Without
# wgmma fewer registers are free. Shared memory is 99 KiB on sm_86, sm_89 (L4, L40, RTX 4000) and
# sm_120 (RTX 5000), 64 KiB on gfx942 (MI300), and 160 KiB on gfx950 (MI350).
_WITHOUT_WGMMA: Table = {
    ("gather", "bf16", "many"): Tile(128, 64, 64, 8, 3),
    ("gather", "bf16", "few"): Tile(64, 64, 64, 4, 3),
    ("gather_two", "bf16", "many"): Tile(64, 128, 64, 8, 3),
    ("ragged", "bf16", "many"): Tile(128, 128, 64, 8, 4),
    ("ragged", "bf16", "few"): Tile(128, 128, 64, 8, 4),
    ("ragged_small", "bf16", "many"): Tile(128, 128, 64, 8, 4),
    ("ragged_small", "bf16", "few"): Tile(128, 128, 64, 8, 4),
}
_AMD_SMALL: Table = {
    ("ragged_small", "bf16", "many"): Tile(128, 64, 64, 8, 2),
    ("ragged_small", "bf16", "few"): Tile(128, 64, 64, 8, 2),
}
OTHERS: dict[str, Table] = {
    "sm_80": _WITHOUT_WGMMA,
    "sm_89": _WITHOUT_WGMMA,
    "sm_100": {
        ("ragged", "bf16", "many"): Tile(128, 128, 64, 8, 4),
        ("ragged", "bf16", "few"): Tile(128, 128, 64, 8, 4),
    },
    "sm_120": _WITHOUT_WGMMA,
    "gfx942": {
        **{key: replace(tile, stages=2) for key, tile in TILES.items() if key[1] == "bf16"},
        ("ragged", "bf16", "many"): Tile(128, 128, 64, 8, 2),
        ("ragged", "bf16", "few"): Tile(128, 128, 64, 8, 2),
        **_AMD_SMALL,
    },
    "gfx950": {
        ("ragged", "bf16", "many"): Tile(128, 128, 64, 8, 5),
        ("ragged", "bf16", "few"): Tile(128, 128, 64, 8, 5),
        **_AMD_SMALL,
    },
}
TARGETS = ("sm_90", *OTHERS)
_WAVE = 128 * 128  # rows that give every multiprocessor a router program of 128 rows
# A router's gradients: programs that fill every multiprocessor, and the fewest rows of one program.
_PROGRAMS, _LEAST_ROWS = 128, 256
_FEW_REGISTERS = ("sm_80", "sm_89", "sm_120")  # products keep both operands in registers
INTERPRETED = interpreted()
# Small tiles give the tests' small cases several tiles.
_INTERPRETED = Tile(16, 32, 32, 4, 1)


def choose(kernel: str, dtype: torch.dtype, num_rows: int, num_experts: int) -> Tile:
    """Returns a kernel's tile for rows of a dtype on this process's GPU."""
    if INTERPRETED:
        return _INTERPRETED
    return tile_of(target(), entry_of(kernel, dtype, num_rows, num_experts))


def entry_of(
    kernel: str, dtype: torch.dtype, num_rows: float, num_experts: float
) -> tuple[str, str, str]:
    """Returns a kernel's key in the table: kernel, precision, load."""
    load = "few" if num_rows < FEW * num_experts else "many"
    return kernel, "bf16" if dtype is torch.bfloat16 else "fp32", load


def tile_of(target: str, entry: tuple[str, str, str]) -> Tile:
    """Returns the tile of a table entry on a target."""
    return OTHERS.get(target, {}).get(entry) or TILES[entry]


def router_tile(target: str, num_rows: float, num_experts: float) -> Tile:
    """Returns the tile of a router's logits on a target; `num_experts` counts all heads."""
    columns = 64 if num_experts <= 64 else 128
    if num_rows >= _WAVE and target not in _FEW_REGISTERS:
        return Tile(128, columns, 32, 8, 3)
    return Tile(64, columns, 32, 4, 3)


def router_gradient_tiles(
    target: str, num_rows: float, num_experts: float, width: int
) -> tuple[Tile, Tile]:
    """Returns the tiles of a router's backward pass on a target: for grad_x and grad_W.

    The depth of the first runs along experts, which are padded to it. The rows of the second are
    channels, its columns experts.
    """
    if target in _FEW_REGISTERS:
        return Tile(64, 128, 32, 4, 3), Tile(64, 128, 32, 8, 3)
    columns = 64 if num_experts <= 64 else 128
    if target != "sm_90":
        stages = 2 if target.startswith("gfx") else 3
        return Tile(128, 128, 32, 8, stages), Tile(128, columns, 32, 8, stages)
    of_rows, of_weights = Tile(128, 128, 32, 8, 3), Tile(128, columns, 32, 8, 4)
    if num_experts > 64:
        of_weights = Tile(128, 256, 32, 8, 4)
        if ceil(num_rows / 256) * ceil(width / 128) >= _PROGRAMS:
            of_rows = Tile(256, 128, 32, 8, 4)
    return of_rows, of_weights


def tiles_of_weights(num_experts: int, width: int, tile: Tile) -> int:
    """Returns the number of tiles of a router's weight gradient (E, D)."""
    return ceil(width / tile.rows) * ceil(num_experts / tile.columns)


def rows_of_part(num_rows: float, num_experts: int, width: int, tile: Tile) -> int:
    """Returns how many rows one program sums for a tile of a router's weight gradient."""
    parts = max(1, _PROGRAMS // tiles_of_weights(num_experts, width, tile))
    return max(_LEAST_ROWS, round_up(ceil(num_rows / parts), tile.depth))


@lru_cache(maxsize=1)
def target() -> str:
    """Returns the target of this process's GPU: its own column of the table or the next older one."""
    if not torch.cuda.is_available():
        return "sm_90"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is not None:
        return properties.gcnArchName.partition(":")[0]
    return target_of(10 * properties.major + properties.minor)


def target_of(capability: int) -> str:
    """Returns the table's column for an NVIDIA compute capability such as 90.

    Unknown ones use the next older column; 86 and 87 have the shared memory of 89.
    """
    if 80 < capability < 89:
        return "sm_89"
    known = [int(name.removeprefix("sm_")) for name in TARGETS if name.startswith("sm_")]
    return f"sm_{max((each for each in known if each <= capability), default=min(known))}"


def round_up(number: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-number // multiple) * multiple


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
