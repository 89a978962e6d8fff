"""The reaction to a bad step: skip the update, or roll back to a checkpoint.

All ranks get the same numbers and decide alike. A run that only skips steps ends.

A rollback combines the weights of an earlier checkpoint with the data from here on:

    choose a checkpoint from before the spikes → load it → set aside the later ones → write down
    which samples are skipped → the loader continues after them

The step, the learning rate and all counts are the checkpoint's; only the position in the data is
not. All samples read since then are skipped, including those before the spikes (PaLM, arXiv
2204.02311, section 5.1: about 100 steps back and 200 to 500 batches skipped, by hand; the same
batches made no spike elsewhere). The run ends at the same step and reads that much more data.

No process restarts, so a rollback costs one load. If the run dies in between, resuming repeats the
decision or finds it done: later checkpoints are set aside newest first, and only then does writing
the rollback (history.py) make it count.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..metrics.run_lines import log_set_aside
from ..rank_data import reopen_data
from ..record.heartbeat import Phase
from ..run import Run, load_state, why_not_from
from .history import Rollback, Spike, SpikeDetector, write_rollbacks

logger = logging.getLogger(__name__)

_MOST_SKIPS = 100  # in a row
NOT_FINITE = "gradients that are not finite"
NO_TARGET = "no target that counts in the loss"
SPIKE = "a spike of the loss or the gradient norm"
_ADVICE = {
    NOT_FINITE: "lower optim.learning_rate or optim.clip_norm, or train in float32",
    NO_TARGET: "check the data's loss mask (prompts without answers?)",
    SPIKE: "check in metrics.jsonl whether train.spikes is too strict",
}


def why_skipped(
    run: Run, grad_norm: float, counted_targets: int | None, loss: Sequence[float]
) -> tuple[str | None, Spike | None]:
    """Judges a step before its update.

    Args:
        run: the run, before counting the step.
        grad_norm: the norm of the whole gradient.
        counted_targets: targets in the loss over all ranks; None: all.
        loss: the step's loss over all ranks; empty if `train.spikes` is off.

    Returns:
        Why the update must be skipped, or None; and the spike, if it is one.
    """
    if counted_targets == 0 and math.isfinite(grad_norm):
        return NO_TARGET, None
    spike = None
    if run.spikes is not None:
        spike = run.spikes.judge(run.progress.step + 1, loss[0], grad_norm)
    if not math.isfinite(grad_norm):
        return NOT_FINITE, spike
    return (SPIKE if spike else None), spike


def count_skipped(run: Run, why: str | None) -> None:
    """Counts consecutive skipped updates, and ends a run that only skips.

    Args:
        run: the run, after counting the step.
        why: the reason from `why_skipped`.

    Raises:
        ValueError: too many consecutive updates were skipped for the run to recover.
    """
    run.skipped_in_a_row = 0 if why is None else run.skipped_in_a_row + 1
    if why == NO_TARGET and run.process.rank == 0:
        logger.warning("step %d had %s, and its update was skipped", run.progress.step, why)
    if why is not None and run.skipped_in_a_row == _MOST_SKIPS:
        raise ValueError(
            f"{_MOST_SKIPS} steps in a row up to step {run.progress.step} were skipped, the last "
            f"for {why}: {_ADVICE[why]}, and continue from a checkpoint"
        )


MOST_ROLLBACKS = 10  # of a run; the next one ends it


def roll_back_if_due(run: Run) -> None:
    """Rolls back after too many spikes, including those saved in a checkpoint; collective."""
    if run.spikes is not None and run.spikes.rollback_is_due:
        roll_back(run)


def roll_back(run: Run) -> None:
    """Returns the run to a checkpoint from before its last spikes; a collective call.

    Without such a checkpoint the run continues.

    Raises:
        ValueError: the run has used up its rollbacks.
        CheckpointError: the checkpoints cannot be read or set aside.
    """
    spikes = run.spikes
    assert spikes is not None, "only a run that detects spikes rolls back"
    steps = spikes.recent
    why = (
        f"{len(steps)} spikes within {spikes.config.rollback_within} steps, the first at step "
        f"{steps[0]} and the last at step {steps[-1]}"
    )
    if len(run.rollbacks) >= MOST_ROLLBACKS:
        raise ValueError(
            f"{why}, and the run has already rolled back {len(run.rollbacks)} times: lower "
            "optim.learning_rate or optim.clip_norm, or inspect the samples since then "
            "(`moebius data peek`), and continue from the checkpoint"
        )
    with run.heartbeat.during(Phase.CKPT):
        position = _go_back(run, spikes, why)
    spikes.forget_spikes()
    run.skipped_in_a_row = 0
    if position is not None:
        reopen_data(run, position)


def _go_back(run: Run, spikes: SpikeDetector, why: str) -> dict[str, Any] | None:
    before = run.progress
    at_most = spikes.recent[0] - spikes.config.rollback_steps
    found = run.checkpoints.newest_whole(at_most=at_most, why_not=partial(why_not_from, run))
    if found is None:
        logger.warning("%s; there is no whole checkpoint of step %d or before", why, at_most)
        run.log.write("rollback_impossible", before.step, why=why, at_most=at_most)
        return None
    meta = load_state(run, found)
    rollback = Rollback(
        from_step=before.step,
        to_step=run.progress.step,
        first_sample=run.progress.samples,
        end_sample=before.samples,
        why=why,
    )
    run.set_aside = run.checkpoints.adopt(found)
    abandoned = run.checkpoints.abandon_after(rollback.to_step)
    run.rollbacks = (*run.rollbacks, rollback)
    run.checkpoints.on_rank_0(lambda: write_rollbacks(run.run_dir, run.rollbacks))
    log_set_aside(run)
    run.log.write(
        "rollback",
        rollback.from_step,
        **rollback.model_dump(exclude={"from_step"}),
        number=len(run.rollbacks),
        most=MOST_ROLLBACKS,
        abandoned=list(abandoned),
    )
    return meta["data"]
