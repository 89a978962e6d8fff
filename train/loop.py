"""The training run on one rank, in the order in which things happen. Read this first.

    start → model → resume? → data
          → [batch → loss → gradients → clip → update → log → move experts? → save? → evaluate?] × steps
          → too many spikes? back to an earlier checkpoint, past their data
          → end

Every rank runs this same code. What is decided (skip a step, stop, evaluate, save) is decided from
numbers that are equal on all ranks, so no rank ever takes part in a collective alone. `cluster/`
starts it, on one machine or on many nodes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..data_pipeline.errors import PreparationFailedError
from ..data_pipeline.read.loader import Batch, Loader
from ..distributed.dispatch.base import equal_rows
from ..distributed.dispatch.choose import counters_of, rooms_of
from ..distributed.gradients import clip_gradients
from ..distributed.process.process import start_process
from ..model.execution.precision import forward_in, products_dtype
from .config.run_config import Config
from .data_wait import wait_for_data
from .evaluate import evaluate
from .loss import micro_batch_loss
from .metrics.log import MetricsLog
from .metrics.sinks import check_sinks
from .metrics.step_metrics import StepClock, StepMeter, exchange_metrics, expert_metrics
from .micro_batches import MicroBatch, count_targets, document_use, split_batch
from .optim import learning_rate_at
from .phase_clock import PhaseClock
from .record.heartbeat import Phase, open_heartbeat
from .record.run_folder import end_is_asked
from .record.samples import write_samples
from .run import (
    Run,
    assemble,
    judge,
    log_saved,
    open_loader,
    open_log,
    resume,
    save,
    trace_next_step,
    write_result,
)
from .spikes.detector import Spike
from .spikes.rollback import roll_back
from .state import seed_micro_batch

_LAST_COPY_S = 240.0  # how long a run that is done waits for the second copy of its last checkpoint


def train(config: Config, run_dir: Path) -> str:
    """Trains to the last step, or to the next step boundary after a stop was asked for.

    Returns:
        "finished" or "stopped"; the same is in the run folder's result.json.

    Raises:
        ValueError: the configuration, the data or a checkpoint cannot be used; the message says
            what to do.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    heartbeat, clock = open_heartbeat(), PhaseClock()
    with (
        ExitStack() as logs,
        start_process(config.train.device, timeout_s=config.train.timeout_s) as process,
    ):
        clock.mark("join")
        run = assemble(config, run_dir, process)
        run.heartbeat = heartbeat
        check_sinks(config, run.checkpoints.on_rank_0)
        clock.mark("build")
        position = resume(run)
        clock.mark("load")
        with open_loader(run, position) as loader:
            clock.mark("loader")
            log = logs.enter_context(
                open_log(run, resumed=position is not None, start_s=clock.rounded())
            )
            state = run_steps(run, loader, log)
        while state == "spiked":
            with open_loader(run, roll_back(run, log)) as loader:
                state = run_steps(run, loader, log)
        with heartbeat.during(Phase.CKPT):
            run.checkpoints.wait()
            run.checkpoints.wait_for_copies(_LAST_COPY_S)
        heartbeat.enter(Phase.END)
        log_saved(run, log)
        log.write("end", run.progress.step, state=state)
        log.close()
        write_result(run, state)
        return state


def run_steps(run: Run, loader: Loader, log: MetricsLog) -> str:
    """Makes one step after another, and between them logs, moves experts, saves and evaluates.

    Returns:
        "finished" after the last step; "stopped" if somebody asked for the end before it; "spiked"
        if the run is to go back to an earlier checkpoint.
    """
    config = run.config
    if run.progress.step == 0:
        log_evaluation(run, log)
    first = run.progress.step + 1
    clock = StepClock()
    data_missing = True
    while run.progress.step < config.train.steps:
        if run.spikes and run.spikes.rollback_is_due:
            return "spiked"
        run.heartbeat.enter(Phase.DATA_WAIT)
        if data_missing:
            wait_for_data(run, loader, log)
        batch = next_batch(run, loader, log, first_step=first)
        run.heartbeat.begin_step(run.progress.step + 1)
        rate = learning_rate_at(config.optim, run.progress.step)
        result = step(run, batch, rate, data_ready=loader.ready)
        data_missing = result.data_missing
        run.heartbeat.end_step(own_s=result.own_s)
        clock.count_step()
        number = run.progress.step
        finished = number == config.train.steps
        ends = finished or result.stop
        if number == first or ends or due(number, config.train.log_every):
            log_step(run, log, result, batch, loader, clock.read(waited_s=loader.wait_s))
            clock = StepClock(waited_s=loader.wait_s)
        if result.spike is not None:
            log.write("spike", number, first_sample=batch.first_sample, **asdict(result.spike))
        rebalance_experts(run, log, result)
        if ends or due(number, config.checkpoint.every):
            save(run, loader)
        if ends and not finished:
            return "stopped"
        if finished or due(number, config.train.eval_every):
            log_evaluation(run, log)
            clock = StepClock(waited_s=loader.wait_s)
        log_saved(run, log)
    return "finished"


