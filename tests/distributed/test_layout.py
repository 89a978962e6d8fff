"""Properties of rank tables, for every legal mesh of up to 64 ranks and samples of larger worlds."""

import itertools
import json
import math
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moebius.distributed.layout import (
    AXES,
    DENSE_AXES,
    SPARSE_AXES,
    Layout,
    MeshConfig,
    check_experts,
    coordinates,
    group_of,
    index_in_group,
    local_experts,
    plan_layout,
    spell_ranks,
)


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def every_layout(world_size):
    """Every (dp_replicate, dp_shard, ep) that makes up a world."""
    return [
        Layout(dp_replicate=world_size // dp_shard, dp_shard=dp_shard, ep=ep)
        for dp_shard in divisors(world_size)
        for ep in divisors(dp_shard)
    ]


@st.composite
def layouts(draw, max_world=512):
    dp_shard = draw(st.integers(1, max_world))
    dp_replicate = draw(st.integers(1, max_world // dp_shard))
    return Layout(dp_replicate, draw(st.sampled_from(divisors(dp_shard))), dp_shard)


def rank_tables(layout):
    """The groups of every axis, by their first rank."""
    ranks = range(layout.world_size)
    firsts = {a: [r for r in ranks if index_in_group(layout, a, r) == 0] for a in AXES}
    return {a: [group_of(layout, a, rank) for rank in firsts[a]] for a in AXES}


def check_tables(layout):
    """Everything that must hold of one layout's tables."""
    world, tables = range(layout.world_size), rank_tables(layout)
    for axis, groups in tables.items():
        # a partition: each rank in one group
        assert sorted(itertools.chain(*groups)) == list(world), (layout, axis)
        assert {len(group) for group in groups} == {layout.size(axis)}
        assert all(group == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for view in (DENSE_AXES, SPARSE_AXES):  # the product of a view's axes is the world
        assert math.prod(layout.size(axis) for axis in view) == layout.world_size
    # ep is innermost: its ranks are neighbours
    assert all(group == list(range(group[0], group[0] + layout.ep)) for group in tables["ep"])


def test_tables_of_every_mesh_of_up_to_64_ranks():
    for world_size in range(1, 65):
        for layout in every_layout(world_size):
            check_tables(layout)


@settings(max_examples=60)
@given(layout=layouts(), data=st.data())
def test_a_group_differs_in_its_axis_alone(layout, data):
    axis, rank = data.draw(st.sampled_from(AXES)), data.draw(st.integers(0, layout.world_size - 1))
    [own] = [group for group in rank_tables(layout)[axis] if rank in group]
    assert group_of(layout, axis, rank) == own
    assert own[index_in_group(layout, axis, rank)] == rank
    places = [coordinates(layout, member) for member in own]
    parts = {"dp_replicate", "efsdp"} if axis == "expert_replicas" else {axis}
    view = DENSE_AXES if parts <= set(DENSE_AXES) else SPARSE_AXES
    for other in set(view) - parts:
        assert len({getattr(place, other) for place in places}) == 1
    assert len({tuple(getattr(place, part) for part in parts) for place in places}) == len(own)


@settings(max_examples=60)
@given(layout=layouts(max_world=128), block=st.integers(1, 5), more=st.integers(0, 127))
def test_an_ep_group_holds_every_expert_once_and_replicas_hold_the_same(layout, block, more):
    num_experts = layout.ep * block + more % layout.ep
    tables = rank_tables(layout)
    for group in tables["ep"]:
        blocks = [local_experts(layout, rank, num_experts) for rank in group]
        held = [expert for own in blocks for expert in own]
        assert held == list(range(num_experts))  # contiguous, in the order of the ep index
        assert [len(own) for own in blocks] == [
            block + (index < more % layout.ep) for index in range(layout.ep)
        ]
    for group in tables["expert_replicas"]:
        assert len({local_experts(layout, rank, num_experts) for rank in group}) == 1
        assert [coordinates(layout, rank).expert_replicas for rank in group] == list(
            range(layout.expert_replicas)
        )


def test_a_layout_comes_back_from_json():
    adapter = TypeAdapter(Layout)
    assert adapter.validate_python({"dp_replicate": 2, "ep": 4}) == Layout(2, 4, 4)
    layout = Layout(dp_replicate=3, dp_shard=8, ep=2)
    assert adapter.validate_json(adapter.dump_json(layout)) == layout


@settings(max_examples=300)
@given(
    ep=st.integers(1, 12),
    dp_shard=st.none() | st.integers(1, 12),
    dp_replicate=st.none() | st.integers(1, 12),
    world_size=st.integers(1, 64),
)
def test_a_mesh_fits_exactly_or_is_refused_with_its_values_and_what_would_fit(
    ep, dp_shard, dp_replicate, world_size
):
    mesh = MeshConfig(ep=ep, dp_shard=dp_shard, dp_replicate=dp_replicate)
    shard = dp_shard or ep
    replicas = [dp_replicate] if dp_replicate else range(1, world_size + 1)
    if shard % ep == 0 and any(count * shard == world_size for count in replicas):
        layout = plan_layout(mesh, world_size)
        assert (layout.world_size, layout.ep, layout.dp_shard) == (world_size, ep, shard)
        assert dp_replicate in (None, layout.dp_replicate)
        return
    with pytest.raises(
        ValueError, match=rf"does not fit the world: .*mesh.ep {ep}\b.*\b{world_size}\b"
    ) as error:
        plan_layout(mesh, world_size)
    advice = str(error.value).rpartition("; ")[2]
    free = {"dp_shard": None, "dp_replicate": None} if "without" in advice else {}
    for key, values in re.findall(r"mesh\.(\w+) must be (?:one of \[)?([\d, ]*\d)", advice):
        for value in json.loads(f"[{values}]"):
            changed = mesh.model_copy(update=free | {key: value})
            assert plan_layout(changed, world_size).world_size == world_size
    if started := re.search(r"start (\d+) ranks", advice):
        assert plan_layout(mesh, int(started[1])).dp_replicate == dp_replicate
    assert re.search(r"must be |start \d+ ranks", advice)


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        (
            {"ep": 4},
            6,
            r"mesh\.ep 4 does not divide the world's 6 ranks; mesh\.ep must be one of \[1, 2, 3, 6\]",
        ),
        (
            {"ep": 2, "dp_replicate": 2},
            3,
            r"mesh\.dp_replicate 2 × mesh\.ep 2 = 4 ranks, but the world has 3; start 4 ranks",
        ),
        (
            {"ep": 4, "dp_shard": 6},
            12,
            r"mesh\.ep 4 does not divide mesh\.dp_shard 6; the world has 12 ranks; "
            r"mesh\.ep must be one of \[1, 2, 3, 6\], or mesh\.dp_shard must be one of \[4, 12\]",
        ),
        (
            {"ep": 4, "dp_shard": 6, "dp_replicate": 5},
            12,
            r"without mesh\.dp_shard and mesh\.dp_replicate, mesh\.ep must be",
        ),
        ({}, 0, r"a world has 1 to 131,072 ranks, got world_size = 0"),
        ({"ep": 3}, 2**31, r"a world has 1 to 131,072 ranks, got world_size = 2,147,483,648"),
    ],
)
def test_refusals_in_words(mesh, world_size, message):
    with pytest.raises(ValueError, match=message):
        plan_layout(MeshConfig(**mesh), world_size)


def test_experts_that_are_fewer_than_the_ranks_are_named():
    layout = Layout(dp_replicate=1, ep=4)
    check_experts(layout, {"feed_forward": 155, "attention.v": 4})
    assert [len(local_experts(layout, rank, 155)) for rank in range(4)] == [39, 39, 39, 38]
    with pytest.raises(
        ValueError,
        match=r"mesh.ep 4 is more than the experts: attention.o has 3, attention.v has 2; .* at least 4 experts",
    ):
        check_experts(layout, {"feed_forward": 6, "attention.o": 3, "attention.v": 2})


@pytest.mark.parametrize(
    "wrong",
    [
        {"ep": 0},
        {"dp_replicate": 0},
        {"sharding": "zero"},
        {"dispatcher": "mpi"},
        {"x": 1},
        {"replicas": 1},
        {"rebalance_every": 1, "sharding": "fsdp"},
    ],
)
def test_mesh_config_refuses(wrong):
    with pytest.raises(ValidationError):
        MeshConfig(**wrong)


@pytest.mark.parametrize(
    ("ranks", "spelled"),
    [
        ([3], "3"),
        (range(8), "0-7"),
        ([0, 8, 16, 24], "0, 8, … 24"),
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([], ""),
        ([rank**2 for rank in range(20)], "0-1, 4, 9, 16, 25, 36, 49, 64, … (20 in all)"),
    ],
)
def test_ranks_in_short(ranks, spelled):
    assert spell_ranks(ranks) == spelled


def test_layout_needs_no_torch():
    code = "import sys, moebius.distributed.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
