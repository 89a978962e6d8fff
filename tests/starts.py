"""Runs that start from weights: their layouts, what their ranks load, and why they refuse to."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from trained import assembled, different, newest_state
from world import run_ranks

from moebius.distributed.checkpoint import source as module
from moebius.distributed.checkpoint.format import CheckpointError
from moebius.distributed.checkpoint.source import read_source
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.run import resume
from moebius.train.state import model_tensors, state_tensors

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"ep": 2}),
    (4, {"ep": 4}),
    (2, {"dp_replicate": 2}),
    (4, {"ep": 2, "dp_shard": 4, "sharding": "fsdp"}),
    (2, {"dp_shard": 2, "sharding": "fsdp"}),
    (2, {"ep": 2, "rebalance_every": 1, "replicas": 1}),
]


def on(mesh: dict[str, Any]) -> list[str]:
    """Returns a layout as overrides."""
    return [f"mesh.{key}={value}" for key, value in mesh.items()]


def loaded(world: int, config: Config, run_dir: Path) -> dict[str, Tensor]:
    """Returns what the ranks of a run have loaded before its first step."""
    run_ranks(_save_loaded, world, config, run_dir)
    return newest_state(run_dir)


def _save_loaded(config: Config, run_dir: Path) -> None:
    with assembled(config, run_dir) as run:
        found = resume(run)
        meta = {"progress": run.progress.as_dict(), "data": found and found.position}
        run.checkpoints.save(run.progress.step, *state_tensors(run.model, run.optimizer), meta)
        run.checkpoints.wait()


def refusal(config: Config, run_dir: Path, on_rank: int | None = None) -> str:
    """Returns why both ranks of a run refuse to start, with their weights as they were drawn."""
    found = run_ranks(_refuse, 2, config, run_dir, on_rank)
    assert found[0] == found[1]
    return found[0]


def _refuse(config: Config, run_dir: Path, on_rank: int | None) -> str:
    with assembled(config, run_dir) as run:
        if on_rank == run.process.rank:
            other = read_source(run_dir)
            assert other is not None
            module.read_source = lambda run_dir: other.model_copy(update={"step": 99})
        tensors, _ = model_tensors(run.model)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with pytest.raises((CheckpointError, ConfigError)) as refused:
            resume(run)
        assert different(tensors, before) == []
        return str(refused.value)
