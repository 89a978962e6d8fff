"""The training run on one rank, in the order in which things happen. Read this first.

    start → data → model → resume? → [batch → loss → gradients → clip → update → log → evaluate? → save?] × steps → end

Every rank runs this same code. What is decided (skip a step, stop, evaluate, save) is decided from
numbers that are equal on all ranks, so no rank ever takes part in a collective alone. `cluster/`
starts it, on one machine or on many nodes.
"""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from ..data_pipeline.loader import Batch, Loader
from ..distributed.dispatch.choose import counters_of
from ..distributed.gradients import clip_gradients
from ..distributed.process.process import start_process
from ..model.precision import forward_in
from .config import Config
from .evaluate import evaluate
from .loss import micro_batch_loss
from .metrics import MetricsLog, StepMeter, exchange_metrics, expert_metrics
from .optim import learning_rate_at
from .routing.trace import StepTrace
from .run import Run, assemble, open_loader, open_log, resume, whole_parameters, write_result
from .state import seed_micro_batch, state_tensors


def train(config: Config, run_dir: Path) -> str:
    """Trains to the last step, or to the next boundary after a stop was asked for.

    Returns:
        "finished" or "stopped"; the same is in the run folder's result.json.

    Raises:
        ValueError: the configuration, the data or a checkpoint cannot be used; the message says
            what to do.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    with start_process(config.train.device, timeout_s=config.train.timeout_s) as process:
        run = assemble(config, run_dir, process)
        position = resume(run)
        log = open_log(run, resumed=position is not None)
        with open_loader(run, position) as loader:
            state = run_steps(run, loader, log)
        run.checkpoints.wait()
        log_saved(run, log)
        log.write("end", run.progress.step, state=state)
        log.close()
        write_result(run, state)
        return state


def run_steps(run: Run, loader: Loader, log: MetricsLog) -> str:
    """The loop."""
    config, first = run.config, True
    if run.progress.step == 0:
        log_evaluation(run, log)
    clock = Clock()
    while run.progress.step < config.train.steps:
        batch = next(loader)
        result = step(run, batch, learning_rate_at(config.optim, run.progress.step))
        clock.count_step()
        done = run.progress.step == config.train.steps
        if first or done or result.stop or due(run.progress.step, config.train.log_every):
            log_step(run, log, result, batch, clock.read(waited_s=loader.wait_s))
            clock, first = Clock(waited_s=loader.wait_s), False
        rebalance_experts(run, result, log)
        if result.stop or done or due(run.progress.step, config.checkpoint.every):
            save(run, loader)
        if result.stop and not done:
            return "stopped"
        if done or due(run.progress.step, config.train.eval_every):
            log_evaluation(run, log)
            clock = Clock(waited_s=loader.wait_s)
        log_saved(run, log)
    return "finished"


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, as it went."""

    meter: StepMeter
    learning_rate: float
    grad_norm: float  # before clipping; not finite: the step was skipped on all ranks
    stop: bool  # somebody asked for the run's end; the same answer on all ranks


def step(run: Run, batch: Batch, rate: float) -> StepResult:
    """One optimizer step over this rank's micro-batches. A gradient that is not finite anywhere
    skips it everywhere.
    """
    config, meter = run.config, StepMeter()
    forward = partial(forward_in, run.model, getattr(torch, config.train.precision))
    before = counters_of(run.model)
    rows_AB1 = torch.from_numpy(batch.tokens).to(run.process.device, non_blocking=True)
    run.optimizer.zero_grad()
    run.model.before_step(run.progress.step)
    routing = trace_of(run)
    for index, rows_B1 in enumerate(rows_AB1, start=run.process.rank * len(rows_AB1)):
        seed_micro_batch(config.train.seed, run.progress.step, index)
        with routing.micro_batch(num_tokens=len(rows_B1) * config.data.seq_len):
            result = micro_batch_loss(forward, rows_B1, global_sequences=config.train.global_batch)
        result.loss.backward()
        meter.add(result)
    meter.count_exchanges(before, counters_of(run.model))
    routing.save()
    run.reducer.reduce()
    asked = run.process.rank == 0 and (run.run_dir / "stop").exists()
    norm, stop = clip_gradients(
        run.parameters, run.mesh, max_norm=config.optim.clip_norm, flag=asked
    )
    finite = math.isfinite(norm.item())
    totals = meter.reduce_carried()  # what routers learn from without a gradient, from all ranks
    if finite:
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
        run.model.after_step(run.progress.step, totals)
    sequences = config.train.global_batch
    run.progress = run.progress.after_step(
        sequences=sequences, tokens=sequences * config.data.seq_len, updated=finite
    )
    run.refuse_endless_skipping(norm.item())
    return StepResult(meter, rate, norm.item(), stop)


