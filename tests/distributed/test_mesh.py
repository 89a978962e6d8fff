"""Groups of a mesh: they join the ranks that the tables say, and DTensor works over them."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from world import RankFailed, run_ranks

from moebius.distributed.layout import Layout, MeshConfig, plan_layout, rank_tables
from moebius.distributed.mesh import build_mesh
from moebius.distributed.process import start_process


def describe(ep):
    with start_process("cpu", timeout_s=20) as process:
        mesh = build_mesh(plan_layout(MeshConfig(ep=ep), process.world_size), process)
        sums = {}
        for axis, group in (
            ("ep", mesh.ep_group),
            ("dp_replicate", mesh.dp_replicate_group),
            ("world", mesh.world_group),
        ):
            value = torch.tensor([2.0**process.rank])
            dist.all_reduce(value, group=group)
            sums[axis] = int(value.item())
        members = {
            "ep": dist.get_process_group_ranks(mesh.ep_group),
            "dp_replicate": dist.get_process_group_ranks(mesh.dp_replicate_group),
        }
        place = mesh.device_mesh.get_coordinate()
        assert tuple(place) == (mesh.coordinates.dp_replicate, mesh.coordinates.ep)
        assert mesh.device_mesh.mesh_dim_names == ("dp_replicate", "ep")
        assert mesh.device_mesh.get_group("ep") is mesh.ep_group
        return sums, members, mesh.ep_group.group_desc


def full_experts(ep):
    """Every rank holds its block of 8 experts as a local tensor; DTensor puts them together in global order."""
    with start_process("cpu", timeout_s=20) as process:
        mesh = build_mesh(plan_layout(MeshConfig(ep=ep), process.world_size), process)
        block = 8 // ep
        local = torch.arange(block) + mesh.coordinates.ep * block
        whole = DTensor.from_local(local, mesh.device_mesh, [Replicate(), Shard(0)])
        return whole.full_tensor()


def ep_group_times_out():
    process = start_process("cpu", timeout_s=0.5)
    mesh = build_mesh(Layout(dp_replicate=1, ep=2), process)
    if process.rank == 1:
        time.sleep(1)
        return "elsewhere"
    try:
        dist.all_reduce(torch.zeros(1), group=mesh.ep_group)
    except RuntimeError as error:
        return str(error)


def wrong_world():
    with start_process("cpu", timeout_s=20) as process:
        build_mesh(Layout(dp_replicate=2, ep=2), process)


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_groups_join_the_ranks_of_the_tables(world_size, ep):
    tables = rank_tables(plan_layout(MeshConfig(ep=ep), world_size))
    for rank, (sums, members, description) in enumerate(run_ranks(describe, world_size, ep)):
        for axis, groups in tables.items():
            own = next(group for group in groups if rank in group)
            assert members[axis] == own
            assert sums[axis] == sum(2**other for other in own)
        assert sums["world"] == 2**world_size - 1
        own = members["ep"]
        assert description == f"ep of ranks {own[0]}..{own[-1]}"


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_dtensor_puts_experts_together_in_global_order(ep):
    assert all(torch.equal(found, torch.arange(8)) for found in run_ranks(full_experts, 4, ep))


def test_groups_have_the_timeout_of_the_process():
    first, second = run_ranks(ep_group_times_out, 2, timeout_s=20)
    assert "Timed out waiting 500ms" in first
    assert second == "elsewhere"


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(RankFailed, match=r"dp_replicate 2 × ep 2\) is of another size than the world of 2 ranks"):
        run_ranks(wrong_world, 2)
