"""Who sits where: from a mesh's sizes to tables of ranks, as pure functions without torch and
without processes.

The same ranks are seen in two ways, and a rank is its place in either, counted with the last axis
innermost:

    dense view    world = pp × dp_replicate × dp_shard × cp × tp      attention, norms, embeddings
    sparse view   world = pp × dp_replicate × efsdp × ep              experts

with efsdp × ep = dp_shard × cp × tp.

So experts borrow the ranks of dp_shard × cp × tp and cost none of their own ("parallel folding":
Megatron Core, arXiv 2504.14960; torchtitan draws the same two meshes). Expert parameters are cut
along their expert dimension into `ep` nearly equal, contiguous blocks; every block exists on
dp_replicate × efsdp ranks. ep is innermost so that the ranks of one ep group, which exchange tokens
in every sparse layer, are neighbours and fit into one node whenever ep divides the ranks of a node.

Cost: all tables of a world of 10,240 ranks take 0.2 s; `group_of` makes one group without the
others.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .dispatch.table import AUTO, known_dispatcher

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
SPARSE_AXES = ("pp", "dp_replicate", "efsdp", "ep")
# Axes of one view taken together: fsdp shards dense weights, batch has different samples, loss
# different tokens, and expert_replicas hold the same block of experts.
FLATTENED = {
    "fsdp": ("dp_shard", "cp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "expert_replicas": ("dp_replicate", "efsdp"),
}
AXES = (*DENSE_AXES, "efsdp", "ep", *FLATTENED)
_NOT_BUILT = ("pp", "cp", "tp")
_MOST_SPANS = 8
# Of a world. The largest clusters have about 10⁵ accelerators, and tables of so many take seconds.
MOST_RANKS = 2**17


class MeshConfig(BaseModel):
    """The sizes of the mesh, and how it is used.

    `dp_replicate = None` takes as many replicas as fill the world.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ep: int = Field(default=1, ge=1, description="ranks that share one copy of the experts")
    dp_shard: int | None = Field(
        default=None, ge=1, description="ranks that lend themselves to ep; None: as few as ep needs"
    )
    dp_replicate: int | None = Field(
        default=None, ge=1, description="copies of all that; None fills the world"
    )
    # Pipeline, context and tensor parallelism: their places in the tables are kept, and a run
    # refuses them (check_runnable).
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    # "none": dense weights whole on every rank, experts whole on every rank of their block. "fsdp":
    # sharded over fsdp and efsdp.
    sharding: Literal["none", "fsdp"] = "none"
    # How rows reach their experts: "auto" is "local" where ep is 1 and "dedup" elsewhere.
    dispatcher: Annotated[str, AfterValidator(known_dispatcher)] = AUTO
    # In a checked pass all ranks compare the full matrix of counts, and every row that arrives is
    # verified by its source, its position and its bits; a difference ends the run on all ranks.
    # Otherwise the senders' counts are believed.
    check_every: int = Field(
        default=0,
        ge=0,
        description="every n-th pass of a sparse layer checks its exchanges; 0: none, 1: each",
    )
    # Experts move to where the load of the last n steps wants them, hot ones into several slots
    # (docs/placement.md).
    rebalance_every: int = Field(
        default=0, ge=0, description="experts move every so many steps; 0: never"
    )
    replicas: int = Field(
        default=0, ge=0, description="slots of every bank and rank for copies of hot experts"
    )

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.replicas and not self.rebalance_every:
            raise ValueError(
                f"mesh.replicas={self.replicas} with mesh.rebalance_every=0: experts get copies "
                "when they move; set "
                "mesh.rebalance_every to the number of steps between two moves"
            )
        if self.rebalance_every and self.sharding != "none":
            raise ValueError(
                f"mesh.rebalance_every={self.rebalance_every} with "
                f"mesh.sharding={self.sharding!r}: experts can move where "
                'their weights are whole on their rank only; use mesh.sharding="none" or '
                "mesh.rebalance_every=0"
            )
        return self


