"""Maps a mesh's sizes to tables of ranks, in pure functions without torch or processes.

There are two views of the same ranks, with the last axis innermost:

    dense view    world = dp_replicate × dp_shard        attention, norms, embeddings
    sparse view   world = dp_replicate × efsdp × ep      experts

with efsdp × ep = dp_shard.

Experts therefore reuse the ranks of dp_shard ("parallel folding": Megatron Core, arXiv 2504.14960;
torchtitan uses the same two meshes). Expert parameters are cut along the expert dimension into `ep`
nearly equal, contiguous blocks; every block exists on dp_replicate × efsdp ranks. ep is innermost so
that the ranks of an EP group, which exchange tokens in every sparse layer, are neighbours. They share
a node if ep divides the ranks of a node.

`group_of` computes one group of a rank; no table of the whole world is built.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .dispatch.table import AUTO, DISPATCHER

DENSE_AXES = ("dp_replicate", "dp_shard")  # outermost first
SPARSE_AXES = ("dp_replicate", "efsdp", "ep")
EXPERT_REPLICAS = "expert_replicas"  # dp_replicate × efsdp: ranks with the same block of experts
AXES = (*DENSE_AXES, "efsdp", "ep", EXPERT_REPLICAS)
_MOST_SPANS = 8
MOST_RANKS = 2**17  # the largest clusters have about 10⁵ accelerators; their tables take seconds


class MeshConfig(BaseModel):
    """Configures the sizes of the mesh and how it is used."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ep: int = Field(default=1, ge=1)
    """The number of ranks that share one copy of the experts."""

    dp_shard: int | None = Field(default=None, ge=1)
    """The number of ranks that shard dense weights, a multiple of `ep`; by default `ep`."""

    dp_replicate: int | None = Field(default=None, ge=1)
    """The number of replicas of the `dp_shard` ranks; by default they fill the world."""

    sharding: Literal["none", "fsdp"] = "none"
    """How weights are stored: "none" keeps dense weights whole on every rank and experts whole on
    every rank of their block; "fsdp" shards them over `dp_shard` and efsdp (`dp_shard` / `ep`)."""

    dispatcher: Annotated[str, DISPATCHER] = Field(default=AUTO, examples=["alltoall"])
    """How rows reach their experts. "auto" selects "local" if ep is 1, else "dedup", or "symmetric"
    if an EP group on CPUs shares a node's memory."""

    check_every: int = Field(default=0, ge=0)
    """Checks the exchanges of every n-th pass of a sparse layer; 0 checks none. All ranks compare the
    full matrix of counts, and verify the source, position and bits of every received row. A
    mismatch ends the run on all ranks."""

    rebalance_every: int = Field(default=0, ge=0)
    """Rebalances the experts every n steps by the load of these steps; 0 never does."""

    replicas: int = Field(default=0, ge=0)
    """The number of extra slots per bank and rank for replicas of hot experts."""

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.replicas and not self.rebalance_every:
            raise ValueError(
                f"mesh.replicas={self.replicas} with mesh.rebalance_every=0: experts are replicated when they "
                "are rebalanced; set mesh.rebalance_every to a number of steps"
            )
        if self.rebalance_every and self.sharding != "none":
            raise ValueError(
                f"mesh.rebalance_every={self.rebalance_every} with mesh.sharding={self.sharding!r}: sharded "
                'experts cannot move; use mesh.sharding="none" or mesh.rebalance_every=0'
            )
        return self


@dataclass(frozen=True)
class Layout:
    """The consistent sizes of a mesh, from which all tables of ranks follow."""

    dp_replicate: int
    ep: int
    dp_shard: int = 0  # 0: same as `ep`

    def __post_init__(self) -> None:
        if self.dp_shard == 0:
            object.__setattr__(self, "dp_shard", self.ep)

    @property
    def efsdp(self) -> int:
        """Returns the number of ranks in a replica that store the same block of experts."""
        return self.dp_shard // self.ep

    @property
    def world_size(self) -> int:
        """Returns the total number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_replicas(self) -> int:
        """Returns the number of copies of every block of experts."""
        return self.dp_replicate * self.efsdp

    def size(self, axis: str) -> int:
        """Returns the number of ranks in a group of an axis."""
        return getattr(self, axis)

    def __str__(self) -> str:
        dense, sparse = (
            " × ".join(f"{axis} {self.size(axis)}" for axis in view)
            for view in (DENSE_AXES, SPARSE_AXES)
        )
        return f"world {self.world_size} = {dense} = {sparse}"


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank in both views."""

    dp_replicate: int
    dp_shard: int
    efsdp: int
    ep: int
    expert_replicas: int  # index among the ranks with the same block of experts; 0 counts experts


def plan_layout(mesh: MeshConfig, world_size: int) -> Layout:
    """Returns the layout of `mesh` over `world_size` ranks.

    Raises:
        ValueError: the sizes do not fit (the message lists sizes that do), or the world has more
            than MOST_RANKS ranks.
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


def legal_values(mesh: MeshConfig, world_size: int, key: str) -> list[int]:
    """Returns the values of one key of MeshConfig that fit `world_size` ranks, other keys unchanged."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [size for size in divisors if _fitting(mesh.model_copy(update={key: size}), world_size)]


