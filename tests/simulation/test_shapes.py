"""One rank of worlds up to 10,240: what it holds, against plain arithmetic, and what is refused."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from moebius.distributed.layout import Layout
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.simulation import shapes as module
from moebius.simulation.shapes import (
    RankShapes,
    ShapeMismatch,
    ShapeRequest,
    first_middle_last,
    shapes_of,
)

MODEL = ModelConfig(
    vocab_size=64,
    d_model=32,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=4, d_head=8, num_experts=16, top_k=2),
    feed_forward=ExpertsConfig(num_experts=128, router=SigmoidConfig(top_k=4), d_expert=16),
)
REQUEST = ShapeRequest(MODEL, Layout(dp_replicate=16, ep=64), "dedup", "none", "float32", 16, 2, 8)


def request(world: int, ep: int, **changes) -> ShapeRequest:
    return dataclasses.replace(REQUEST, layout=Layout(dp_replicate=world // ep, ep=ep), **changes)


def numel(name: str = "") -> int:
    with torch.device("meta"):
        model = Transformer(MODEL)
    experts = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    return experts if name == "experts" else sum(p.numel() for p in model.parameters()) - experts


@pytest.mark.parametrize(
    ("world", "ep", "dispatcher"),
    [
        (1024, 64, "dedup"),
        (8192, 64, "hierarchical"),
        (10_240, 64, "alltoall"),
        (10_240, 1, "auto"),
    ],
)
def test_the_first_the_middle_and_the_last_rank(world: int, ep: int, dispatcher: str) -> None:
    shapes = shapes_of(request(world, ep, dispatcher=dispatcher), first_middle_last(world))
    assert [found.rank for found in shapes] == [0, world // 2, world - 1]
    for found in shapes:
        check(found, ep)
        assert found.place.dp_replicate == found.rank // ep
        assert found.group_sizes["ep"] == ep
        assert found.group_sizes["expert_replicas"] == world // ep
    assert not dist.is_initialized()


def check(found: RankShapes, ep: int) -> None:
    """Every number again, by hand."""
    place = found.rank % ep
    assert found.dense_parameters == numel()
    assert found.expert_parameters == numel("experts") // ep
    for bank in found.banks:
        total = 128 if "feed_forward" in bank.layer else 64
        assert bank.experts == range(place * total // ep, (place + 1) * total // ep)
        assert bank.shape == (total // ep, *bank.whole[1:])
        assert bank.whole[0] == total
    assert len(found.banks) == 2 * 3
    held = numel() + numel("experts") // ep
    assert found.bytes["weights"] == found.bytes["gradients"] == 4 * held
    assert found.bytes["moments"] == 8 * held
    assert found.total_bytes == 16 * held + found.bytes["kept"]
    assert (
        found.bytes["kept"] > 2 * 16 * 4 * 32 * 4
    )  # at least the residual stream of 4 depth steps


def test_sharded_weights_are_spread_over_the_ranks_that_share_them() -> None:
    layout = Layout(dp_replicate=320, dp_shard=32, ep=8)
    plain, sharded = (
        shapes_of(
            dataclasses.replace(REQUEST, layout=layout, sharding=sharding),
            first_middle_last(10_240),
        )
        for sharding in ("none", "fsdp")
    )
    with torch.device("meta"):
        named = dict(Transformer(MODEL).named_parameters())
    small = sum(
        p.numel()
        for name, p in named.items()
        if any(part in name for part in ("router", "norm", "bias"))
    )
    for whole, own in zip(plain, sharded, strict=True):
        assert own.expert_parameters * 4 == whole.expert_parameters  # efsdp
        assert own.dense_parameters == small + (whole.dense_parameters - small) // 32
        assert [bank.experts for bank in own.banks] == [bank.experts for bank in whole.banks]


def test_low_precision_keeps_copies_of_what_enters_products() -> None:
    exact, rough = (
        shapes_of(request(64, 8, precision=precision), [63])[0]
        for precision in ("float32", "bfloat16")
    )
    assert "copies" not in exact.bytes
    assert 0 < rough.bytes["copies"] < rough.bytes["weights"] / 2
    assert rough.bytes["weights"] == exact.bytes["weights"]
    assert rough.bytes["kept"] < exact.bytes["kept"]


def test_experts_that_no_rank_number_divides() -> None:
    shapes = shapes_of(request(1020, 60), first_middle_last(1020))
    assert [len(found.banks[0].experts) for found in shapes] == [
        2,
        1,
        1,
    ]  # 64 experts of V on 60 ranks
    assert [found.banks[0].experts.start for found in shapes] == [0, 34, 63]


def test_configurations_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"mesh.ep 128 is more than the experts: attention has 64"):
        shapes_of(request(1024, 128), [0])
    with pytest.raises(ValueError, match="20480 pretended ranks: there may be 1 to 10,240"):
        shapes_of(request(20_480, 64), [0])
    with pytest.raises(ValueError, match="rank 1024 is not in a world of 1024"):
        shapes_of(request(1024, 64), [1024])
    with pytest.raises(ValueError, match="equally many ranks of an EP group on each node"):
        shapes_of(request(1024, 64, dispatcher="hierarchical", ranks_per_node=24), [0])


def test_wrong_groups_and_wrong_shapes_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "group_of", lambda layout, axis, rank: [rank])
        with pytest.raises(ShapeMismatch, match="rank 3: its group dp_replicate joins"):
            shapes_of(request(64, 8), [3])
    with monkeypatch.context() as patch:
        patch.setattr(module, "local_tensor", lambda parameter: parameter[:1])
        with pytest.raises(
            ShapeMismatch, match=r"rank 3: holds \(1, 32\) of embedding, its tables say \(64, 32\)"
        ):
            shapes_of(request(64, 8), [3])
    with monkeypatch.context() as patch:
        patch.setattr(module, "expert_blocks", lambda count, ranks: [range(count), range(1)])
        with pytest.raises(ShapeMismatch, match="the ranks of an ep group hold the experts"):
            shapes_of(request(64, 8), [3])
    with monkeypatch.context() as patch:
        patch.setattr(module, "local_experts", lambda layout, rank, count, name: range(8))
        with pytest.raises(
            ShapeMismatch,
            match=r"rank 3: holds the experts 24-31 of .*, its tables say range\(0, 8\)",
        ):
            shapes_of(request(64, 8), [3])
    assert not dist.is_initialized()


@pytest.mark.parametrize("world", [1, 2, 3, 10_240])
def test_ends_and_middle(world: int) -> None:
    assert first_middle_last(world) == sorted({0, world // 2, world - 1})