@dataclass(frozen=True)
class Layout:
    """A mesh whose sizes fit each other.

    Everything else about ranks is computed from these six numbers.
    """

    dp_replicate: int
    ep: int
    # 0: as few as ep needs, which is what layouts meant that were saved before they had this number
    dp_shard: int = 0
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("dp_replicate", "ep", "pp", "cp", "tp")}
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise ValueError(f"sizes of a mesh are at least 1, got {wrong}")
        if self.dp_shard == 0:
            object.__setattr__(self, "dp_shard", _least_dp_shard(self.ep, self.cp * self.tp))
        if self._lent % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide dp_shard {self.dp_shard} × cp {self.cp} × tp "
                f"{self.tp}"
            )

    @property
    def _lent(self) -> int:
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """How many ranks of one replica store the same block of experts."""
        return self._lent // self.ep

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.pp * self.dp_replicate * self._lent

    @property
    def num_expert_replicas(self) -> int:
        """How often every block of experts exists."""
        return self.dp_replicate * self.efsdp

    def size(self, axis: str) -> int:
        """Returns the number of ranks in a group of `axis`, which may be a flattened one."""
        return math.prod(getattr(self, part) for part in FLATTENED.get(axis, (axis,)))

    def __str__(self) -> str:
        dense, sparse = (_product(self, view) for view in (DENSE_AXES, SPARSE_AXES))
        return f"world {self.world_size} = {dense} = {sparse}"


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in both views."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    efsdp: int
    ep: int
    # among the ranks that store the same block of experts; 0 where experts are counted once
    expert_replica: int


def plan_layout(mesh: MeshConfig, world_size: int) -> Layout:
    """Returns the layout of `mesh` over `world_size` ranks.

    Raises:
        ValueError: the sizes do not fit each other; the message says what would. Or the world has
            more than MOST_RANKS ranks.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"a world has 1 to {MOST_RANKS:,} ranks, got world_size = {world_size:,}")
    layout = _fitting(mesh, world_size)
    if layout is None:
        raise ValueError(
            f"the mesh does not fit the world: {_misfit(mesh, world_size)}; "
            f"{_advice(mesh, world_size)}"
        )
    return layout


def check_runnable(mesh: MeshConfig) -> None:
    """Checks that a run can use the mesh: some axes have a place in the tables, but no code yet.

    Raises:
        ValueError: pp, cp or tp is more than 1.
    """
    if wanted := [
        f"mesh.{axis}={getattr(mesh, axis)}" for axis in _NOT_BUILT if getattr(mesh, axis) > 1
    ]:
        raise ValueError(
            f"{', '.join(wanted)}: pipeline, context and tensor parallelism (pp, cp, tp) cannot "
            "run yet and must be 1; "
            "spread the run with mesh.ep, mesh.dp_shard and mesh.dp_replicate"
        )


def legal_values(mesh: MeshConfig, world_size: int, key: str) -> list[int]:
    """Returns the values of one size of the mesh that fit `world_size` ranks.

    `key` is its name in MeshConfig; all other sizes stay as they are.
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [size for size in divisors if _fitting(mesh.model_copy(update={key: size}), world_size)]


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Returns the place of a rank in both views.

    Raises:
        ValueError: the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is not in 0..{layout.world_size - 1} ({layout})")
    place = {
        axis: rank // stride % getattr(layout, axis) for axis, stride in _strides(layout).items()
    }
    return Coordinates(
        **place, expert_replica=place["dp_replicate"] * layout.efsdp + place["efsdp"]
    )


def offsets(layout: Layout, axis: str) -> list[int]:
    """Returns how far each rank of a group of `axis` is from the group's first rank.

    This is the same for all groups of the axis.
    """
    strides = _strides(layout)
    steps = [
        range(0, getattr(layout, part) * strides[part], strides[part])
        for part in FLATTENED.get(axis, (axis,))
    ]
    return [sum(step) for step in itertools.product(*steps)]


def group_of(layout: Layout, axis: str, rank: int) -> list[int]:
    """Returns the ranks that differ from `rank` in `axis` only, in the order of their index on it.

    `rank` itself is among them.
    """
    place, strides = coordinates(layout, rank), _strides(layout)
    first = rank - sum(
        getattr(place, part) * strides[part] for part in FLATTENED.get(axis, (axis,))
    )
    return [first + offset for offset in offsets(layout, axis)]


