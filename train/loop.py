"""The training run on one rank, in order. Read this first.

    start → model → resume? → data
          → [batch → loss → gradients → clip → update → hooks] × steps
          → end

The hooks (hooks.py) run at every step boundary: log, move experts, evaluate, save. Every rank
runs this code. Decisions (to skip an update, to stop, to save) use numbers that are equal on
all ranks, so no rank ever enters a collective alone. `cluster/` starts the ranks.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..data_pipeline.read.loader import Batch
from ..distributed.dispatch.choose import counters_of
from ..distributed.gradients import clip_gradients
from ..distributed.process.process import start_process
from ..model.execution.precision import forward_in, products_dtype
from .config.run_config import Config
from .config.schedule import learning_rate_at
from .hooks import HOOKS, Examine, evaluate_run, finish, is_logged
from .loss import micro_batch_loss
from .metrics.run_lines import write_start
from .metrics.sinks import check_sinks, open_metrics
from .metrics.step_metrics import StepMeter
from .micro_batches import (
    MicroBatch,
    count_targets,
    document_use,
    options_of_passes,
    split_batch,
)
from .optim import set_rates
from .rank_data import next_batch, open_loader
from .record.heartbeat import PhaseClock, open_heartbeat
from .run import OpenRun, Run, StepResult, assemble, resume
from .state import check_state, seed_micro_batch


def train(config: Config, run_dir: Path, *, examine: Examine | None = None) -> str:
    """Trains to the last step, or to the next step boundary after a stop request.

    Returns:
        "finished" or "stopped", as in the run folder's result.json.

    Raises:
        ValueError: the configuration, the data or a checkpoint cannot be used; the message says
            what to do.
    """
    heartbeat, clock, keys = open_heartbeat(), PhaseClock(), config.train
    with (
        start_process(keys.device, timeout_s=keys.timeout_s, threads=keys.threads) as process,
        ExitStack() as logs,
    ):
        clock.mark("join")
        parts = assemble(config, run_dir, process, heartbeat)
        check_sinks(config, parts.checkpoints.on_rank_0, run_dir)
        clock.mark("build")
        resumed = resume(parts)
        clock.mark("load")
        with closing(open_loader(parts, resumed and resumed.position)) as loader:
            clock.mark("loader")
            first_step, active = parts.state.first_step, process.rank == 0
            metrics = open_metrics(config, run_dir, active=active, first_step=first_step)
            log = logs.enter_context(metrics)
            run = OpenRun(**vars(parts), loader=loader, log=log, examine=examine)
            write_start(run, resumed, clock.rounded())
            state = train_steps(run)
        finish(run, state)
        return state


def train_steps(run: OpenRun) -> str:
    """Runs the steps, each followed by the hooks.

    Returns:
        "finished" after the last step; "stopped" after an earlier stop request.
    """
    config, optim = run.config, run.config.optim.over(run.config.train.steps)
    if run.progress.step == 0:
        evaluate_run(run)
    run.restart_clock()
    stopped = False
    while run.progress.step < config.train.steps and not stopped:
        batch = next_batch(run)
        rate = learning_rate_at(optim, run.progress.step)
        run.heartbeat.begin_step(run.progress.step + 1)
        result = step(run, batch, rate, data_ready=run.loader.ready)
        run.heartbeat.end_step(own_s=result.own_s)
        for hook in HOOKS:
            hook(run, result)
        stopped = result.stop
    return "finished" if run.progress.step == config.train.steps else "stopped"


def step(
    run: Run, batch: Batch, rate: float, *, data_ready: Callable[[], bool] = lambda: True
) -> StepResult:
    """Runs one optimizer step over this rank's micro-batches; a collective call.

    All ranks skip the update together if any rank's gradient is not finite, if no target of the
    batch counts, or if the step is a spike (`train.skip_spikes`).

    Args:
        run: the run.
        batch: this rank's share of the global batch.
        rate: the learning rate.
        data_ready: whether this rank has the next step's batch.

    Returns:
        What the hooks read.
    """
    device = run.process.device
    micro_batches = split_batch(batch, device, document_use(run.config))
    counted_targets = count_targets(micro_batches, device)

    run.model.before_step(run.progress.step)
    run.passes.begin_step(run.optimizer, run.reducer)
    began_s = time.perf_counter()
    meter = StepMeter()
    accumulate_gradients(run, micro_batches, meter, global_targets=counted_targets)
    own_s = time.perf_counter() - began_s - meter.waited_s

    run.reducer.reduce()
    # The norm's all-reduce also sums stop requests, ranks whose next batch is late and, to judge spikes
    # (train.skip_spikes), the cross-entropy.
    loss = [] if run.judge.deviations is None else [meter.loss]
    grad_norm, (stops, waiting, *global_loss), grad_norms = clip_gradients(
        run.parameters,
        run.mesh,
        max_norm=run.config.optim.clip_norm,
        numbers=[run.end_is_requested(), not data_ready(), *loss],
        by_part=is_logged(run, run.progress.step + 1),
    )
    run.state.data_is_late = waiting > 0
    skipped, spike = run.judge.why_skipped(grad_norm, counted_targets, global_loss)
    update_weights(run, meter, batch, rate=rate, skipped=skipped)
    return StepResult(
        batch=batch,
        meter=meter,
        learning_rate=rate,
        grad_norm=grad_norm,
        stop=stops > 0,
        is_last=stops > 0 or run.progress.step == run.config.train.steps,
        counted_targets=counted_targets,
        own_s=own_s if device.type == "cpu" else None,  # the host cannot time a GPU's work
        spike=spike,
        grad_norms=grad_norms,
    )


def accumulate_gradients(
    run: Run, micro_batches: list[MicroBatch], meter: StepMeter, *, global_targets: int | None
) -> None:
    """Accumulates the gradients of this rank's micro-batches, and their reports in `meter`."""
    config = run.config
    forward = partial(forward_in, run.model, products_dtype(config.train.precision))
    loss_of = partial(
        micro_batch_loss,
        forward,
        global_sequences=config.train.global_batch,
        global_targets=global_targets,
    )
    counters_before = counters_of(run.model)
    first_index = run.process.rank * len(micro_batches)  # over all ranks
    is_measured = is_logged(run, run.progress.step + 1)
    passes = options_of_passes(config, run.progress.step, run.process, micro_batches)
    pairs = zip(micro_batches, passes, strict=True)
    for index, (micro_batch, options) in enumerate(pairs, start=first_index):
        seed_micro_batch(config.train.seed, run.progress.step, index)  # for a user's own parts
        options = replace(options, measures_loops=is_measured, depth_losses=run.depth_losses)
        meter.add(run.passes.run(loss_of, micro_batch, options))
    meter.count_exchanges(counters_before, counters_of(run.model))


def update_weights(
    run: Run, meter: StepMeter, batch: Batch, *, rate: float, skipped: str | None
) -> None:
    """Updates the weights unless `skipped` gives a reason, and counts the step."""
    config = run.config
    carried = meter.reduce_carried()  # for routers that learn without a gradient
    if skipped is None:
        set_rates(run.optimizer, rate, peak=config.optim.learning_rate)
        run.optimizer.step()
        if not run.progress.updates:  # the optimizer has its state only now
            check_state(run.model, run.optimizer)
        run.average.update()
        run.model.after_step(run.progress.step, carried)
    run.state.progress = run.progress.after_step(
        samples=batch.first_sample + config.train.global_batch,
        tokens=config.train.global_batch * config.data.seq_len,
        updated=skipped is None,
    )
    run.judge.count(run.progress.step, skipped, is_rank_0=run.process.rank == 0)
