"""A run keeps the best measured checkpoint: the same one when killed, stopped, resumed elsewhere."""

import os
from pathlib import Path
from typing import Any

import pytest
from parts import make_config
from trained import by_step, lines
from world import RankFailed, run_ranks

from moebius.distributed.checkpoint.checkpoint_folder import CheckpointFolder
from moebius.distributed.checkpoint.checkpointer import Checkpointer
from moebius.distributed.checkpoint.format import list_checkpoints, read_meta
from moebius.train.config.run_config import Config
from moebius.train.families.start import start_from
from moebius.train.loop import train
from moebius.train.record.run_folder import open_run


def config_of(data: Path, **changes: Any) -> Config:
    """Returns a run whose loss soon rises, so that an early step is the best."""
    keys = {"every": 0, "keep_last": 1, "keep_best": "validation", "keep_every": 9}
    return make_config(
        data,
        checkpoint=keys,
        optim={"learning_rate": 0.3, "warmup_steps": 6},
        train={"steps": 12, "eval_every": 2},
        **changes,
    )


def measured(run_dir: Path) -> dict[int, Any]:
    """Returns what is saved of the measures at each checkpoint's step."""
    found = list_checkpoints(run_dir / "checkpoints")
    return {each.step: read_meta(each.path).meta.get("measured") for each in found}


def train_and_die(config: Config, run_dir: Path, when: str, step: int) -> None:
    """Dies at a step after its checkpoint is committed, or after it is measured and before it is saved."""
    kind, name = {
        "committed": (CheckpointFolder, "delete_old"),
        "measured": (Checkpointer, "save"),
    }[when]
    act = getattr(kind, name)

    def die(self: object, at: int, *given: object, **named: object) -> object:
        if at == step:
            os._exit(1)
        return act(self, at, *given, **named)

    setattr(kind, name, die)
    train(config, run_dir)


@pytest.mark.slow
def test_the_best_stays_the_same_through_kills_and_on_other_layouts(
    data: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sharded = config_of(data, mesh__ep=2, mesh__sharding="fsdp", mesh__dp_shard=2)
    open_run(sharded, whole)
    run_ranks(train, 2, sharded, whole)
    losses = {step: line["loss"] for step, line in by_step(whole, "eval").items() if step}
    best = min(losses, key=lambda step: losses[step])
    assert best != 12, losses
    kept = {step: {"validation": losses[step]} for step in (best, 12)}
    assert measured(whole) == {9: {}, **kept}

    parallel = config_of(data, mesh__ep=2)
    open_run(parallel, killed)
    for when, step in (("committed", 4), ("measured", 8), ("committed", best)):
        with pytest.raises(RankFailed):
            run_ranks(train_and_die, 2, parallel, killed, when, step)
    run_ranks(train, 1, config_of(data), killed)
    assert [line["step"] for line in lines(killed, "eval")].count(8) == 2
    losses = {step: line["loss"] for step, line in by_step(killed, "eval").items()}
    kept = {step: {"validation": losses[step]} for step in (best, 12)}
    assert measured(killed) == {9: {}, **kept}

    branch = start_from(f"{killed}@best", None, ["train.steps=16"])
    assert (branch.source.given, branch.source.step) == (f"{killed}@{best}", best)


@pytest.mark.slow
@pytest.mark.parametrize("keep_best", ["validation", None])
def test_a_stopped_run_measures_only_what_decides(
    keep_best: str | None, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, checkpoint__keep_best=keep_best, train__eval_every=1)
    (tmp_path / "stop").touch()
    assert run_ranks(train, 1, config, tmp_path) == ["stopped"]
    (found,) = measured(tmp_path).items()
    assert found[0] == 1
    assert list(found[1]) == ([] if keep_best is None else [keep_best])
