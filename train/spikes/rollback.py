"""Going back past spikes: the weights of an earlier checkpoint, the data from here on.

    choose a checkpoint from before the spikes → load it → set aside the later ones → write down
    what is left out → the loader goes on behind it

The step, the learning rate and all that is counted are the checkpoint's; only the position in the
data is not: the samples that were read since are left out, those before the spikes as well (PaLM,
arXiv 2204.02311, section 5.1, did so by hand: about 100 steps back, 200 to 500 batches left out, for
the same batches made no spike elsewhere). The run ends at the same step and reads so much more data.

All ranks stay as they are and act together, so it costs what loading costs. Whenever the run ends in
between, resuming repeats the decision or finds it done: later checkpoints are set aside newest
first, and only then the rollback is written down (record.py), which makes it count.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..metrics.run_lines import log_set_aside
from ..rank_data import reopen_data
from ..record.heartbeat import Phase
from ..run import Run, load_state, why_not_from
from .detector import SpikeDetector
from .record import Rollback, write_rollbacks

logger = logging.getLogger(__name__)

MOST_ROLLBACKS = 10  # of a run; then another one ends it


def roll_back(run: Run) -> None:
    """Returns the run to a checkpoint from before its last spikes; a collective call.

    Without such a checkpoint the run stays where it is.

    Raises:
        ValueError: the run has gone back as often as it may.
        CheckpointError: the checkpoints cannot be read, or not be set aside.
    """
    spikes = run.spikes
    assert spikes is not None, "who goes back has looked for spikes"
    why = _why(spikes)
    _check_allowed(run, why)
    with run.heartbeat.during(Phase.CKPT):
        position = _go_back(run, spikes, why)
    spikes.forget_spikes()
    run.skipped_in_a_row = 0
    if position is not None:
        reopen_data(run, position)


def _why(spikes: SpikeDetector) -> str:
    """Spells why the run is to go back."""
    steps = spikes.recent
    return (
        f"{len(steps)} spikes within {spikes.config.rollback_within} steps, the first at step "
        f"{steps[0]} and the last at step {steps[-1]}"
    )


def _check_allowed(run: Run, why: str) -> None:
    """Ends a run that goes back again and again."""
    if len(run.rollbacks) >= MOST_ROLLBACKS:
        raise ValueError(
            f"{why}, and the run has already rolled back {len(run.rollbacks)} times: lower "
            "optim.learning_rate or optim.clip_norm, or look at the samples since then "
            "(`moebius data peek`), and continue from the checkpoint"
        )


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
    _tell(run, abandoned)
    return meta["data"]


def _tell(run: Run, abandoned: Sequence[str]) -> None:
    """Writes to the log what the run has gone back from."""
    rollback = run.rollbacks[-1]
    log_set_aside(run)
    run.log.write(
        "rollback",
        rollback.from_step,
        **rollback.model_dump(exclude={"from_step"}),
        number=len(run.rollbacks),
        most=MOST_ROLLBACKS,
        abandoned=list(abandoned),
    )
