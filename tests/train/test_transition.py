"""A run across the switch from mixing to choosing: nothing else changes, even with a stop there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family import tiny_config
from parts import layers, make_config
from trained import assembled, column, different, newest_state, run_training
from world import run_ranks

from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import restore
from moebius.model.routing import Mixture
from moebius.train.config.run_config import Config
from moebius.train.loop import step
from moebius.train.rank_data import open_loader
from moebius.train.state import allocate_moments

SWITCH, STEPS = 4, 8


MODEL = tiny_config(
    "transition",
    {
        "vocab_size": 257,
        "feed_forward.sparse_layers": "all",
        "num_layers": 2,
        "layers_per_group": 2,
        "feed_forward.num_experts": 4,
        "feed_forward.router": {
            "kind": "transition",
            "sequences_per_group": 4,
            "switch_step": SWITCH,
            "capacity_factor": 1.25,
            "calibrate": True,
        },
    },
)


def config_of(data: Path, *, steps: int = STEPS) -> Config:
    settings = {"steps": steps, "global_batch": 16, "micro_batch": 4, "eval_rows": 10}
    return make_config(data, model=MODEL, data__seq_len=24, train=settings)


def watch_the_switch(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    """Returns each step's plans, and whether AdamW kept its moments."""
    seen: list[dict[str, Any]] = []
    with assembled(config, run_dir) as run, open_loader(run, None) as loader:
        plans: list[type] = []
        for layer in layers(run.model):
            layer.feed_forward.router.register_forward_hook(
                lambda _m, _i, routing: plans.append(type(routing.plan))
            )
        allocate_moments(run.model, run.optimizer, 0)
        state = {p: run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()}
        for _ in range(config.train.steps):
            before = {p: moment.clone() for p, moment in state.items()}
            plans.clear()
            result = step(run, next(loader), 1e-3)
            kept = [run.optimizer.state[p]["exp_avg"] is moment for p, moment in state.items()]
            for p, moment in state.items():
                assert p.grad is not None
                expected = torch.lerp(before[p], p.grad, 1 - config.optim.beta1)
                torch.testing.assert_close(moment, expected)
            seen.append(
                {
                    "mixes": {plan is Mixture for plan in plans},
                    "same": all(kept),
                    "auxiliary": "auxiliary/load_balancing" in result.meter.reduce(),
                    "mean": layers(run.model)[0].feed_forward.router.mean_logit.tolist(),
                }
            )
    return seen


def test_the_route_changes_at_the_step_and_the_optimizer_does_not(
    data: Path, tmp_path: Path
) -> None:
    seen = run_ranks(watch_the_switch, 1, config_of(data), tmp_path)[0]
    assert [entry["mixes"] for entry in seen] == [{True}] * SWITCH + [{False}] * (STEPS - SWITCH)
    assert [entry["auxiliary"] for entry in seen] == [False] * SWITCH + [True] * (STEPS - SWITCH)
    assert all(entry["same"] for entry in seen)
    means = [entry["mean"] for entry in seen]
    assert len({tuple(mean) for mean in means[:SWITCH]}) == SWITCH  # of the latest mixing step …
    assert means[SWITCH:] == means[SWITCH - 1 : SWITCH] * (STEPS - SWITCH)  # … the last one
    assert any(means[-1])


def restored_router(run_dir: Path) -> tuple[bool, int]:
    with start_process("cpu", timeout_s=30) as process:
        router = layers(restore(run_dir, process).model)[0].feed_forward.router
        return router.mixes, router.group_context_size


@pytest.mark.slow
def test_a_run_cut_before_or_after_the_switch_ends_as_if_it_had_not_been(
    data: Path, tmp_path: Path
) -> None:
    config, whole = config_of(data), tmp_path / "whole"
    run_ranks(run_training, 2, config, whole)
    expected, losses = newest_state(whole), column(whole)
    assert any("mean_logit" in name for name in expected)
    for cut in (SWITCH - 1, SWITCH, SWITCH + 1):
        folder = tmp_path / str(cut)
        run_ranks(run_training, 2, config_of(data, steps=cut), folder)
        assert run_ranks(restored_router, 1, _saved(config, folder))[0] == (
            (True, 3) if cut < SWITCH else (False, 0)
        )
        run_ranks(run_training, 2, config, folder)
        assert column(folder) == losses
        assert different(expected, newest_state(folder)) == [], cut
    assert any(expected["model.group.0.feed_forward.router.mean_logit"].tolist())


def _saved(config: Config, folder: Path) -> Path:
    config.save(folder / "config.json")
    return folder
