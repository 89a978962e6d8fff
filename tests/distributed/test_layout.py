"""Rank tables: the properties that make a mesh a mesh, exhaustively to 64 ranks."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moebius.distributed.layout import (
    AXES,
    Coordinates,
    Layout,
    MeshConfig,
    check_experts,
    coordinates,
    local_experts,
    plan_layout,
    rank_tables,
    render,
)

EVERY_LAYOUT = [
    Layout(dp_replicate=world_size // ep, ep=ep)
    for world_size in range(1, 65)
    for ep in range(1, world_size + 1)
    if world_size % ep == 0
]


def test_each_axis_partitions_the_world():
    for layout in EVERY_LAYOUT:
        for axis, groups in rank_tables(layout).items():
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size)), (layout, axis)
            assert {len(group) for group in groups} == {getattr(layout, axis)}


def test_groups_of_two_axes_meet_in_one_rank():
    for layout in EVERY_LAYOUT:
        tables = rank_tables(layout)
        for replicas in tables["dp_replicate"]:
            for row in tables["ep"]:
                assert len(set(replicas) & set(row)) == 1


def test_ep_is_innermost_so_its_groups_are_contiguous():
    for layout in EVERY_LAYOUT:
        assert all(group == list(range(group[0], group[0] + layout.ep)) for group in rank_tables(layout)["ep"])


def test_tables_and_coordinates_tell_the_same():
    for layout in EVERY_LAYOUT:
        tables = rank_tables(layout)
        for rank in range(layout.world_size):
            place = coordinates(layout, rank)
            assert rank == place.dp_replicate * layout.ep + place.ep
            assert tables["ep"][place.dp_replicate][place.ep] == rank
            assert tables["dp_replicate"][place.ep][place.dp_replicate] == rank


@given(layout=st.sampled_from(EVERY_LAYOUT), block=st.integers(1, 5))
def test_an_ep_group_holds_every_expert_once_and_replicas_hold_the_same(layout, block):
    num_experts = layout.ep * block
    tables = rank_tables(layout)
    for group in tables["ep"]:
        held = [expert for rank in group for expert in local_experts(layout, rank, num_experts)]
        assert held == list(range(num_experts))  # contiguous, in the order of the ep index
    for group in tables["dp_replicate"]:
        assert len({local_experts(layout, rank, num_experts) for rank in group}) == 1


@given(ep=st.integers(1, 12), dp_replicate=st.none() | st.integers(1, 12), world_size=st.integers(1, 64))
def test_a_mesh_fits_exactly_or_is_refused_with_its_values(ep, dp_replicate, world_size):
    mesh = MeshConfig(ep=ep, dp_replicate=dp_replicate)
    fits = world_size % ep == 0 if dp_replicate is None else dp_replicate * ep == world_size
    if fits:
        layout = plan_layout(mesh, world_size)
        assert (layout.ep, layout.world_size) == (ep, world_size)
        assert dp_replicate in (None, layout.dp_replicate)
    else:
        with pytest.raises(ValueError, match=rf"(?s)does not fit.*mesh.ep {ep}.*{world_size}"):
            plan_layout(mesh, world_size)


def test_experts_that_ep_does_not_divide_are_named():
    layout = Layout(dp_replicate=1, ep=4)
    check_experts(layout, {"feed_forward": 8, "attention.v": 4})
    with pytest.raises(
        ValueError, match=r"mesh.ep 4 does not divide the experts: feed_forward has 6, attention.v has 2;"
    ):
        check_experts(layout, {"feed_forward": 6, "attention.o": 4, "attention.v": 2})
    with pytest.raises(ValueError, match=r"attention.v has 0"):
        local_experts(layout, 0, 0, "attention.v")


def test_a_rank_outside_is_refused():
    with pytest.raises(ValueError, match=r"rank 4 is not in 0\.\.3"):
        coordinates(Layout(dp_replicate=2, ep=2), 4)
    assert coordinates(Layout(dp_replicate=2, ep=2), 3) == Coordinates(dp_replicate=1, ep=1)


@pytest.mark.parametrize("wrong", [{"ep": 0}, {"dp_replicate": 0}, {"tp": 2}])
def test_mesh_config_refuses(wrong):
    with pytest.raises(ValidationError):
        MeshConfig(**wrong)


def test_render_shows_every_rank_and_what_crosses_nodes():
    text = render(plan_layout(MeshConfig(ep=2), 4), ranks_per_node=2, num_experts={"feed_forward": 8})
    assert text.splitlines() == [
        "world 4 = dp_replicate 2 × ep 2, 2 nodes of 2 ranks",
        "",
        "node  rank  dp_replicate  ep  experts of feed_forward",
        "   0     0             0   0                      0-3",
        "   0     1             0   1                      4-7",
        "   1     2             1   0                      0-3",
        "   1     3             1   1                      4-7",
        "",
        "groups",
        "  dp_replicate  2 of 2 cross nodes      [0 2] [1 3]",
        "  ep            each inside one node    [0 1] [2 3]",
    ]
    assert "2 of 2 cross nodes      [0 1] [2 3]" in render(Layout(dp_replicate=2, ep=2), ranks_per_node=1)
    assert "nothing to send" in render(Layout(dp_replicate=1, ep=2), ranks_per_node=2)
    with pytest.raises(ValueError, match="nodes of 3 ranks cannot make up a world of 4"):
        render(Layout(dp_replicate=2, ep=2), ranks_per_node=3)


def test_layout_needs_no_torch():
    code = "import sys, moebius.distributed.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert tuple(rank_tables(Layout(dp_replicate=1, ep=1))) == AXES
