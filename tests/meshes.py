"""A rank's mesh, model and checkpointer, for functions that run on several processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moebius.distributed.checkpoint.checkpoint_folder import CheckpointConfig
from moebius.distributed.checkpoint.checkpointer import Checkpointer
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import Process, start_process
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer


@contextmanager
def meshed(*, timeout_s: float = 60, **axes: Any) -> Iterator[tuple[Process, Mesh]]:
    """Joins the ranks of the world: `with meshed(ep=2) as (process, mesh)`."""
    with start_process("cpu", timeout_s=timeout_s) as process:
        yield process, build_mesh(plan_layout(MeshConfig(**axes), process.world_size), process)


def model_on(mesh: Mesh, config: ModelConfig, **changes: Any) -> Transformer:
    """Builds this rank's part of a model, with `auto` for whatever has it."""
    options = {"dispatcher": "auto", "backend": "auto", "seed": 0, "device": torch.device("cpu")}
    return build_model(config, mesh, **(options | changes))


def saver_in(directory: Path, process: Process, mesh: Mesh, **changes: Any) -> Checkpointer:
    """Opens a folder of checkpoints without a fence that keeps the last two."""
    options = {"keep_last": 2, "on_failure": "stop", "generation": 1, "generation_file": None}
    options |= changes
    keys = {key: options.pop(key) for key in CheckpointConfig.model_fields if key in options}
    return Checkpointer(directory, CheckpointConfig(**keys), mesh=mesh, process=process, **options)
