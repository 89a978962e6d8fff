"""Gradient norms by part of the model: those of float64 on every layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import small_model
from parts import make_config
from torch import Tensor
from trained import assembled, gradients, lines, run_training
from world import run_ranks

from moebius.distributed.placement.move import expert_maps_of
from moebius.model.routers.cosine import CosineConfig
from moebius.train.config.run_config import Config
from moebius.train.hooks import move_experts
from moebius.train.loop import step
from moebius.train.metrics.log import MetricsLog
from moebius.train.rank_data import open_loader
from moebius.train.run import OpenRun

# A model with every part: its first layer is dense, and loops read the input by a map of their own.
MODEL = small_model.MODEL.changed(
    {
        "feed_forward.sparse_layers": 1,
        "feed_forward.num_shared_experts": 1,
        "feed_forward.router.balance": 0.0,  # so that some experts get hot
        "loops.inject": "linear",
    }
)
PLACES = {  # by words of a parameter's name; the first that fits
    "norms": "norm.",
    "routers": "router.",
    "attention": ".attention.",
    "experts": ".experts.",
    "feed_forward": ".feed_forward.",
    "head": "head.",
    "embedding": "embedding",
    "other": "",
}


def config_of(data: Path, **changes: Any) -> Config:
    return make_config(data, **({"model": MODEL, "optim__clip_norm": 1e9} | changes))


def norms_by_name(gradients: dict[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        part = next(part for part, words in PLACES.items() if words in name)
        squares[part] = squares.get(part, 0.0) + gradient.double().square().sum().item()
    return {part: math.sqrt(square) for part, square in squares.items()}


def two_steps(config: Config, run_dir: Path) -> tuple[float, dict[str, float], dict, int]:
    """Makes two steps that move experts and no weight; returns the norms of the second."""
    with assembled(config, run_dir) as run, open_loader(run, None) as loader:
        run = OpenRun(**vars(run), loader=loader, log=MetricsLog(run_dir, active=False))
        move_experts(run, step(run, next(loader), 0.0))
        result = step(run, next(loader), 0.0)
        alone = norms_by_name(gradients(run)) if run.process.world_size == 1 else {}
        copies = sum(len(each.copies) for each in expert_maps_of(run.model).values())
        return result.grad_norm, result.grad_norms, alone, copies


COPIES = {"ep": 2, "rebalance_every": 1, "replicas": 1}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"ep": 2}),
    (2, {"dp_shard": 2, "sharding": "fsdp"}),
    (4, {"ep": 2, "dp_shard": 4, "sharding": "fsdp"}),
    (4, {"ep": 2}),
    (4, COPIES),
]
TWO_DTYPES = {  # its temperature is float32
    "train__precision": "bfloat16_only",
    "model": MODEL.changed({"feed_forward.router": CosineConfig(top_k=3)}),
}


@pytest.mark.parametrize(("changes", "layouts"), [({}, LAYOUTS), (TWO_DTYPES, LAYOUTS[:1])])
def test_parts_are_those_of_float64_on_every_layout(
    changes: dict[str, Any], layouts: list[Any], data: Path, tmp_path: Path
) -> None:
    found = [
        run_ranks(two_steps, world, config_of(data, mesh=mesh, **changes), tmp_path / str(number))
        for number, (world, mesh) in enumerate(layouts)
    ]
    expected = found[0][0][2]
    assert set(expected) == set(PLACES)
    for ranks, (_, mesh) in zip(found, layouts, strict=True):
        for norm, parts, _, copies in ranks:
            assert (copies > 0) == (mesh == COPIES)
            assert (norm, parts) == ranks[0][:2]
            assert parts == pytest.approx(expected, rel=1e-5)
            assert math.hypot(*parts.values()) == pytest.approx(norm, rel=1e-12)


def test_every_line_has_the_parts_of_its_norm_and_the_time_left(data: Path, tmp_path: Path) -> None:
    config = config_of(data, mesh__ep=2, train__steps=5, train__log_every=2, train__eval_every=3)
    run_ranks(run_training, 2, config, tmp_path)
    train = lines(tmp_path, "train")
    for line in train:
        parts = [value for key, value in line.items() if key.startswith("grad_norm_")]
        assert len(parts) == len(PLACES)
        assert math.hypot(*parts) == pytest.approx(line["grad_norm"], rel=1e-12)
        assert "mfu" not in line  # on a CPU
    assert [line["step"] for line in train] == [1, 2, 4, 5]
    # the first step says nothing yet
    assert ["left_s" in line for line in train] == [False, True, True, True]
    assert train[-1]["left_s"] == 0
