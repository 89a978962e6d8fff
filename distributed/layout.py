"""Who sits where: from a mesh's sizes to tables of ranks, as pure functions without torch and without processes.

    world = dp_replicate x ep,  ep innermost:  rank = dp_replicate index * ep + ep index

Dense parameters are the same on every rank. Expert parameters are cut along their expert dimension into `ep` equal,
contiguous blocks, and every block exists `dp_replicate` times. Every rank has its own data. ep is innermost so that the
ranks of one ep group, which exchange tokens in every sparse layer, are neighbours and fit into one node whenever ep
divides the ranks of a node; dp_replicate groups speak once per step and may be far apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AXES = ("dp_replicate", "ep")  # outermost first


class MeshConfig(BaseModel):
    """The sizes of the mesh. `dp_replicate = None` takes as many replicas as fill the world."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ep: int = Field(default=1, ge=1, description="ranks that share one copy of the experts")
    dp_replicate: int | None = Field(default=None, ge=1, description="copies of the experts; None fills the world")
    # How rows reach their experts: "auto" is "local" where ep is 1 and "alltoall" elsewhere.
    dispatcher: Literal["auto", "local", "alltoall"] = "auto"


@dataclass(frozen=True)
class Layout:
    """A mesh whose sizes fit a world; everything else about ranks is computed from these two numbers."""

    dp_replicate: int
    ep: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.ep

    def __str__(self) -> str:
        return f"world {self.world_size} = dp_replicate {self.dp_replicate} × ep {self.ep}"


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in the mesh."""

    dp_replicate: int
    ep: int


def plan_layout(mesh: MeshConfig, world_size: int) -> Layout:
    """The layout of `mesh` over `world_size` ranks; ValueError if the sizes do not fit each other."""
    if world_size < 1:
        raise ValueError(f"a world needs at least one rank, got world_size = {world_size}")
    if mesh.dp_replicate is not None:
        wanted = mesh.dp_replicate * mesh.ep
        if wanted != world_size:
            raise ValueError(
                f"the mesh does not fit the world: mesh.dp_replicate {mesh.dp_replicate} × mesh.ep {mesh.ep} = "
                f"{wanted} ranks, but the world has {world_size}; start {wanted} ranks, or leave out "
                "mesh.dp_replicate to fill the world"
            )
        return Layout(dp_replicate=mesh.dp_replicate, ep=mesh.ep)
    if world_size % mesh.ep:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"the mesh does not fit the world: mesh.ep {mesh.ep} does not divide the world's {world_size} ranks; "
            f"mesh.ep may be one of {divisors}"
        )
    return Layout(dp_replicate=world_size // mesh.ep, ep=mesh.ep)


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Where `rank` sits; ValueError if the layout has no such rank."""
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is not in 0..{layout.world_size - 1} ({layout})")
    return Coordinates(dp_replicate=rank // layout.ep, ep=rank % layout.ep)


def rank_tables(layout: Layout) -> dict[str, list[list[int]]]:
    """For each axis its groups: the ranks that differ in this axis only, in the order of their index on it."""
    rows = [[row * layout.ep + column for column in range(layout.ep)] for row in range(layout.dp_replicate)]
    return {"dp_replicate": [list(column) for column in zip(*rows, strict=True)], "ep": rows}


def check_experts(layout: Layout, num_experts: Mapping[str, int]) -> None:
    """ValueError unless `ep` divides every one of `num_experts` (name of a sparse layer -> how many experts it has)."""
    uneven = {name: count for name, count in num_experts.items() if count < 1 or count % layout.ep}
    if uneven:
        listed = ", ".join(f"{name} has {count}" for name, count in uneven.items())
        raise ValueError(
            f"mesh.ep {layout.ep} does not divide the experts: {listed}; "
            f"every rank of an ep group holds equally many, so choose mesh.ep among the divisors, "
            f"or numbers of experts that are multiples of {layout.ep}"
        )


def local_experts(layout: Layout, rank: int, num_experts: int, name: str = "this layer") -> range:
    """The global ids of the experts that `rank` holds: a contiguous block of num_experts / ep."""
    check_experts(layout, {name: num_experts})
    block = num_experts // layout.ep
    first = coordinates(layout, rank).ep * block
    return range(first, first + block)


def render(layout: Layout, ranks_per_node: int, num_experts: Mapping[str, int] | None = None) -> str:
    """Plain text for people: every rank's place (and experts, if given), and which groups cross nodes."""
    if ranks_per_node < 1 or layout.world_size % ranks_per_node:
        raise ValueError(
            f"nodes of {ranks_per_node} ranks cannot make up a world of {layout.world_size}: "
            "the ranks of a node must divide the world"
        )
    num_nodes = layout.world_size // ranks_per_node
    lines = [f"{layout}, {_plural(num_nodes, 'node')} of {_plural(ranks_per_node, 'rank')}", ""]
    lines += _rank_lines(layout, ranks_per_node, num_experts or {})
    lines += ["", "groups"]
    lines += [_axis_line(axis, groups, ranks_per_node) for axis, groups in rank_tables(layout).items()]
    return "\n".join(lines)


def _rank_lines(layout: Layout, ranks_per_node: int, num_experts: Mapping[str, int]) -> list[str]:
    check_experts(layout, num_experts)
    header = ["node", "rank", "dp_replicate", "ep", *(f"experts of {name}" for name in num_experts)]
    rows = [header]
    for rank in range(layout.world_size):
        place = coordinates(layout, rank)
        blocks = [_span(local_experts(layout, rank, count, name)) for name, count in num_experts.items()]
        rows.append([str(rank // ranks_per_node), str(rank), str(place.dp_replicate), str(place.ep), *blocks])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _axis_line(axis: str, groups: Sequence[Sequence[int]], ranks_per_node: int) -> str:
    crossing = sum(len({rank // ranks_per_node for rank in group}) > 1 for group in groups)
    if len(groups[0]) == 1:
        reach = "nothing to send"
    elif crossing == 0:
        reach = "each inside one node"
    else:
        reach = f"{crossing} of {len(groups)} cross nodes"
    return f"  {axis:<12}  {reach:<22}  " + " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)


def _span(block: range) -> str:
    return str(block[0]) if len(block) == 1 else f"{block[0]}-{block[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
