"""Which numbers of nodes fit a run, and with which mesh."""

import pytest

from moebius.distributed.layout import plan_layout
from moebius.train.config.resize import layouts_for, mesh_for, with_mesh_of
from moebius.train.config.run_config import Config
from moebius.train.config.validation import validated


def config(**mesh) -> Config:
    values = {
        "mesh": mesh,
        "train": {"global_batch": 16, "micro_batch": 2},
        "job": {"num_nodes": 4},
        "model": {"vocab_size": 257, "feed_forward": {"kind": "experts", "num_experts": 4}},
        "prepare": {"tokenizer": "bytes", "vocab_size": 257},
    }
    return validated(Config, values, origin="test")


def test_the_mesh_stays_where_it_fits():
    assert layouts_for(config(ep=2), range(1, 9)) == {
        1: {"ep": 1},
        2: {},
        4: {},
        8: {},
    }, "3, 5, 6 and 7 ranks do not divide a batch of 16 into pairs"


def test_replicas_fill_the_world_before_ep_is_made_smaller():
    meshes = layouts_for(config(ep=2, dp_replicate=2), [1, 2, 4])
    assert meshes == {1: {"ep": 1, "dp_replicate": None}, 2: {"dp_replicate": None}, 4: {}}


def test_experts_that_cannot_move_stay():
    mesh = mesh_for(config(ep=2, rebalance_every=10, replicas=1), 1)
    assert mesh is not None
    assert (mesh.ep, mesh.rebalance_every, mesh.replicas) == (1, 0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharding_keeps_as_many_shards_as_fit(world_size):
    mesh = mesh_for(config(sharding="fsdp", dp_shard=4), world_size)
    assert mesh is not None
    assert plan_layout(mesh, world_size).dp_shard == world_size


def test_what_never_fits_is_none():
    assert mesh_for(config(), 3) is None


def test_a_rank_takes_the_mesh_that_was_chosen():
    asked = config(ep=2, dp_replicate=2)
    given = with_mesh_of(asked, {"MOEBIUS_MESH": '{"ep": 1, "dp_replicate": null}'})
    assert (given.mesh.ep, given.mesh.dp_replicate) == (1, None)
    assert with_mesh_of(asked, {}) == asked
