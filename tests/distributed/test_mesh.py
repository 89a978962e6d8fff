"""Groups of a mesh join the ranks that the tables say, on real and pretended ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from meshes import meshed
from pairwise import slow_but
from torch.testing._internal.distributed.fake_pg import FakeStore
from world import run_ranks

from moebius.distributed.layout import (
    AXES,
    DENSE_AXES,
    SPARSE_AXES,
    Layout,
    MeshConfig,
    group_of,
    plan_layout,
)
from moebius.distributed.mesh import build_mesh
from moebius.distributed.process.process import Process, start_process, stop_process

# world, ep, dp_shard, and groups: tokens, weights and sums have their own communicators, and one group of
# itself serves all axes of size 1
SIZES = [(1, 1, None, 1), (4, 1, None, 2), (4, 2, None, 5), (4, 4, None, 4), (4, 2, 4, 6)]


def sum_of_ranks(group, rank):
    value = torch.tensor([2.0**rank], dtype=torch.float64)
    dist.all_reduce(value, group=group)
    return int(value.item())


def describe(ep, dp_shard):
    with meshed(ep=ep, dp_shard=dp_shard) as (process, mesh):
        sums = {axis: sum_of_ranks(mesh.groups[axis], process.rank) for axis in AXES}
        members = {axis: dist.get_process_group_ranks(mesh.groups[axis]) for axis in AXES}
        for view in (DENSE_AXES, SPARSE_AXES):
            device_mesh = mesh.device_mesh(*view)
            assert device_mesh is mesh.device_mesh(*view)
            assert device_mesh.mesh_dim_names == view
            assert list(device_mesh.get_coordinate() or ()) == [
                getattr(mesh.coordinates, axis) for axis in view
            ]
            assert all(device_mesh.get_group(axis) is mesh.groups[axis] for axis in view)
        assert mesh.device_mesh("dp_replicate", "dp_shard").mesh.tolist() == [
            group_of(mesh.layout, "dp_shard", rank) for rank in members["dp_replicate"]
        ]
        assert mesh.ep_group is mesh.groups["ep"]
        assert mesh.expert_replica_group is mesh.groups["expert_replicas"]
        num_groups = len({id(mesh.groups[axis]) for axis in AXES} | {id(mesh.world_group)})
        return (
            sums,
            members,
            mesh.ep_group.group_desc,
            sum_of_ranks(mesh.world_group, process.rank),
            num_groups,
        )


@pytest.mark.parametrize(
    ("world_size", "ep", "dp_shard", "num_groups"),
    slow_but(SIZES, (1, 1, None, 1), (4, 2, None, 5), names=4),
)
def test_groups_join_the_ranks_of_the_tables(world_size, ep, dp_shard, num_groups):
    layout = plan_layout(MeshConfig(ep=ep, dp_shard=dp_shard), world_size)
    for rank, (sums, members, description, total, groups) in enumerate(
        run_ranks(describe, world_size, ep, dp_shard)
    ):
        for axis in AXES:
            own = group_of(layout, axis, rank)
            assert members[axis] == own
            assert sums[axis] == sum(2**other for other in own)
        assert total == 2**world_size - 1
        assert groups == num_groups
        if ep > 1:
            assert description == f"ep of ranks {members['ep'][0]}-{members['ep'][-1]}"


def group_times_out():
    process = start_process(
        "cpu", timeout_s=3
    )  # in which the groups must be made, on a busy machine too
    mesh = build_mesh(Layout(dp_replicate=2, ep=2), process)
    if process.rank == 3:
        time.sleep(4)
        return "elsewhere"
    try:
        dist.all_reduce(torch.zeros(1), group=mesh.ep_group)
    except RuntimeError as error:
        return str(error)
    return "came together"


def test_groups_have_the_timeout_of_the_process():
    answers = run_ranks(group_times_out, 4, timeout_s=40)
    assert answers[:2] == ["came together"] * 2
    assert "Timed out waiting 3000ms" in answers[2]


def simulated(rank, world_size):
    return Process(rank, world_size, rank, torch.device("cpu"), "simulated", 20)


@pytest.mark.parametrize("rank", [0, 5000, 10_239])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=160, dp_shard=64, ep=8),
        Layout(dp_replicate=8, dp_shard=1280, ep=64),
    ],
)
def test_one_rank_of_a_pretended_10_240(rank, layout):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=10_240)
    try:
        started = time.perf_counter()
        mesh = build_mesh(layout, simulated(rank, 10_240))
        shapes = tuple(mesh.device_mesh(*view).shape for view in (DENSE_AXES, SPARSE_AXES))
        assert (
            time.perf_counter() - started < 5
        )  # it is 0.1 s; making every group of the world would take minutes
        for axis in AXES:
            assert dist.get_process_group_ranks(mesh.groups[axis]) == group_of(layout, axis, rank)
        assert shapes == tuple(
            tuple(getattr(layout, axis) for axis in view) for view in (DENSE_AXES, SPARSE_AXES)
        )
        assert (
            mesh.device_mesh("expert_replicas", "ep").size() == layout.expert_replicas * layout.ep
        )
    finally:
        stop_process()
