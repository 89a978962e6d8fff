"""A few steps of a run that save nothing: they show what the whole run will take.

Every rank makes them (`python -m moebius.train RUN_DIR --dry-run`) in the run's layout and sizes, with its data or
drawn tokens. The first step has the most loops that the run draws, so that memory has its peak. The last
one has the median of them and is timed; others before it compile, and capture CUDA graphs.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data_pipeline.files import write_atomically
from ...data_pipeline.manifest import is_prepared
from ...data_pipeline.read.loader import Batch
from ...distributed.process.process import start_process
from ...model.loops.depth import loops_of
from ..config.run_config import Config
from ..cuda_graph import MicroBatchGraph
from ..loop import step
from ..rank_data import open_loader
from ..record.heartbeat import Phase, open_heartbeat
from ..run import Run, assemble
from ..state import state_tensors
from .step_metrics import peak_tokens_per_s

_LOOKED_AT = 64  # steps, spread over the run, whose loops are compared


def dry_run(config: Config, run_dir: Path) -> str:
    """Makes the steps and writes what they take into the run folder, by rank; a collective call.

    Returns:
        "finished", or "stopped" after a stop request.
    """
    keys = config.train
    with (
        start_process(keys.device, timeout_s=keys.timeout_s, threads=keys.threads) as process,
        ExitStack() as opened,
    ):
        run = assemble(config, run_dir, process, open_heartbeat())
        batches: Iterator[Batch] = _drawn_batches(run)
        if is_prepared(config.data.directory):
            batches = opened.enter_context(closing(open_loader(run, None)))
        step_s, state = 0.0, "finished"
        for number in _steps(run):
            run.state.progress = replace(run.progress, step=number)
            run.heartbeat.begin_step(number + 1)
            began_s = time.perf_counter()
            if step(run, next(batches), rate=0.0).stop:
                state = "stopped"
                break
            if process.device.type == "cuda":
                torch.cuda.synchronize()
            step_s = time.perf_counter() - began_s
            run.heartbeat.end_step()
        run.heartbeat.enter(Phase.END)
        measured = run_dir / f"dry_run.{process.rank}.json"
        write_atomically(measured, json.dumps(_measured(run, step_s)))
        # the step decides how the supervisor reads it
        result = {"state": state, "step": config.train.steps if state == "finished" else 0}
        if process.rank == 0:
            write_atomically(run_dir / "result.json", json.dumps(result))
        return state


def _steps(run: Run) -> list[int]:
    """Returns how many steps are done before each one that is made."""
    model, train = run.config.model, run.config.train
    by_loops = sorted(
        range(0, train.steps, max(1, train.steps // _LOOKED_AT)),
        key=lambda done: loops_of(model.loops.depth, model.num_repeats, train.seed, done, 0),
    )
    # a graph is captured when its form comes a second time
    times = 3 if isinstance(run.passes, MicroBatchGraph) else 1
    return [by_loops[-1], *[by_loops[len(by_loops) // 2]] * times]


def _measured(run: Run, step_s: float) -> dict[str, Any]:
    tensors, shards = state_tensors(run.model, run.optimizer)
    shapes = {name: shard.global_shape for name, shard in shards.items()}
    sizes = (
        math.prod(shapes.get(name, tensor.shape)) * tensor.element_size()
        for name, tensor in tensors.items()
    )
    device = name = run.process.device
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory *= 1 if sys.platform == "darwin" else 1024
    if device.type == "cuda":
        memory, name = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_name(device)
    return {
        "step_s": step_s,
        "memory_bytes": memory,
        "checkpoint_bytes": sum(sizes),
        "layout": f"{run.mesh.layout}, on {name}",
        "peak_tokens_per_s": peak_tokens_per_s(run.config, run.process),
    }


def _drawn_batches(run: Run) -> Iterator[Batch]:
    """Yields batches of drawn tokens; a row is one document where the run respects them."""
    train, data = run.config.train, run.config.data
    draws = np.random.default_rng(run.process.rank)
    passes = train.global_batch // (run.process.world_size * train.micro_batch)
    shape = (passes, train.micro_batch, data.seq_len + 1)
    ids = np.zeros(shape, np.int32) if data.gives_document_ids else None
    while True:
        tokens = draws.integers(0, run.config.model.vocab_size, shape)
        yield Batch(tokens, 0, 0, document_ids=ids, equal_shapes=True)
