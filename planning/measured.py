"""Interpolates measured times of collectives.

benchmarks/gloo_table.py writes the file: {"rows": [{"op", "world", "bytes", "seconds"} …]}, where
bytes are those of the whole tensor on one rank. `ranks_per_node` beside the rows gives the
placement; without it all ranks shared a node. A table applies only to groups placed as measured;
for others the formulas of communication.py hold.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat, ValidationError

Points = tuple[tuple[float, float], ...]  # (bytes, seconds), by bytes


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
