"""A micro-batch's passes as one graph: with a stand-in that repeats the work where a GPU would, and
nothing of it when it is captured. And why passes cannot be captured, in words.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import tiny_config
from small_model import MODEL
from torch import Tensor
from world import run_ranks

from experimental.cuda_graph.cuda_graph import MicroBatchGraph, reason_against
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.layout import plan_layout
from moebius.distributed.process.process import start_process
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, MeshConfig, TrainConfig
from moebius.train.loop import step
from moebius.train.loss import MicroBatchLoss
from moebius.train.micro_batches import MicroBatch
from moebius.train.run import assemble

STEPS, MICRO_BATCHES = 3, 3  # of the first step's all are warm-up


class Repeats:
    """Does captured work again at every replay, and puts what it reports where it stood."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.replays = 0

    def warm_up(self, work: Callable[[], MicroBatchLoss]) -> MicroBatchLoss:
        return work()

    def capture(
        self, work: Callable[[], MicroBatchLoss]
    ) -> tuple[MicroBatchLoss, Callable[[], None]]:
        before = [
            parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None
        ]
        result = work()
        for tensor in tensors_of(result):
            tensor.detach().fill_(-7)  # nothing has values before a replay
        for parameter, gradient in zip(self.parameters, before, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

        def replay() -> None:
            self.replays += 1
            for old, new in zip(tensors_of(result), tensors_of(work()), strict=True):
                old.detach().copy_(new)

        return result, replay


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_of(each)]
    return [tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name))]


def config_of(ranks: int) -> Config:
    return Config(
        model=MODEL,
        data=DataConfig(directory="unused", seq_len=24),
        prepare=PrepareConfig(vocab_size=257),
        mesh=MeshConfig(dp_replicate=ranks),
        train=TrainConfig(steps=9, global_batch=2 * MICRO_BATCHES * ranks, micro_batch=2),
    )


def steps(
    config: Config, run_dir: Path, graphed: bool
) -> tuple[list[tuple[float, ...]], dict[str, Tensor], int]:
    """Steps, the last but one with a loss mask: losses and norms, the weights after them, replays."""
    with start_process("cpu", timeout_s=60) as process:
        run = assemble(config, run_dir, process)
        driver = Repeats(run.parameters)
        if graphed:
            run.graph = MicroBatchGraph(run.parameters, driver)
        shape = (STEPS + 1, process.world_size, MICRO_BATCHES, 2, 25)
        rows = np.random.default_rng(0).integers(0, 257, shape)
        found = []
        for number in range(STEPS + 1):
            mask = np.ones((MICRO_BATCHES, 2, 24), dtype=bool)
            mask[0, :, :7] = False
            masked = {"loss_mask": mask} if number == STEPS - 1 else {}
            batch = Batch(rows[number, process.rank], 0, 0, equal_shapes=True, **masked)
            result = step(run, batch, 1e-2)
            sums = result.meter.reduce()
            loads = sums["feed_forward/load"].flatten().tolist()
            found.append((sums["loss"].item(), result.grad_norm, *loads))
        weights = {name: weight.detach() for name, weight in run.model.named_parameters()}
        return found, weights, driver.replays


@pytest.mark.parametrize("ranks", [1, 2])
def test_replays_train_as_passes_do(ranks: int, tmp_path: Path) -> None:
    config = config_of(ranks)
    eager = run_ranks(steps, ranks, config, tmp_path / "eager", False)
    graphed = run_ranks(steps, ranks, config, tmp_path / "graphed", True)
    for (losses, weights, _), (same, theirs, replays) in zip(eager, graphed, strict=True):
        assert losses == same
        for name, weight in weights.items():
            assert torch.equal(weight, theirs[name]), name
        assert replays == (STEPS - 1) * MICRO_BATCHES  # not the first step, not the masked one


def test_another_shape_is_not_replayed() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    graph = MicroBatchGraph([weight], Repeats([weight]))

    def work(inputs_BS: Tensor, targets_BS: Tensor) -> MicroBatchLoss:
        loss = (weight * (inputs_BS + targets_BS).float()).sum()
        loss.backward()
        return MicroBatchLoss(loss, loss.detach(), loss.detach(), {}, {}, {})

    plain = MicroBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    graph.begin_step()
    for _ in range(5):
        assert graph.fits(plain)
        assert graph.run(work, plain).loss.item() == 6
    assert weight.grad is not None
    assert weight.grad.tolist() == [10, 10, 10]
    assert not graph.fits(replace(plain, inputs_BS=torch.zeros(1, 3, dtype=torch.int64)))
    assert not graph.fits(replace(plain, loss_mask_BS=torch.ones(2, 3, dtype=torch.bool)))


GPU = torch.device("cuda")
WHY_NOT: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [
    ({"device": torch.device("cpu")}, {}, "it is for GPUs, and the run is on cpu"),
    ({"backend": "segments"}, {}, "kernels.backend is 'segments'"),
    ({}, {"train.recompute": "full"}, "train.recompute='full'"),
    ({}, {"train.compile": True}, "train.compile=true"),
    ({}, {"mesh.sharding": "fsdp"}, "mesh.sharding='fsdp'"),
    ({"ranks": 2}, {"mesh.ep": 2}, "mesh.ep=2"),
]


@pytest.mark.parametrize(("place", "changes", "expected"), WHY_NOT)
def test_what_cannot_be_captured_is_said(
    place: Mapping[str, Any], changes: Mapping[str, Any], expected: str
) -> None:
    config = config_of(1).model_dump(mode="json")
    for key, value in {"mesh.dp_replicate": None, **changes}.items():
        section, _, field = key.partition(".")
        config[section][field] = value
    reason = why_not(Config.model_validate(config), **place)
    assert reason is not None
    assert expected in reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("moeut", None),
        ("sigma_moe", None),
        ("top_k", None),
        ("deepseek", None),
        ("dense", None),
        ("switch", "feed_forward (token_choice)"),
        ("transition", "feed_forward (transition)"),
        ("expert_choice", "feed_forward (expert_choice)"),
        ("sut_no_act", "feed_forward (sut)"),
        ("sut", "model.halting"),
    ],
)
def test_routers_say_whether_they_can_be_captured(name: str, expected: str | None) -> None:
    reason = why_not(config_of(1), model=Transformer(tiny_config(name)))
    if expected is None:
        assert reason is None
    else:
        assert reason is not None
        assert expected in reason


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("moeut", {"feed_forward.router.expert_dropout": 0.1}),
        ("top_k", {"feed_forward.router.jitter": 0.1}),
    ],
)
def test_routers_that_draw_are_not_captured(name: str, draws: Mapping[str, float]) -> None:
    reason = why_not(config_of(1), model=Transformer(tiny_config(name, draws)))
    assert reason is not None
    assert "feed_forward (" in reason


def why_not(
    config: Config,
    *,
    model: Transformer | None = None,
    device: torch.device = GPU,
    backend: str = "triton",
    ranks: int = 1,
) -> str | None:
    layout = plan_layout(config.mesh, ranks)
    model = Transformer(config.model) if model is None else model
    return reason_against(config, model, layout, backend=backend, device=device)