# One step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step."""

    meter: StepMeter  # this rank's sums over the step's micro-batches
    learning_rate: float
    grad_norm: float  # before clipping; not finite: the step was skipped on all ranks
    stop: bool  # somebody asked for the run's end; the same answer on all ranks
    # targets in the loss, over all ranks; None: every one; 0: the step was skipped on all ranks
    counted_targets: int | None = None
    data_missing: bool = False  # some rank has no batch for the next step; the same on all ranks
    own_s: float | None = None  # forward and backward here, without waiting for other ranks
    spike: Spike | None = None  # it was one, and skipped; the same on all ranks


def step(
    run: Run, batch: Batch, rate: float, *, data_ready: Callable[[], bool] = lambda: True
) -> StepResult:
    """Makes one optimizer step over this rank's micro-batches; a collective call.

    A gradient that is not finite on any rank skips the update on all of them, and so do a batch of
    which no target counts and, where `train.spikes` says so, a spike. `data_ready`: whether this rank
    has a batch for the next step.
    """
    micro_batches = split_batch(batch, run.process.device, document_use(run.config))
    counted = count_targets(micro_batches, run.process.device)
    run.model.before_step(run.progress.step)
    asked = run.process.rank == 0 and (end_is_asked(run.run_dir) or run.checkpoints.must_stop)
    meter, own_s, norm, (stops, waiting, *loss) = reduced_gradients(
        run,
        micro_batches,
        global_targets=counted,
        numbers=lambda meter: [asked, not data_ready(), *([meter.loss] if run.spikes else [])],
    )
    skipped, spike = judge(run, norm, counted, loss)
    update_weights(run, meter, batch, rate=rate, skipped=skipped)
    on_host = run.process.device.type == "cpu"  # a GPU's work is not seen by this clock
    return StepResult(
        meter,
        rate,
        norm,
        stops > 0,
        counted,
        waiting > 0,
        own_s if on_host else None,
        spike,
    )


def reduced_gradients(
    run: Run,
    micro_batches: list[MicroBatch],
    *,
    global_targets: int | None,
    numbers: Callable[[StepMeter], list[Tensor | float]],
) -> tuple[StepMeter, float, float, list[float]]:
    """Makes the step's gradients, the same on all ranks, and clips them. Collective.

    Where a layer's experts got more routes than they had room for (distributed/dispatch/room.py)
    they get more room, and all is done again.

    Returns:
        What the micro-batches report; how long they took here; the gradients' norm before clipping;
        and the numbers' sums over ranks.
    """
    rooms = rooms_of(run.model)
    while True:
        meter = StepMeter()
        run.optimizer.zero_grad()
        began_s = time.perf_counter()
        accumulate_gradients(run, micro_batches, meter, global_targets=global_targets)
        own_s = time.perf_counter() - began_s - meter.waited_s
        run.reducer.reduce()
        used = [(room, is_over) for room in rooms if (is_over := room.take()) is not None]
        norm, sums = clip_gradients(
            run.parameters,
            run.mesh,
            max_norm=run.config.optim.clip_norm,
            numbers=[*(is_over for _, is_over in used), *numbers(meter)],
        )
        if not any(sums[: len(used)]):
            return meter, own_s, norm, list(sums[len(used) :])
        for (room, _), is_over in zip(used, sums, strict=False):
            if is_over:
                room.grow()


