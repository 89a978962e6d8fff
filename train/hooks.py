"""The hooks that run at step boundaries; `HOOKS` lists them in order.

Every hook takes the run and the result of the last step, and decides itself whether to act. All
ranks call all hooks, because most are collective.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict

from ..data_pipeline.errors import NothingToReadError
from ..data_pipeline.files import write_atomically
from .evaluate import evaluate
from .metrics.run_lines import log_saved
from .metrics.step_metrics import exchange_metrics, expert_metrics, peak_tokens_per_s
from .optim import muon_rate
from .record.heartbeat import Phase
from .run import OpenRun, Run, StepResult, save

logger = logging.getLogger(__name__)

Examine = Callable[[OpenRun], None]
"""Does what `evaluate` asks for; collective. The ranks' program takes it from evaluation/."""

_LAST_COPY_S = 240.0  # how long a finished run waits for the second copy of its last checkpoint


def log_step(run: OpenRun, result: StepResult) -> None:
    """Sums the step's statistics over the ranks and writes them to the log.

    It logs this process's first step, every `train.log_every`-th and the last. Times are means over
    the steps since the last line; `data_wait_s` is summed over ranks.
    """
    run.state.clock.count_step()
    number, train = run.progress.step, run.config.train
    if not (result.is_last or is_logged(run, number)):
        return
    step_s, data_wait_s = run.state.clock.read(waited_s=run.loader.wait_s)
    sums = result.meter.reduce(digest=result.batch.digest, data_wait_s=data_wait_s)
    counted = result.counted_targets
    tokens = train.global_batch * run.config.data.seq_len
    passes = run.loader.samples.passes(run.progress.samples)
    run.log.write(
        "train",
        number,
        loss=None if counted == 0 else sums["loss"].item(),
        regularisation=sums["regularisation"].item(),
        learning_rate=result.learning_rate,
        **muon_rate(run.config.optim, result.learning_rate),
        grad_norm=result.grad_norm,
        **{f"grad_norm_{part}": norm for part, norm in result.grad_norms.items()},
        skipped=run.progress.skipped,
        tokens=run.progress.tokens,
        tokens_per_s=round(tokens / step_s, 1),
        step_s=round(step_s, 5),
        **pace_of(run, step_s),
        data_wait_s=round(sums["data_wait_s"].item(), 5),
        digest=int(sums["digest"].item()) % 2**31,
        **({} if counted is None else {"counted_targets": counted}),
        **({} if passes is None else {"passes": round(passes[0], 4)}),
        **expert_metrics(sums),
        **exchange_metrics(sums, ep=run.mesh.layout.ep, on_host=run.process.device.type == "cpu"),
    )
    run.restart_clock()


def is_logged(run: Run, number: int) -> bool:
    """Returns whether a step will be logged, unless a stop request makes it the last."""
    ends = run.state.first_step, run.config.train.steps
    return number in ends or due(number, run.config.train.log_every)


def pace_of(run: OpenRun, step_s: float) -> dict[str, float]:
    """Returns `left_s`, the time to the run's end, and `mfu`, as far as they are known."""
    config, state, found, step = run.config, run.state, dict[str, float](), run.progress.step
    since = step - state.first_step
    if since == 0:  # it compiles and fills caches
        state.measured_from_s = time.monotonic()
        state.peak_tokens_per_s = peak_tokens_per_s(config, run.process)
    else:
        each_s = (time.monotonic() - state.measured_from_s) / since
        found["left_s"] = round((config.train.steps - step) * each_s, 1)
    if state.peak_tokens_per_s is not None:
        tokens = config.train.global_batch * config.data.seq_len
        found["mfu"] = round(tokens / step_s / state.peak_tokens_per_s, 4)
    return found


def log_spike(run: OpenRun, result: StepResult) -> None:
    """Logs the step if it was a spike."""
    if result.spike is not None:
        spike = asdict(result.spike)
        run.log.write("spike", run.progress.step, first_sample=result.batch.first_sample, **spike)


def move_experts(run: OpenRun, result: StepResult) -> None:
    """Counts the load, and rebalances experts every `mesh.rebalance_every` steps."""
    run.expert_placement.count(result.meter.loads())
    moved = run.expert_placement.decide(run.progress.step)
    if moved is not None:
        run.log.write("expert_placement", run.progress.step, **asdict(moved))