def trace_of(run: Run) -> StepTrace:
    """Records the coming step's routes, if `train.record_routing` wants them."""
    return StepTrace(
        run.model,
        run.run_dir,
        step=run.progress.step + 1,
        every=run.config.train.record_routing,
        rank=run.process.rank,
        num_ranks=run.process.world_size,
    )


class Clock:
    """Time from one log line to the next, evaluations left out: what a step costs with all that
    goes on beside it.
    """

    def __init__(self, *, waited_s: float = 0.0) -> None:
        self._started, self._waited_s, self._steps = time.perf_counter(), waited_s, 0

    def count_step(self) -> None:
        """One more step was made."""
        self._steps += 1

    def read(self, *, waited_s: float) -> tuple[float, float]:
        """Seconds per step, and of these the seconds in which this rank waited for data."""
        steps = max(self._steps, 1)
        return (time.perf_counter() - self._started) / steps, (waited_s - self._waited_s) / steps


def log_step(
    run: Run, log: MetricsLog, result: StepResult, batch: Batch, times: tuple[float, float]
) -> None:
    """Collective: sums the step's statistics over the ranks and writes them; `data_wait_s` is of
    all ranks together.
    """
    step_s, data_wait_s = times
    sums = result.meter.reduce(digest=batch.digest, data_wait_s=data_wait_s)
    tokens = run.config.train.global_batch * run.config.data.seq_len
    log.write(
        "train",
        run.progress.step,
        loss=sums["loss"].item(),
        regularisation=sums["regularisation"].item(),
        learning_rate=result.learning_rate,
        grad_norm=result.grad_norm,
        skipped=run.progress.step - run.progress.updates,
        tokens=run.progress.tokens,
        tokens_per_s=round(tokens / step_s, 1),
        step_s=round(step_s, 5),
        data_wait_s=round(sums["data_wait_s"].item(), 5),
        digest=int(sums["digest"].item()) % 2**31,
        **expert_metrics(sums),
        **exchange_metrics(sums, ep=run.mesh.layout.ep),
    )


def rebalance_experts(run: Run, result: StepResult, log: MetricsLog) -> None:
    """Brings the experts to where the load wants them, every `mesh.rebalance_every` steps."""
    run.expert_placement.count(result.meter.loads())
    moved = run.expert_placement.decide(run.progress.step)
    if moved is not None:
        run.reducer = run.expert_placement.make_reducer(*whole_parameters(run.model))
        log.write("expert_placement", run.progress.step, **asdict(moved))


def log_evaluation(run: Run, log: MetricsLog) -> None:
    """Validation loss now."""
    run.model.before_step(
        run.progress.step
    )  # a router that follows a schedule is judged as the next step would use it
    result = evaluate(run.model, run.config, run.process)
    log.write(
        "eval",
        run.progress.step,
        loss=result.loss,
        perplexity=result.perplexity,
        tokens=result.tokens,
    )


def save(run: Run, loader: Loader) -> None:
    """Starts a checkpoint; it is written in the background while the run goes on."""
    meta = {
        "progress": run.progress.as_dict(),
        "data": {"spec_hash": loader.spec_hash, "spec": loader.spec},
        "config": run.config.model_dump(mode="json"),
        "experts": run.expert_placement.as_dict(),
    }
    run.checkpoints.save(run.progress.step, *state_tensors(run.model, run.optimizer), meta)


def log_saved(run: Run, log: MetricsLog) -> None:
    """Reports the checkpoints that were completed since the last call."""
    for record in run.checkpoints.poll():
        log.write(
            "checkpoint",
            record.step,
            seconds=round(record.seconds, 3),
            blocked_s=round(record.blocked_s, 5),
            bytes=record.num_bytes,
            error=record.error,
        )


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0
