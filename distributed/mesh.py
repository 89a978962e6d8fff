"""The process groups of a layout. Built once at start, on all ranks in the same order; costs about 10 ms for 4 ranks.

Groups are objects that are handed to whoever needs them; nothing here is global. Every group has a description (it
stands in torch's error messages and flight recorder) and the process' timeout.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .layout import AXES, Coordinates, Layout, coordinates, rank_tables
from .process import Process


@dataclass(frozen=True)
class Mesh:
    """This rank's groups. An axis of size 1 has a group of one, so that callers need no special case."""

    layout: Layout
    rank: int
    world_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    dp_replicate_group: dist.ProcessGroup
    device_mesh: DeviceMesh  # ("dp_replicate", "ep"), over the same two groups: for DTensor

    @property
    def coordinates(self) -> Coordinates:
        return coordinates(self.layout, self.rank)


def build_mesh(layout: Layout, process: Process) -> Mesh:
    """The groups of `layout` around this rank. A collective call: every rank of the world must come.

    Raises ValueError if the layout is of another size than the world.
    """
    if layout.world_size != process.world_size:
        raise ValueError(f"the layout ({layout}) is of another size than the world of {process.world_size} ranks")
    world_group = dist.group.WORLD
    if world_group is None:
        raise RuntimeError("start_process() comes before build_mesh(): there is no process group yet")
    groups = {axis: _own_group(axis, layout, process) for axis in AXES}
    return Mesh(
        layout=layout,
        rank=process.rank,
        world_group=world_group,
        ep_group=groups["ep"],
        dp_replicate_group=groups["dp_replicate"],
        device_mesh=device_mesh(layout, [groups[axis] for axis in AXES], process.device.type),
    )


def device_mesh(layout: Layout, groups: list[dist.ProcessGroup], device_type: str) -> DeviceMesh:
    """A DeviceMesh over existing groups, one for each of AXES; makes no new communicators."""
    return DeviceMesh.from_group(groups, device_type, mesh=rank_tables(layout)["ep"], mesh_dim_names=AXES)


def _own_group(axis: str, layout: Layout, process: Process) -> dist.ProcessGroup:
    """Takes part in the creation of all groups of the axis and returns the one that this rank is in."""
    own: dist.ProcessGroup | None = None
    for ranks in rank_tables(layout)[axis]:
        description = f"{axis} of ranks {ranks[0]}..{ranks[-1]}"
        group = dist.new_group(ranks, timeout=timedelta(seconds=process.timeout_s), group_desc=description)
        if isinstance(group, dist.ProcessGroup) and process.rank in ranks:
            own = group
    if own is None:
        raise AssertionError(f"rank {process.rank} is in no {axis} group of {layout}")
    return own