def index_in_group(layout: Layout, axis: str, rank: int) -> int:
    """Returns the index of `rank` in `group_of(layout, axis, rank)`, without making that list."""
    place, index = coordinates(layout, rank), 0
    for part in FLATTENED.get(axis, (axis,)):
        index = index * layout.size(part) + getattr(place, part)
    return index


def rank_tables(layout: Layout) -> dict[str, list[list[int]]]:
    """Returns the groups of each of AXES, ordered by their first rank."""
    return {axis: _groups(layout, axis) for axis in AXES}


def check_experts(layout: Layout, num_experts: Mapping[str, int]) -> None:
    """Checks that every sparse layer has at least one expert for each rank of an EP group.

    Args:
        layout: how many ranks an EP group has.
        num_experts: how many experts a layer has, by the layer's name.

    Raises:
        ValueError: a layer has fewer experts than an EP group has ranks.
    """
    few = {name: count for name, count in num_experts.items() if count < layout.ep}
    if few:
        listed = ", ".join(f"{name} has {count}" for name, count in few.items())
        raise ValueError(
            f"mesh.ep {layout.ep} is more than the experts: {listed}; every rank of an ep group "
            "holds at least one of each, "
            f"so choose a smaller mesh.ep, or at least {layout.ep} experts"
        )


