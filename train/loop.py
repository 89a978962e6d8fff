"""The training run on one rank, in the order in which things happen. Read this first.

    start → data → model → resume? → [batch → loss → gradients → clip → update → log → evaluate? → save?] × steps → end

Every rank runs this same code. What is decided (skip a step, stop, evaluate, save) is decided from numbers that are equal on all
ranks, so no rank ever takes part in a collective alone. `cluster/` starts it on many nodes; `torchrun -m moebius.train` and a
plain process work as well.
"""

import time
from functools import partial
from pathlib import Path

import torch

from ..data_pipeline.loader import Batch, Loader
from ..distributed.gradients import clip_gradients
from ..distributed.process import start_process
from ..model.precision import forward_in
from .config import Config
from .evaluate import evaluate
from .loss import micro_batch_loss
from .metrics import StepMeter, expert_metrics
from .optim import learning_rate_at
from .run import Run, assemble, open_loader, resume, write_result
from .state import seed_step, state_tensors


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
        position = resume(run)
        with open_loader(run, position) as loader:
            state = run_steps(run, loader)
        run.checkpoints.wait()
        log_saved(run)
        run.log.write("end", run.progress.step, state=state)
        run.log.close()
        write_result(run, state)
        return state


def run_steps(run: Run, loader: Loader) -> str:
    """The loop."""
    config = run.config
    if run.progress.step == 0:
        log_evaluation(run)
    waited_s = loader.wait_s
    while run.progress.step < config.train.steps:
        batch = next(loader)
        started = time.perf_counter()
        seed_step(config.train.seed, run.progress.step, run.process.rank)
        rate = learning_rate_at(config.optim, run.progress.step)
        meter, norm = step(run, batch, rate)
        step_s, data_wait_s, waited_s = time.perf_counter() - started, loader.wait_s - waited_s, loader.wait_s
        stop = False
        if run.progress.step % config.train.log_every == 0:
            stop = log_step(run, meter, batch, rate=rate, grad_norm=norm, step_s=step_s, data_wait_s=data_wait_s)
        done = run.progress.step == config.train.steps
        last = stop or done
        if last or due(run.progress.step, config.train.eval_every):
            log_evaluation(run)
        if last or due(run.progress.step, config.checkpoint.every):
            save(run, loader)
        log_saved(run)
        if last:
            return "finished" if done else "stopped"
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
    norm = clip_gradients(run.dense, run.experts, run.mesh, max_norm=config.optim.clip_norm).item()
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
        "data": {"spec_hash": loader.spec_hash, "spec": loader.spec},
        "config": run.config.model_dump(mode="json"),
    }
    run.checkpoints.save(run.progress.step, *state_tensors(run.model, run.optimizer), meta)


def log_saved(run: Run) -> None:
    """Reports the checkpoints that were completed since the last call."""
    for record in run.checkpoints.poll():
        run.log.write(
            "checkpoint", record.step, seconds=round(record.seconds, 3), blocked_s=round(record.blocked_s, 5),
            bytes=record.num_bytes, error=record.error,
        )  # fmt: skip


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0
