"""A run with a damaged newest checkpoint resumes from the previous one, with the same losses.

A full disk costs a checkpoint.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from parts import make_config
from trained import lines
from world import run_ranks

from moebius.distributed.checkpoint import writing
from moebius.train.config.run_config import Config
from moebius.train.loop import train


def config_of(data: Path, *, steps: int, **checkpoint: Any) -> Config:
    return make_config(
        data,
        mesh__ep=2,
        checkpoint={"every": 2, "keep_last": 3, **checkpoint},
        train={"steps": steps, "global_batch": 4, "eval_rows": 4},
    )


@pytest.mark.fault("F16")
@pytest.mark.slow
def test_the_losses_do_not_notice(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_ranks(train, 2, config_of(data, steps=4), run_dir)
    newest = run_dir / "checkpoints" / "step_00000004"
    os.truncate(newest / "__1_0.distcp", 100)
    run_ranks(train, 2, config_of(data, steps=5), run_dir)
    made = [(line["step"], line["loss"], line["digest"]) for line in lines(run_dir, "train")]
    assert [step for step, *_ in made] == [1, 2, 3, 4, 3, 4, 5]
    assert made[2:4] == made[4:6]
    (told,) = lines(run_dir, "checkpoint_set_aside")
    assert (told["step"], told["resumed_from_step"]) == (4, 2)
    assert "__1_0.distcp has 100 bytes instead of" in told["why"]
    assert (run_dir / "checkpoints" / told["path"]).is_dir()
    assert (newest / "manifest.json").exists()  # step 4 was made, and saved, once more


def train_on_a_full_disk(config: Config, run_dir: Path) -> str:
    """Trains without space for sealing any checkpoint before step 4."""
    original = writing.write_synced

    def full(path: Path, content: str) -> object:
        if "step_00000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, content)

    writing.write_synced = full  # pyright: ignore[reportAttributeAccessIssue]
    return train(config, run_dir)


@pytest.mark.fault("F22")
@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(data: Path, tmp_path: Path) -> None:
    assert (
        run_ranks(train_on_a_full_disk, 2, config_of(data, steps=4), tmp_path) == ["finished"] * 2
    )
    first, second = lines(tmp_path, "checkpoint")
    assert "No space left on device" in first["error"]
    assert (second["step"], second["error"]) == (4, None)