def expert_blocks(num_experts: int, num_ranks: int) -> list[range]:
    """Divides experts into contiguous, nearly equal blocks, one for each rank.

    Where the ranks do not divide the experts the first blocks have one more.

    Raises:
        ValueError: there are fewer experts than ranks.
    """
    if num_experts < num_ranks:
        raise ValueError(
            f"{num_experts} experts are too few for {num_ranks} ranks: every rank holds at least "
            "one"
        )
    share, more = divmod(num_experts, num_ranks)
    starts = [rank * share + min(rank, more) for rank in range(num_ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def local_experts(layout: Layout, rank: int, num_experts: int, name: str = "this layer") -> range:
    """Returns the global ids of the experts that `rank` stores before any are moved.

    This is its block of `expert_blocks`.
    """
    check_experts(layout, {name: num_experts})
    return expert_blocks(num_experts, layout.ep)[coordinates(layout, rank).ep]


def spell_ranks(ranks: Sequence[int]) -> str:
    """Spells ranks in short: "3", "0-7", "0, 8, … 56", "1-2, 5".

    Of many that have no pattern it spells the first, and how many there are.
    """
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    breaks = [index for index in range(1, len(ranks)) if ranks[index] != ranks[index - 1] + 1]
    spans = [
        (ranks[start], ranks[end - 1])
        for start, end in itertools.pairwise([0, *breaks, len(ranks)] if ranks else [])
    ]
    more = f", … ({len(ranks)} in all)" if len(spans) > _MOST_SPANS else ""
    return ", ".join(_span(*span) for span in spans[:_MOST_SPANS]) + more


# Sizes that fit ---------------------------------------------------------------------------------


def _least_dp_shard(ep: int, rest: int) -> int:
    return ep // math.gcd(ep, rest)


def _dp_shard_of(mesh: MeshConfig) -> int:
    return mesh.dp_shard or _least_dp_shard(mesh.ep, mesh.cp * mesh.tp)


def _fitting(mesh: MeshConfig, world_size: int) -> Layout | None:
    dp_shard = _dp_shard_of(mesh)
    lent = dp_shard * mesh.cp * mesh.tp
    dp_replicate = mesh.dp_replicate or world_size // (mesh.pp * lent)
    if lent % mesh.ep or mesh.pp * dp_replicate * lent != world_size:
        return None
    return Layout(
        dp_replicate=dp_replicate, ep=mesh.ep, dp_shard=dp_shard, pp=mesh.pp, cp=mesh.cp, tp=mesh.tp
    )


def _needed_ranks(mesh: MeshConfig) -> int | None:
    """Returns the one number of ranks that fits a mesh with all its sizes given, or None."""
    lent = _dp_shard_of(mesh) * mesh.cp * mesh.tp
    return (
        None if lent % mesh.ep or mesh.dp_replicate is None else mesh.pp * mesh.dp_replicate * lent
    )


def _misfit(mesh: MeshConfig, world_size: int) -> str:
    """Spells what does not fit, with all values that take part."""
    dp_shard = _dp_shard_of(mesh)
    if dp_shard * mesh.cp * mesh.tp % mesh.ep:
        lending = {"dp_shard": dp_shard, "cp": mesh.cp, "tp": mesh.tp}
        return (
            f"mesh.ep {mesh.ep} does not divide {_spell(lending)}; the world has {world_size} ranks"
        )
    whole = mesh.cp * mesh.tp == 1 and mesh.dp_shard is None
    beside = "" if whole else f" (with mesh.ep {mesh.ep})"
    replicas = {} if mesh.dp_replicate is None else {"dp_replicate": mesh.dp_replicate}
    lending = {"ep": mesh.ep} if whole else {"dp_shard": dp_shard, "cp": mesh.cp, "tp": mesh.tp}
    shown = _spell({"pp": mesh.pp, **replicas, **lending})
    if mesh.dp_replicate is None:
        return f"{shown}{beside} does not divide the world's {world_size} ranks"
    return f"{shown} ranks{beside}, but the world has {world_size}"


def _advice(mesh: MeshConfig, world_size: int) -> str:
    """Spells what would fit: other values of what was asked for, or another number of ranks."""
    asked = [key for key in ("ep", "dp_shard", "dp_replicate") if getattr(mesh, key) is not None]
    choices = [
        f"mesh.{key} may be one of {values}"
        for key in asked
        if (values := legal_values(mesh, world_size, key))
    ]
    if mesh.dp_replicate is not None and (needed := _needed_ranks(mesh)):
        choices.append(f"start {needed} ranks")
    if choices:
        return ", or ".join(choices)
    free = mesh.model_copy(update={"dp_shard": None, "dp_replicate": None})
    if values := legal_values(free, world_size, "ep"):
        left_out = " and ".join(f"mesh.{key}" for key in asked if key != "ep")
        return f"without {left_out}, mesh.ep may be one of {values}"
    return (
        f"mesh.pp {mesh.pp} × mesh.cp {mesh.cp} × mesh.tp {mesh.tp} must divide the number of ranks"
    )


def _spell(sizes: Mapping[str, int]) -> str:
    """Spells a product of sizes: "mesh.dp_replicate 2 × mesh.ep 2 = 4".

    Axes that cannot be used yet are left out while they are 1.
    """
    shown = {key: size for key, size in sizes.items() if size > 1 or key not in _NOT_BUILT}
    product = f" = {math.prod(shown.values())}" if len(shown) > 1 else ""
    return " × ".join(f"mesh.{key} {size}" for key, size in shown.items()) + product


# Tables -----------------------------------------------------------------------------------------


def _strides(layout: Layout) -> dict[str, int]:
    """Returns how far apart neighbours on each axis are, in ranks.

    pp and dp_replicate are the same in both views.
    """
    strides: dict[str, int] = {}
    for view in (DENSE_AXES, SPARSE_AXES):
        stride = 1
        for axis in reversed(view):
            strides[axis] = stride
            stride *= getattr(layout, axis)
    return strides


def _groups(layout: Layout, axis: str) -> list[list[int]]:
    distances = offsets(layout, axis)
    seen: set[int] = set()
    groups = []
    for first in range(layout.world_size):
        if first not in seen:
            groups.append([first + distance for distance in distances])
            seen.update(groups[-1])
    return groups


# For people -------------------------------------------------------------------------------------


def render_layout(
    layout: Layout, ranks_per_node: int, num_experts: Mapping[str, int] | None = None
) -> str:
    """Renders a layout as plain text: places of all ranks, their experts, and their groups' links.

    `num_experts` is how many experts a layer has, by the layer's name; None shows none.

    Raises:
        ValueError: the ranks of a node do not divide the world, or a layer has too few experts.
    """
    if ranks_per_node < 1 or layout.world_size % ranks_per_node:
        raise ValueError(
            f"nodes of {ranks_per_node} ranks cannot make up a world of {layout.world_size}: "
            "the ranks of a node must divide the world"
        )
    check_experts(layout, num_experts or {})
    num_nodes = layout.world_size // ranks_per_node
    lines = [
        f"world of {_plural(layout.world_size, 'rank')}: {_plural(num_nodes, 'node')} of "
        f"{_plural(ranks_per_node, 'rank')}",
        f"  dense view   {_product(layout, DENSE_AXES)}",
        f"  sparse view  {_product(layout, SPARSE_AXES)}",
        "",
        *_columns(_place_rows(layout, ranks_per_node)),
    ]
    if num_experts:
        lines += ["", "experts", *_columns(_expert_rows(layout, num_experts))]
    return "\n".join([*lines, "", "groups", *_columns(_group_rows(layout, ranks_per_node))])


def _product(layout: Layout, view: Sequence[str]) -> str:
    return " × ".join(f"{axis} {getattr(layout, axis)}" for axis in _shown(layout, view))


def _shown(layout: Layout, names: Sequence[str]) -> list[str]:
    """Returns the names without the axes that cannot be used yet, unless they are used."""
    return [name for name in names if name not in _NOT_BUILT or getattr(layout, name) > 1]


def _place_rows(layout: Layout, ranks_per_node: int) -> list[list[str]]:
    """Returns a row for every run of neighbours on a node whose places can be written as spans.

    Along a run each index stays the same or counts up with the rank.
    """
    shown = _shown(layout, (*DENSE_AXES, "efsdp", "ep"))
    rows = [["node", "ranks", *shown]]
    for first, last in _runs(layout, shown, ranks_per_node):
        ends = [coordinates(layout, rank) for rank in (first, last)]
        spans = [[getattr(place, axis) for place in ends] for axis in shown]
        node = str(first // ranks_per_node)
        rows.append([node, _span(first, last), *(_span(*span) for span in spans)])
    return rows


def _runs(layout: Layout, shown: Sequence[str], ranks_per_node: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last rank of every run of neighbours that a row can show."""
    first, run_steps = 0, None
    before = coordinates(layout, 0)
    for rank in range(1, layout.world_size):
        here = coordinates(layout, rank)
        steps = tuple(getattr(here, axis) - getattr(before, axis) for axis in shown)
        before = here
        is_regular = set(steps) <= {0, 1} and steps == (run_steps or steps)
        if rank % ranks_per_node == 0 or not is_regular:
            yield first, rank - 1
            first, run_steps = rank, None
        else:
            run_steps = steps
    yield first, layout.world_size - 1


def _expert_rows(layout: Layout, num_experts: Mapping[str, int]) -> list[list[str]]:
    rows = [["ep", *num_experts, "on ranks"]]
    for rank in group_of(layout, "ep", 0):
        blocks = [local_experts(layout, rank, count, name) for name, count in num_experts.items()]
        holders = group_of(layout, "expert_replicas", rank)
        rows.append(
            [str(rank), *(_span(block[0], block[-1]) for block in blocks), spell_ranks(holders)]
        )
    return rows


def _group_rows(layout: Layout, ranks_per_node: int) -> list[list[str]]:
    rows = [["axis", "size", "groups", "links", "the first"]]
    for axis in _shown(layout, AXES):
        groups = _groups(layout, axis)
        links = _links(groups, ranks_per_node)
        rows.append([axis, str(len(groups[0])), str(len(groups)), links, spell_ranks(groups[0])])
    return rows


def _links(groups: Sequence[Sequence[int]], ranks_per_node: int) -> str:
    """Spells which links the groups of an axis use."""
    nodes = [{rank // ranks_per_node for rank in group} for group in groups]
    crossing = sum(len(touched) > 1 for touched in nodes)
    if len(groups[0]) == 1:
        return "nothing to send"
    if crossing == 0:
        return "inside a node"
    if crossing < len(groups):
        return f"{crossing} of {len(groups)} between nodes"
    shares = {
        share
        for group in groups
        for share in Counter(rank // ranks_per_node for rank in group).values()
    }
    per_node = f" ({len(nodes[0])} × {_plural(shares.pop(), 'rank')})" if len(shares) == 1 else ""
    return f"between nodes{per_node}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of each column: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    are_words = [title in ("axis", "links", "the first", "on ranks") for title in rows[0]]
    lines = []
    for row in rows:
        line = ""
        for cell, width, is_word in zip(row, widths, are_words, strict=True):
            line += "  " + (cell.ljust(width) if is_word else cell.rjust(width))
        lines.append(line.rstrip())
    return lines


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
