"""A few steps of a run that save nothing: they show what the whole run will take.

Every rank makes them (`python -m moebius.train RUN_DIR --dry-run`) in the run's layout and sizes, on drawn tokens. They are
among the last of the run, where loops have grown. The first one has the most drawn loops, so that memory has its peak. The
others have about the mean: a CUDA graph is captured when its form comes a second time, so the third is timed.
"""

import json
import math
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...data_pipeline.files import write_atomically
from ...data_pipeline.read.loader import Batch
from ...distributed.process.process import start_process
from ...model.loops.depth import loops_of
from ..config.run_config import Config
from ..loop import step
from ..record.heartbeat import Phase, open_heartbeat
from ..run import Run, assemble
from ..state import state_tensors

_LOOKED_AT = 64  # steps, whose loops are compared


def dry_run(config: Config, run_dir: Path) -> str:
    """Makes the steps, and writes what they take into result.json; a collective call."""
    train = config.train
    with start_process(train.device, timeout_s=train.timeout_s, threads=train.threads) as process:
        run = assemble(config, run_dir, process, open_heartbeat())
        batch, step_s = _drawn_batch(run), 0.0
        for done in _steps(config):
            run.state.progress = replace(run.progress, step=done)
            run.heartbeat.begin_step(done + 1)
            began_s = time.perf_counter()
            step(run, batch, rate=0.0)
            if process.device.type == "cuda":
                torch.cuda.synchronize()
            step_s = time.perf_counter() - began_s
            run.heartbeat.end_step()
        run.heartbeat.enter(Phase.END)
        result = {"state": "finished", "step": train.steps} | _measured(run, step_s)
        if process.rank == 0:
            write_atomically(run_dir / "result.json", json.dumps(result))
    return "finished"


def _steps(config: Config) -> list[int]:
    """Returns how many steps of the run are done before each one that is made."""
    model, train = config.model, config.train
    loops = {
        done: loops_of(model.loops.depth, model.num_repeats, train.seed, done, 0)
        for done in range(max(0, train.steps - _LOOKED_AT), train.steps)
    }
    usual = min(loops, key=lambda done: abs(loops[done] - model.num_repeats))
    return [max(loops, key=loops.__getitem__), usual, usual, usual]


def _measured(run: Run, step_s: float) -> dict[str, Any]:
    """Returns what the slowest and the largest rank took, and a checkpoint's bytes; a collective call."""
    device = run.process.device
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory *= 1 if sys.platform == "darwin" else 1024
    if device.type == "cuda":
        memory = torch.cuda.max_memory_reserved(device)
    worst = torch.tensor([step_s, memory], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    step_s, memory = worst.tolist()
    tensors, shards = state_tensors(run.model, run.optimizer)
    saved = (
        math.prod(shards[name].global_shape if name in shards else tensor.shape) * tensor.itemsize
        for name, tensor in tensors.items()
    )
    return {"memory": memory, "step_s": step_s, "checkpoint": sum(saved)}


def _drawn_batch(run: Run) -> Batch:
    """Returns drawn tokens; a row is one document where the run respects them."""
    train, data = run.config.train, run.config.data
    passes = train.global_batch // (run.process.world_size * train.micro_batch)
    shape = (passes, train.micro_batch, data.seq_len + 1)
    draws = np.random.default_rng(run.process.rank)
    ids = np.zeros(shape, np.int32) if data.gives_document_ids else None
    tokens = draws.integers(0, run.config.model.vocab_size, shape)
    return Batch(tokens, 0, 0, document_ids=ids, equal_shapes=True)
