"""Why a step leaves the weights as they are, and when a run that only skips ends.

All ranks decide alike, for they are given the same numbers.
"""

import logging
import math
from collections.abc import Sequence

from ..run import Run
from .detector import Spike

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
        run: the run, whose step has not been counted yet.
        grad_norm: the norm of the whole gradient.
        counted_targets: targets that count in the loss, over all ranks; None: every one does.
        loss: the step's loss over all ranks; empty where `train.spikes` is off.

    Returns:
        Why the update must be skipped, None if it must not; and the spike, if it is one.
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
    """Counts the updates that were skipped in a row, and ends a run that only skips.

    Args:
        run: the run, whose step has been counted.
        why: what `why_skipped` said of the step.

    Raises:
        ValueError: so many updates were skipped in a row that the run will not recover.
    """
    run.skipped_in_a_row = 0 if why is None else run.skipped_in_a_row + 1
    if why == NO_TARGET and run.process.rank == 0:
        logger.warning("step %d had %s, and its update was skipped", run.progress.step, why)
    if why is not None and run.skipped_in_a_row == _MOST_SKIPS:
        raise ValueError(
            f"{_MOST_SKIPS} steps in a row up to step {run.progress.step} were skipped, the last "
            f"for {why}: {_ADVICE[why]}, and continue from a checkpoint"
        )
