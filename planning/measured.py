"""Interpolates measured times of collectives, and fits Hockney's two numbers to them.

    t = α + β·bytes         α: latency, 1/β: bandwidth,
                            α/β: the message size that reaches half of the bandwidth

benchmarks/gloo_table.py writes the file: {"rows": [{"op", "world", "bytes", "seconds"} …]}, where
bytes are those of the whole tensor on one rank. `ranks_per_node` beside the rows gives the
placement; without it all ranks shared a node. A table applies only to groups placed as measured;
for others the formulas of communication.py hold.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field, PositiveFloat, ValidationError

Points = tuple[tuple[float, float], ...]  # (bytes, seconds), by bytes


@dataclass(frozen=True)
class Hockney:
    """Holds latency and inverse bandwidth of one operation in one world."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds of one call."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes


def fit_hockney(points: Sequence[tuple[float, float]]) -> Hockney:
    """Fits α and β ≥ 0 to measured times by least squared relative errors.

    Relative errors give small messages the same weight as large ones.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ValueError(
            f"fitting α and β needs two message sizes with positive times, got {list(points)}"
        )
    sizes, seconds = np.array(points, dtype=float).T
    rows = np.stack((1 / seconds, sizes / seconds), axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    if alpha < 0:
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    elif beta < 0:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), 0.0
    return Hockney(float(alpha), float(beta))


@dataclass(frozen=True)
class MeasuredTable:
    """Holds times by operation and world. Noise is smoothed so that more bytes never take less
    time.
    """

    points: Mapping[tuple[str, int], Points]
    ranks_per_node: int | None = None
    source: str = "measured"

    def worlds(self, op: str) -> list[int]:
        """Returns the world sizes in which an operation was measured."""
        return sorted(world for measured, world in self.points if measured == op)

    def seconds(
        self, op: str, *, world: int, ranks_per_node: int, num_bytes: float
    ) -> float | None:
        """Returns the seconds of one call; None where the table has nothing to interpolate.

        Interpolation is linear in logarithms, between sizes and between worlds. Below the smallest
        size the time is that size's; above the largest it grows as between the last two.
        """
        worlds = self.worlds(op)
        if (
            ranks_per_node != min(world, self.ranks_per_node or world)
            or not worlds
            or not worlds[0] <= world <= worlds[-1]
        ):
            return None
        above = bisect_left(worlds, world)
        upper = self._of_world(op, worlds[above], num_bytes)
        if worlds[above] == world:
            return upper
        lower = self._of_world(op, worlds[above - 1], num_bytes)
        share = log(world / worlds[above - 1]) / log(worlds[above] / worlds[above - 1])
        return exp((1 - share) * log(lower) + share * log(upper))

    def _of_world(self, op: str, world: int, num_bytes: float) -> float:
        points = self.points[op, world]
        above = bisect_left(points, num_bytes, key=lambda point: point[0])
        if above == 0:
            return points[0][1]
        size, seconds = points[above - 1]
        if above == len(points):
            if len(points) == 1:
                return seconds * num_bytes / size
            before = points[-2]
            return seconds + (num_bytes - size) * (seconds - before[1]) / (size - before[0])
        next_size, next_seconds = points[above]
        return exp(
            log(seconds)
            + log(num_bytes / size) / log(next_size / size) * log(next_seconds / seconds)
        )


class _Row(BaseModel):
    op: Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
    world: int = Field(ge=2)
    bytes: PositiveFloat
    seconds: PositiveFloat


class _File(BaseModel):
    rows: list[_Row] = Field(min_length=1)
    ranks_per_node: int | None = None


def read_table(path: Path) -> MeasuredTable:
    """Reads a table from a JSON file.

    Raises:
        ValueError: the file cannot be read or does not hold measurements.
    """
    try:
        content = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: {where}: {first['msg']}; write the file with benchmarks/gloo_table.py"
        ) from None
    found: dict[tuple[str, int], dict[float, float]] = {}
    for row in content.rows:
        found.setdefault((row.op, row.world), {})[row.bytes] = row.seconds
    return make_table(found, ranks_per_node=content.ranks_per_node, source=str(path))


def make_table(
    times: Mapping[tuple[str, int], Mapping[float, float]],
    *,
    ranks_per_node: int | None = None,
    source: str = "measured",
) -> MeasuredTable:
    """Makes a table from (operation, world) → {bytes: seconds}."""
    points = {}
    for key, of_size in times.items():
        sizes = sorted(of_size)
        growing = accumulate((of_size[size] for size in sizes), max)
        points[key] = tuple(zip(sizes, growing, strict=True))
    return MeasuredTable(points, ranks_per_node, source)
