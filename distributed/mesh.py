"""The process groups and DeviceMeshes of a layout. Built once at start; about 2 ms for 4 ranks, 20
ms on a simulated 10,240.

Groups are objects that are handed to whoever needs them; nothing here is global. Every group has a
description (it stands in torch's error messages and in the flight recorder) and the process'
timeout. A rank makes the groups that it is in and no others, so the cost does not grow with the
number of groups. Axes that join the same ranks for the same use share a group, and all axes of size
1 share one group of this rank alone: callers need no special case, and it costs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .layout import (
    AXES,
    EXPERT_REPLICAS,
    Coordinates,
    Layout,
    coordinates,
    group_of,
    index_in_group,
    offsets,
    spell_ranks,
)
from .process.process import Process

# What a group is used for. Axes of one use never wait for each other's messages, so they may share
# a communicator; tokens, weights and sums must not, for they travel at the same time.
_USE = {
    "dp_replicate": "sums",
    EXPERT_REPLICAS: "sums",
    "dp_shard": "weights",
    "efsdp": "weights",
    "ep": "tokens",
}


@dataclass(frozen=True)
class Mesh:
    """This rank's groups, one for every axis of layout.AXES, and DeviceMeshes over them."""

    layout: Layout
    rank: int
    device_type: str
    world_group: dist.ProcessGroup
    groups: Mapping[str, dist.ProcessGroup]  # by axis: the ranks that differ from this in it only
    _device_meshes: dict[tuple[tuple[str, ...], str], DeviceMesh] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def coordinates(self) -> Coordinates:
        """The place of this rank in the layout."""
        return coordinates(self.layout, self.rank)

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The group of the ranks that share one copy of the experts: they exchange tokens."""
        return self.groups["ep"]

    @property
    def expert_replica_group(self) -> dist.ProcessGroup:
        """The group of all ranks that store this rank's block of experts."""
        return self.groups[EXPERT_REPLICAS]

    def device_mesh(self, *axes: str, device_type: str | None = None) -> DeviceMesh:
        """Returns a DeviceMesh over existing groups, for DTensor and FSDP.

        It is the same object each time, and makes no new communicators.

        Args:
            axes: of one view, outermost first: ("dp_replicate", "dp_shard"),
                ("expert_replicas", "ep").
            device_type: "cpu" or "cuda"; None is that of this process.
        """
        key = (axes, device_type or self.device_type)
        if key not in self._device_meshes:
            groups = [self.groups[axis] for axis in axes]
            self._device_meshes[key] = DeviceMesh.from_group(
                groups,
                key[1],
                mesh=_ranks_around(self.layout, axes, self.rank),
                mesh_dim_names=axes,
            )
        return self._device_meshes[key]


def build_mesh(layout: Layout, process: Process) -> Mesh:
    """Makes the groups of `layout` that this rank is in; a collective call of the whole world.

    Raises:
        ValueError: the layout is of another size than the world.
    """
    if layout.world_size != process.world_size:
        raise ValueError(
            f"the layout ({layout}) is of another size than the world of {process.world_size} ranks"
        )
    world_group = dist.group.WORLD
    if world_group is None:
        raise RuntimeError(
            "start_process() comes before build_mesh(): there is no process group yet"
        )
    made = {("sums", tuple(range(layout.world_size))): world_group}
    groups: dict[str, dist.ProcessGroup] = {}
    for axis in AXES:
        ranks = tuple(group_of(layout, axis, process.rank))
        key = (_USE[axis] if len(ranks) > 1 else "alone", ranks)
        if layout.world_size == 1:
            made[key] = world_group
        elif key not in made:
            name = axis if len(ranks) > 1 else "itself"
            made[key] = new_group(f"{name} of ranks {spell_ranks(ranks)}", ranks, process.timeout_s)
        groups[axis] = made[key]
    return Mesh(layout, process.rank, process.device.type, world_group, groups)


def new_group(description: str, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """Makes one group, together with the other ranks in it.

    Nobody waits in a circle where all ranks make their groups in one order of tables, each of which
    divides the ranks.
    """
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        group_desc=description,
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup), f"{description}: this rank is not in {ranks}"
    return group


def _ranks_around(layout: Layout, axes: tuple[str, ...], rank: int) -> torch.Tensor:
    """Returns the ranks that differ from `rank` in `axes` only, one dimension for each axis."""
    ranks = torch.tensor(rank)
    for axis in axes:
        distances = offsets(layout, axis)
        own = distances[index_in_group(layout, axis, rank)]
        ranks = ranks.unsqueeze(-1) + torch.tensor(distances) - own
    return ranks