def evaluate_validation(run: OpenRun, result: StepResult) -> None:
    """Evaluates every `train.eval_every` steps and at the end.

    A stopped run does not, unless the loss decides which checkpoint stays.
    """
    run.state.measured.clear()  # which is of the step before
    finished = run.progress.step == run.config.train.steps
    is_wanted = not result.stop or run.config.checkpoint.keep_best == "validation"
    if finished or (is_wanted and due(run.progress.step, run.config.train.eval_every)):
        evaluate_run(run)
        run.restart_clock()


def score_and_sample(run: OpenRun, result: StepResult) -> None:
    """Scores tasks and continues prompts every `evaluate.every` steps and at the end, unless stopped."""
    every, step = run.config.evaluate.every, run.progress.step
    is_last = step == run.config.train.steps
    judges = run.config.checkpoint.keep_best in run.config.evaluate.tasks
    if every and (is_last or (due(step, every) and (judges or not result.stop))):
        assert run.examine is not None, "evaluate.every needs train(…, examine=Examiner())"
        run.model.before_step(step)  # a scheduled router is as the next step would use it
        with run.heartbeat.during(Phase.EVAL):
            run.examine(run)
        run.restart_clock()


def save_checkpoint(run: OpenRun, result: StepResult) -> None:
    """Saves every `checkpoint.every` steps, after the last, and what is to stay for good."""
    step, keys = run.progress.step, run.config.checkpoint
    is_due = due(step, keys.every) or due(step, keys.keep_every)
    if result.is_last or is_due or keys.keep_best in run.state.measured:
        run.model.before_step(step)  # as evaluations do, which must leave no trace
        save(run)


def log_checkpoints(run: OpenRun, _result: StepResult) -> None:
    """Logs the checkpoints completed since the last step."""
    log_saved(run)


def end_trace(run: OpenRun, _result: StepResult) -> None:
    """Writes the step's trace, if `train.profile` asks for one."""
    run.traces.end(run.progress.step)


HOOKS: tuple[Callable[[OpenRun, StepResult], None], ...] = (
    end_trace,
    log_step,
    log_spike,
    move_experts,
    evaluate_validation,
    score_and_sample,
    save_checkpoint,  # after all that measures: a checkpoint holds its scores, and no resume skips one
    log_checkpoints,
)


def evaluate_run(run: OpenRun) -> None:
    """Measures the validation loss and logs it."""
    # Evaluate a scheduled router as the next step would use it.
    run.model.before_step(run.progress.step)
    began_s = time.monotonic()
    with run.heartbeat.during(Phase.EVAL):
        try:
            result = evaluate(run.model, run.config, run.process)
            average = evaluate_average(run)
        except NothingToReadError as error:  # on all ranks
            if run.process.rank == 0:
                logger.warning("step %d has no validation loss: %s", run.progress.step, error)
            return
    if math.isfinite(result.loss):
        run.state.measured["validation"] = result.loss
    run.log.write(
        "eval",
        run.progress.step,
        loss=result.loss,
        perplexity=result.perplexity,
        **average,
        tokens=result.tokens,
        seconds=round(time.monotonic() - began_s, 3),
    )


def evaluate_average(run: OpenRun) -> dict[str, float]:
    """Returns the validation loss of the averaged weights by its name in the log; {} without them."""
    if not run.average.counts:
        return {}
    with run.average.in_use():
        run.model.before_step(run.progress.step)  # some routers bring their weights to a norm
        return {"average_loss": evaluate(run.model, run.config, run.process).loss}


def finish(run: OpenRun, state: str) -> None:
    """Waits for the last checkpoint and its second copy, and records how the run ended."""
    with run.heartbeat.during(Phase.CKPT):
        run.checkpoints.wait()
        run.checkpoints.wait_for_copies(_LAST_COPY_S)
    run.heartbeat.enter(Phase.END)
    log_saved(run)
    run.log.write("end", run.progress.step, state=state)
    run.log.close()
    if run.process.rank == 0:
        # Without this file the supervisor distrusts an exit code of 0.
        text = json.dumps({"state": state, "step": run.progress.step}) + "\n"
        write_atomically(run.run_dir / "result.json", text, durable=False)


def due(step: int, every: int) -> bool:
    """Returns whether a step completes another `every` steps; 0: never."""
    return every > 0 and step % every == 0