def one_of(values: Sequence[int]) -> str:
    """Returns "one of [1, 2]", or the only value."""
    return f"one of {values}" if len(values) > 1 else f"{values[0]}"


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Returns the coordinates of a rank in both views."""
    dp_replicate, dp_shard = divmod(rank, layout.dp_shard)
    efsdp, ep = divmod(dp_shard, layout.ep)
    return Coordinates(dp_replicate, dp_shard, efsdp, ep, dp_replicate * layout.efsdp + efsdp)


def offsets(layout: Layout, axis: str) -> range:
    """Returns the distances of a group's ranks from its first rank, the same for all groups of `axis`."""
    # Every ep-th rank, across replicas, stores the same block of experts.
    strides = {
        "dp_replicate": layout.dp_shard,
        "dp_shard": 1,
        "efsdp": layout.ep,
        "ep": 1,
        EXPERT_REPLICAS: layout.ep,
    }
    return range(0, layout.size(axis) * strides[axis], strides[axis])


def group_of(layout: Layout, axis: str, rank: int) -> list[int]:
    """Returns the ranks that differ from `rank` only in `axis`, in order, `rank` included."""
    distances = offsets(layout, axis)
    first = rank - distances[index_in_group(layout, axis, rank)]
    return [first + distance for distance in distances]


def index_in_group(layout: Layout, axis: str, rank: int) -> int:
    """Returns the index of `rank` in `group_of(layout, axis, rank)`."""
    return getattr(coordinates(layout, rank), axis)


def check_experts(layout: Layout, num_experts: Mapping[str, int]) -> None:
    """Checks that every sparse layer has at least one expert per rank of an EP group.

    Args:
        layout: the layout.
        num_experts: number of experts by layer name.

    Raises:
        ValueError: a layer has fewer experts than an EP group has ranks.
    """
    few = {name: count for name, count in num_experts.items() if count < layout.ep}
    if few:
        listed = ", ".join(f"{name} has {count}" for name, count in few.items())
        raise ValueError(
            f"mesh.ep {layout.ep} is more than the experts: {listed}; every rank of an EP group holds at least "
            f"one expert of each layer, so choose a smaller mesh.ep, or at least {layout.ep} experts"
        )


def expert_blocks(num_experts: int, num_ranks: int) -> list[range]:
    """Divides experts into contiguous, nearly equal blocks, one per rank; the first may have one more.

    Raises:
        ValueError: there are fewer experts than ranks.
    """
    if num_experts < num_ranks:
        raise ValueError(
            f"{num_experts} experts are too few for {num_ranks} ranks: every rank needs at least one"
        )
    share, more = divmod(num_experts, num_ranks)
    starts = [rank * share + min(rank, more) for rank in range(num_ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def local_experts(layout: Layout, rank: int, num_experts: int) -> range:
    """Returns the global ids of the experts that `rank` stores initially: its block of `expert_blocks`."""
    return expert_blocks(num_experts, layout.ep)[coordinates(layout, rank).ep]


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 3" or "ranks 0-7"."""
    return f"rank{'s' * (len(ranks) > 1)} {spell_ranks(ranks)}"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Abbreviates ranks: "3", "0-7", "0, 8, … 56", "1-2, 5"; long irregular lists are cut."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    breaks = [index for index in range(1, len(ranks)) if ranks[index] != ranks[index - 1] + 1]
    spans = [
        (ranks[start], ranks[end - 1])
        for start, end in itertools.pairwise([0, *breaks, len(ranks)] if ranks else [])
    ]
    more = f", … ({len(ranks)} in all)" if len(spans) > _MOST_SPANS else ""
    spelled = (f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:_MOST_SPANS])
    return ", ".join(spelled) + more


# Sizes that fit ---------------------------------------------------------------------------------


def _fitting(mesh: MeshConfig, world_size: int) -> Layout | None:
    dp_shard = mesh.dp_shard or mesh.ep
    dp_replicate = mesh.dp_replicate or world_size // dp_shard
    if dp_shard % mesh.ep or dp_replicate * dp_shard != world_size:
        return None
    return Layout(dp_replicate, mesh.ep, dp_shard)


def _misfit(mesh: MeshConfig, world_size: int) -> str:
    """Describes the misfit with all values involved."""
    dp_shard = mesh.dp_shard or mesh.ep
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    if dp_shard % mesh.ep:
        return f"mesh.ep {mesh.ep} does not divide mesh.dp_shard {dp_shard}; the world has {ranks}"
    sizes = {} if mesh.dp_replicate is None else {"dp_replicate": mesh.dp_replicate}
    sizes |= {"ep": mesh.ep} if mesh.dp_shard is None else {"dp_shard": mesh.dp_shard}
    product = f" = {math.prod(sizes.values())}" if len(sizes) > 1 else ""
    shown = " × ".join(f"mesh.{key} {size}" for key, size in sizes.items()) + product
    beside = "" if mesh.dp_shard is None else f" (with mesh.ep {mesh.ep})"
    if mesh.dp_replicate is None:
        return f"{shown}{beside} does not divide the world's {ranks}"
    return f"{shown} ranks{beside}, but the world has {world_size}"


def _advice(mesh: MeshConfig, world_size: int) -> str:
    """Lists what would fit: other values of the given keys, or another number of ranks."""
    dp_shard = mesh.dp_shard or mesh.ep
    asked = [key for key in ("ep", "dp_shard", "dp_replicate") if getattr(mesh, key) is not None]
    choices = [
        f"mesh.{key} must be {one_of(values)}"
        for key in asked
        if (values := legal_values(mesh, world_size, key))
    ]
    if mesh.dp_replicate is not None and dp_shard % mesh.ep == 0:
        choices.append(f"start {mesh.dp_replicate * dp_shard} ranks")
    if choices:
        return ", or ".join(choices)
    free = mesh.model_copy(update={"dp_shard": None, "dp_replicate": None})
    left_out = " and ".join(f"mesh.{key}" for key in asked if key != "ep")
    return f"without {left_out}, mesh.ep must be {one_of(legal_values(free, world_size, 'ep'))}"