def accumulate_gradients(
    run: Run, micro_batches: list[MicroBatch], meter: StepMeter, *, global_targets: int | None
) -> None:
    """Adds up the gradients of this rank's micro-batches, and in `meter` what they report."""
    config = run.config
    forward = partial(forward_in, run.model, products_dtype(config.train.precision))
    counters_before = counters_of(run.model)
    trace = trace_next_step(run)
    first = run.process.rank * len(micro_batches)

    for index, micro_batch in enumerate(micro_batches, start=first):
        seed_micro_batch(config.train.seed, run.progress.step, index)
        promise = equal_rows() if micro_batch.equal_rows else nullcontext()
        with trace.micro_batch(micro_batch.inputs_BS, micro_batch.document_ids_BS), promise:
            result = micro_batch_loss(
                forward,
                micro_batch.inputs_BS,
                targets_BS=micro_batch.targets_BS,
                global_sequences=config.train.global_batch,
                loss_mask_BS=micro_batch.loss_mask_BS,
                global_targets=global_targets,
                documents=micro_batch.documents,
            )
        result.loss.backward()
        meter.add(result)
    meter.count_exchanges(counters_before, counters_of(run.model))
    trace.save()


def update_weights(
    run: Run, meter: StepMeter, batch: Batch, *, rate: float, skipped: str | None
) -> None:
    """Updates the weights, unless `skipped` says why not; counts the step."""
    config = run.config
    carried = meter.reduce_carried()  # what routers learn from without a gradient, from all ranks
    if skipped is None:
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
        run.model.after_step(run.progress.step, carried)
    run.progress = run.progress.after_step(
        samples=batch.first_sample + config.train.global_batch,
        tokens=config.train.global_batch * config.data.seq_len,
        updated=skipped is None,
    )
    run.count_skipped(skipped)


# Between two steps ------------------------------------------------------------------------------


def due(step: int, every: int) -> bool:
    """Returns whether what happens `every` so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0


def next_batch(run: Run, loader: Loader, log: MetricsLog, *, first_step: int) -> Batch:
    """Returns the next batch; where data is used up that will not come, saves the state and raises.

    Raises:
        PreparationFailedError: the preparation beside the run was given up; on all ranks alike.
    """
    try:
        return next(loader)
    except PreparationFailedError:
        number = run.progress.step
        if number >= first_step and not due(number, run.config.checkpoint.every):
            save(run, loader)
        run.checkpoints.wait()
        log_saved(run, log)
        raise


def log_step(
    run: Run,
    log: MetricsLog,
    result: StepResult,
    batch: Batch,
    loader: Loader,
    times: tuple[float, float],
) -> None:
    """Sums the step's statistics over the ranks and writes them to the log; a collective call.

    `times` are those of `StepClock.read`; `data_wait_s` in the log is of all ranks together.
    """
    step_s, data_wait_s = times
    sums = result.meter.reduce(
        digest=batch.digest, data_wait_s=data_wait_s, lost_server=loader.lost_server
    )
    lost_servers = int(sums["lost_server"].item())
    tokens = run.config.train.global_batch * run.config.data.seq_len
    counted = result.counted_targets
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
        **({} if counted is None else {"counted_targets": counted}),
        **({"ranks_without_data_server": lost_servers} if lost_servers else {}),
        **expert_metrics(sums),
        **exchange_metrics(sums, ep=run.mesh.layout.ep, on_host=run.process.device.type == "cpu"),
    )


def rebalance_experts(run: Run, log: MetricsLog, result: StepResult) -> None:
    """Moves experts to where the load wants them, every `mesh.rebalance_every` steps."""
    run.expert_placement.count(result.meter.loads())
    moved = run.expert_placement.decide(run.progress.step)
    if moved is not None:
        log.write("expert_placement", run.progress.step, **asdict(moved))


def log_evaluation(run: Run, log: MetricsLog) -> None:
    """Measures the validation loss, and exact match on the data's test sets; a collective call.

    All is written to the log: a line `eval`, where there are test sets a line `task`, and where the
    configuration wants them a line `samples`.
    """
    # A router that follows a schedule is judged as the next step would use it.
    run.model.before_step(run.progress.step)
    began_s = time.monotonic()
    with run.heartbeat.during(Phase.EVAL):
        result = evaluate(run.model, run.config, run.process)
    log.write(
        "eval",
        run.progress.step,
        loss=result.loss,
        perplexity=result.perplexity,
        tokens=result.tokens,
        seconds=round(time.monotonic() - began_s, 3),
    )
    if run.config.train.metrics.sample_tokens:
        with run.heartbeat.during(Phase.EVAL):
            samples = write_samples(run.model, run.config, run.process)
        log.write("samples", run.progress.step, samples=[asdict(sample) for sample in samples])
