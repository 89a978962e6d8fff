"""A training run over the switch from mixing to choosing: nothing else changes, and stopping there
changes nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import layers
from torch import Tensor
from world import run_ranks

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.checkpoint.format import latest
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import restore
from moebius.model.config.model_config import ModelConfig
from moebius.model.routing import Mixture
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import (
    CheckpointConfig,
    Config,
    MeshConfig,
    TrainConfig,
)
from moebius.train.loop import step, train
from moebius.train.optim import OptimConfig
from moebius.train.rank_data import open_loader
from moebius.train.run import assemble
from moebius.train.state import allocate_moments, state_tensors

SWITCH, STEPS = 4, 8


def make_config(data: Path, *, steps: int = STEPS, **router: Any) -> Config:
    kind = {
        "kind": "transition",
        "sequences_per_group": 4,
        "switch_step": SWITCH,
        "capacity_factor": 1.25,
        "calibrate": True,
    }
    model = ModelConfig.from_dotted(
        {
            "vocab_size": 257,
            "d_model": 24,
            "num_layers": 2,
            "layers_per_group": 2,
            "attention.num_heads": 2,
            "attention.d_head": 12,
            "norm": "pre",
            "attention.kind": "dense",
            "feed_forward.num_experts": 4,
            "feed_forward.d_expert": 16,
            "feed_forward.router": kind | router,
        }
    )
    return Config(
        model=model,
        data=DataConfig(seq_len=24, directory=str(data)),
        prepare=PrepareConfig(tokenizer="bytes", vocab_size=257, validation_fraction=0.2),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=3, decay_steps=20),
        train=TrainConfig(steps=steps, global_batch=16, micro_batch=4, eval_rows=10, device="cpu"),
        checkpoint=CheckpointConfig(every=0),
        mesh=MeshConfig(),
    )


def watch_the_switch(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    """What each step routed by, and whether AdamW kept its state: the same tensors, changed by one
    update of the formula.
    """
    seen: list[dict[str, Any]] = []
    with start_process("cpu", timeout_s=30) as process:
        run = assemble(config, run_dir, process)
        plans: list[type] = []
        for layer in layers(run.model):
            layer.feed_forward.router.register_forward_hook(
                lambda _m, _i, routing: plans.append(type(routing.plan))
            )
        state = {p: run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()}
        with open_loader(run, None) as loader:
            for _ in range(config.train.steps):
                before = {p: moment.clone() for p, moment in state.items()}
                plans.clear()
                result = step(run, next(loader), 1e-3)
                beta = config.optim.beta1
                worst = 0.0
                for p, moment in state.items():
                    assert p.grad is not None
                    error = moment - beta * before[p] - (1 - beta) * p.grad
                    size = 1e-12 + p.grad.abs().max().item()
                    worst = max(worst, error.abs().max().item() / size)
                seen.append(
                    {
                        "mixes": {plan is Mixture for plan in plans},
                        "same": all(
                            run.optimizer.state[p]["exp_avg"] is moment
                            for p, moment in state.items()
                        ),
                        "moment": worst,
                        "auxiliary": "auxiliary/load_balancing" in result.meter.reduce(),
                        "mean": layers(run.model)[0].feed_forward.router.mean_logit.tolist(),
                    }
                )
    return seen


def test_the_route_changes_at_the_step_and_the_optimizer_does_not(
    data: Path, tmp_path: Path
) -> None:
    seen = run_ranks(watch_the_switch, 1, make_config(data), tmp_path)[0]
    assert [entry["mixes"] for entry in seen] == [{True}] * SWITCH + [{False}] * (STEPS - SWITCH)
    assert [entry["auxiliary"] for entry in seen] == [False] * SWITCH + [True] * (STEPS - SWITCH)
    assert all(entry["same"] for entry in seen)
    assert max(entry["moment"] for entry in seen) < 1e-5
    means = [entry["mean"] for entry in seen]
    assert len({tuple(mean) for mean in means[:SWITCH]}) == SWITCH  # of the latest mixing step …
    assert all(
        mean == means[SWITCH - 1] for mean in means[SWITCH:]
    )  # … and at last of the last one
    assert any(means[-1])


def run_training(config: Config, run_dir: Path) -> str:
    run_dir.mkdir(parents=True, exist_ok=True)
    return train(config, run_dir)


def final_state(run_dir: Path, config: Config) -> dict[str, Tensor]:
    model = Transformer(config.model)
    optimizer = torch.optim.AdamW(model.parameters())
    allocate_moments(model, optimizer)
    path = latest(run_dir / "checkpoints")
    assert path is not None
    tensors, shards = state_tensors(model, optimizer)
    load(path, tensors, shards)
    return tensors


def records(run_dir: Path, kind: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sorted({(line["step"], line["loss"]) for line in lines if line["kind"] == kind})


def restored_router(run_dir: Path) -> tuple[bool, int]:
    with start_process("cpu", timeout_s=30) as process:
        router = layers(restore(run_dir, process).model)[0].feed_forward.router
        return router.mixes, router.group_context_size


@pytest.mark.slow
def test_a_run_cut_before_or_after_the_switch_ends_as_if_it_had_not_been(
    data: Path, tmp_path: Path
) -> None:
    config, whole = make_config(data), tmp_path / "whole"
    run_ranks(run_training, 2, config, whole)
    expected, losses = final_state(whole, config), records(whole, "train")
    assert any("mean_logit" in name for name in expected)
    for cut in (SWITCH - 1, SWITCH, SWITCH + 1):
        folder = tmp_path / str(cut)
        run_ranks(run_training, 2, make_config(data, steps=cut), folder)
        assert run_ranks(restored_router, 1, _saved(config, folder))[0] == (
            (True, 3) if cut < SWITCH else (False, 0)
        )
        run_ranks(run_training, 2, config, folder)
        assert records(folder, "train") == losses
        found = final_state(folder, config)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), cut
    assert any(expected["model.group.0.feed_forward.router.mean_logit"].tolist())


def _saved(config: Config, folder: Path) -> Path:
    config.save(folder / "config.json")
    return folder
