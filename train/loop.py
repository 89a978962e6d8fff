"""The training run on one rank, in the order in which things happen. Read this first.

    start → data → model → resume? → [batch → loss → gradients → clip → update → log → evaluate? → save?] × steps → end

Every rank runs this same code. What is decided (skip a step, stop, evaluate, save) is decided from numbers that are equal on all
ranks, so no rank ever takes part in a collective alone. `cluster/` starts it on many nodes; `torchrun -m moebius.train` and a
plain process work as well.
"""

import json
import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ..data_pipeline.loader import Batch, Loader
from ..distributed.checkpoint import Checkpointer
from ..distributed.gradients import GradientReducer, clip_gradients
from ..distributed.layout import plan_layout
from ..distributed.mesh import Mesh, build_mesh
from ..distributed.parallelize import build_model, expert_names
from ..distributed.process import Process, start_process
from ..model.precision import forward_in
from ..model.transformer import Transformer
from .config import Config
from .evaluate import evaluate
from .loss import micro_batch_loss
from .metrics import MetricsLog, StepMeter, expert_metrics
from .optim import learning_rate_at, make_optimizer
from .state import Progress, allocate_moments, seed_step, set_updates, state_tensors

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """The parts of one run on one rank."""

    config: Config
    run_dir: Path
    process: Process
    mesh: Mesh
    model: Transformer
    optimizer: torch.optim.AdamW
    reducer: GradientReducer
    checkpoints: Checkpointer
    log: MetricsLog
    progress: Progress = field(default_factory=Progress)

    @property
    def parameters(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """Dense parameters and expert parameters."""
        return split_parameters(self.model)


def train(config: Config, run_dir: Path) -> str:
    """Trains to the last step, or to the next boundary after a stop was asked for.

    Returns:
        "finished" or "stopped"; the same is in the run folder's result.json.

    Raises:
        ValueError: the configuration, the data or a checkpoint cannot be used; the message says what to do.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    with start_process(config.train.device, timeout_s=config.train.timeout_s) as process:
        run = assemble(config, run_dir, process)
        resume(run)
        loader = open_loader(run)
        try:
            state = run_steps(run, loader)
            run.checkpoints.wait()
        finally:
            loader.close()
            run.checkpoints.close()
        log_saved(run)
        run.log.write("end", run.progress.step, state=state)
        run.log.close()
        write_result(run, state)
        return state


def assemble(config: Config, run_dir: Path, process: Process) -> Run:
    """Builds everything that exists once per rank; no data has been read and nothing resumed yet."""
    config.check_world(process.world_size)
    mesh = build_mesh(plan_layout(config.mesh, process.world_size), process)
    model = build_model(
        config.model, mesh, dispatcher=config.mesh.dispatcher, backend=config.kernels.backend,
        seed=config.train.seed, device=process.device,
    )  # fmt: skip
    optimizer = make_optimizer(config.optim, model.parameters())
    allocate_moments(model, optimizer)
    checkpoints = Checkpointer(
        run_dir / "checkpoints", mesh=mesh, process=process, keep_last=config.checkpoint.keep_last,
        generation=int(os.environ.get("MOEBIUS_GENERATION", "0")), generation_file=run_dir / "generation",
    )  # fmt: skip
    log = MetricsLog(run_dir, active=process.rank == 0)
    reducer = GradientReducer(*split_parameters(model), mesh)
    return Run(config, run_dir, process, mesh, model, optimizer, reducer, checkpoints, log)


def resume(run: Run) -> None:
    """Continues from the newest checkpoint of the run folder, if there is one."""
    newest = run.checkpoints.latest()
    if newest is not None:
        meta = run.checkpoints.load(newest, *state_tensors(run.model, run.optimizer))
        run.progress = Progress(**meta["progress"])
        set_updates(run.model, run.optimizer, run.progress.updates)
    run.log.write(
        "start", run.progress.step, generation=run.checkpoints.generation, world_size=run.process.world_size,
        resumed_from_step=run.progress.step if newest else None, layout=str(run.mesh.layout),
        device=str(run.process.device), steps=run.config.train.steps, parameters=count_parameters(run),
    )  # fmt: skip


def open_loader(run: Run) -> Loader:
    """The data from where the run stands: a seek, whatever the number of ranks was before."""
    config = run.config
    loader = Loader(
        Path(config.data.directory), seq_len=config.data.seq_len, global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch, rank=run.process.rank, num_ranks=run.process.world_size,
        seed=config.data.seed, start_sample=run.progress.samples,
    )  # fmt: skip
    saved = run.checkpoints.loaded_meta
    if saved is not None:
        loader.check_position(saved["data"])
    return loader


def run_steps(run: Run, loader: Loader) -> str:
    """The loop."""
    config = run.config
    if run.progress.step == 0:
        log_evaluation(run)
    waited_s = loader.wait_s
    for batch in loader:
        started = time.perf_counter()
        if run.progress.step >= config.train.steps:
            break
        seed_step(config.train.seed, run.progress.step, run.process.rank)
        rate = learning_rate_at(config.optim, run.progress.step)
        meter, norm = step(run, batch, rate)
        step_s, data_wait_s, waited_s = time.perf_counter() - started, loader.wait_s - waited_s, loader.wait_s
        stop = False
        if run.progress.step % config.train.log_every == 0:
            stop = log_step(run, meter, batch, rate=rate, grad_norm=norm, step_s=step_s, data_wait_s=data_wait_s)
        last = stop or run.progress.step == config.train.steps
        if last or due(run.progress.step, config.train.eval_every):
            log_evaluation(run)
        if last or due(run.progress.step, config.checkpoint.every):
            save(run, loader)
        log_saved(run)
        if stop:
            return "stopped"
    return "finished"


def step(run: Run, batch: Batch, rate: float) -> tuple[StepMeter, float]:
    """One optimizer step over this rank's micro-batches. A gradient that is not finite anywhere skips it everywhere."""
    config, meter = run.config, StepMeter()
    forward = partial(forward_in, run.model, getattr(torch, config.train.precision))
    rows_AB1 = torch.from_numpy(batch.tokens).to(run.process.device, non_blocking=True)
    run.optimizer.zero_grad()
    for rows_B1 in rows_AB1:
        result = micro_batch_loss(forward, rows_B1, global_sequences=config.train.global_batch)
        result.loss.backward()
        meter.add(result)
    run.reducer.reduce()
    norm = clip_gradients(*run.parameters, run.mesh, max_norm=config.optim.clip_norm).item()
    finite = norm - norm == 0.0
    if finite:
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
    sequences = config.train.global_batch
    run.progress = run.progress.after_step(
        sequences=sequences, tokens=sequences * config.data.seq_len, updated=finite
    )  # fmt: skip
    return meter, norm


def log_step(run: Run, meter: StepMeter, batch: Batch, *, rate: float, grad_norm: float, **times: float) -> bool:
    """Collective: sums the step's statistics over the ranks, writes them, and tells whether a stop was asked for."""
    asked = run.process.rank == 0 and (run.run_dir / "stop").exists()
    sums = meter.reduce(digest=batch.digest, stop=float(asked), data_wait_s=times["data_wait_s"])
    tokens = run.config.train.global_batch * run.config.data.seq_len
    run.log.write(
        "train", run.progress.step, loss=sums["loss"].item(), regularisation=sums["regularisation"].item(),
        learning_rate=rate, grad_norm=grad_norm, skipped=run.progress.step - run.progress.updates,
        tokens=run.progress.tokens, tokens_per_s=round(tokens / (times["step_s"] + times["data_wait_s"]), 1),
        step_s=round(times["step_s"], 5), data_wait_s=round(sums["data_wait_s"].item() / run.process.world_size, 5),
        digest=int(sums["digest"].item()) % 2**31, **expert_metrics(sums),
    )  # fmt: skip
    return sums["stop"].item() > 0


def log_evaluation(run: Run) -> None:
    """Validation loss now."""
    result = evaluate(run.model, run.config, run.process)
    run.log.write("eval", run.progress.step, loss=result.loss, perplexity=result.perplexity, tokens=result.tokens)


def save(run: Run, loader: Loader) -> None:
    """Starts a checkpoint; it is written in the background while the run goes on."""
    meta = {
        "progress": run.progress.as_dict(),
        "data": loader.position(),
        "config": run.config.model_dump(mode="json"),
    }
    run.checkpoints.save(run.progress.step, *state_tensors(run.model, run.optimizer), meta)


def log_saved(run: Run) -> None:
    """Reports the checkpoints that were completed since the last call."""
    for record in run.checkpoints.poll():
        run.log.write("checkpoint", record.step, seconds=round(record.seconds, 3), bytes=record.bytes)


def write_result(run: Run, state: str) -> None:
    """Rank 0's last word: without it an exit code of 0 is not believed."""
    if run.process.rank == 0:
        partial_file = run.run_dir / "result.json.tmp"
        partial_file.write_text(json.dumps({"state": state, "step": run.progress.step}) + "\n", encoding="utf-8")
        partial_file.replace(run.run_dir / "result.json")


def split_parameters(model: Transformer) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Dense parameters and expert parameters, in the model's order."""
    sharded = expert_names(model)
    dense = [parameter for name, parameter in model.named_parameters() if name not in sharded]
    return dense, [parameter for name, parameter in model.named_parameters() if name in sharded]


def count_parameters(run: Run) -> int:
    """Of the whole model, experts of all ranks included."""
    dense, experts = run.parameters
    return sum(p.numel() for p in dense) + run.mesh.layout.ep * sum(p.numel() for p in experts)


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0
