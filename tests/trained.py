"""Runs that tests train on several ranks, and their results."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moebius.distributed.checkpoint.format import latest, open_checkpoint
from moebius.distributed.checkpoint.loading import read_tensor
from moebius.distributed.parallelize import expert_names
from moebius.distributed.process.process import start_process
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.run import Run, assemble


def run_training(config: Config, run_dir: Path) -> str:
    """Trains in a folder that may not exist yet."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return train(config, run_dir)


@contextmanager
def assembled(config: Config, run_dir: Path, *, timeout_s: float = 30) -> Iterator[Run]:
    """Assembles this rank's run before its first step."""
    with start_process("cpu", timeout_s=timeout_s) as process:
        yield assemble(config, run_dir, process)


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of one kind in metrics.jsonl, in order."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def by_step(run_dir: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Returns them by step; the last line of a repeated step."""
    return {line["step"]: line for line in sorted(lines(run_dir, kind), key=lambda x: x["step"])}


def column(run_dir: Path, name: str = "loss") -> list[Any]:
    """Returns one number of every step, in order."""
    return [line[name] for line in by_step(run_dir).values()]


def newest_state(run_dir: Path) -> dict[str, Tensor]:
    """Returns all tensors of the newest checkpoint, whole."""
    path = latest(run_dir / "checkpoints")
    assert path is not None
    stored = open_checkpoint(path)
    return {name: read_tensor(stored, name) for name in stored.index.tensors}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that differ in any bit, or that only one side has."""
    both = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [
        name for name in both if not torch.equal(one[name], other[name])
    ]


def gradients(run: Run) -> dict[str, Tensor]:
    """Returns the gradients of the last step, with all experts."""
    found = {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}
    return whole(run, found)


def whole(run: Run, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins the experts of the first EP group's ranks."""
    ep, world = run.mesh.layout.ep, run.process.world_size
    for name in expert_names(run.model) if ep > 1 else ():
        parts = [torch.empty_like(tensors[name]) for _ in range(world)]
        torch.distributed.all_gather(parts, tensors[name].contiguous())
        tensors[name] = torch.cat(parts[:ep])
    return tensors


def check_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, small: float = 1e-9
) -> None:
    """Compares tensors by name, each up to a share of its norm."""
    for name, theirs in expected.items():
        assert (found[name] - theirs).norm() <= tolerance * theirs.norm() + small, name
