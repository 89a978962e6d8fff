"""The data of one rank: its loader, and waiting for data together.

A rank that lacks data must not wait in a collective, which aborts the run after `train.timeout_s`:
a slow store or an unsealed segment may take an hour. So before a step for which some rank has no
batch, all ranks wait here in short rounds. They learn it from a flag that the previous step's
gradient norm carried; while data arrives in time, nothing is exchanged.
"""

import logging
import time
from typing import Any

import torch
import torch.distributed as dist

from ..data_pipeline.errors import DataError, PreparationFailedError
from ..data_pipeline.read.given import digest_of, given_rows
from ..data_pipeline.read.loader import Batch, Loader
from ..data_pipeline.tokenizers.tokenizer import check_meaning
from .metrics.run_lines import log_saved
from .record.heartbeat import Phase
from .run import OpenRun, Run, save

logger = logging.getLogger(__name__)

_ROUND_S = 5.0  # of waiting together; much shorter than a collective's time-out
_SAY_AFTER_S = 10.0  # doubles each time


def open_loader(run: Run, position: dict[str, Any] | None) -> Loader:
    """Opens the data at the run's position, which is a seek on any number of ranks.

    Args:
        run: the run.
        position: the data's position in the checkpoint that the run resumes from.
    """
    config = run.config
    if config.data.dataset:
        _agree_on_rows(run)
    loader = Loader(
        config.data,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        rank=run.process.rank,
        num_ranks=run.process.world_size,
        start_sample=run.progress.samples,
        continues=None if config.data.override_position else position,
    )
    try:
        _check_data(run, loader, position)
    except BaseException:
        loader.close()
        raise
    return loader


def _agree_on_rows(run: Run) -> None:
    """Compares the rows that all ranks get, and those that `fit` was given; a collective call.

    Raises:
        ValueError: they differ, or cannot be read; on all ranks.
    """
    given = run.config.data.dataset
    try:
        found = digest_of(given_rows(run.config.data))
    except DataError as error:
        found = str(error)
    run.process.agree("dataset", {"its rows": found})
    if found != given:
        raise DataError(
            f"the ranks read other rows ({found}) than fit was given ({given}): an item must depend on "
            "its index alone"
        )


def _check_data(run: Run, loader: Loader, position: dict[str, Any] | None) -> None:
    """Logs how the data differs from the checkpoint's; checks its tokenizer and that it lasts."""
    config = run.config
    if position is not None and not config.data.dataset:
        check_meaning(config.data.directory, position)
    if position is not None and config.data.override_position and run.process.rank == 0:
        for difference in loader.samples.differences(position):
            logger.warning("data.override_position: continuing on other data: %s", difference)
    loader.samples.check_enough(config.train.steps * config.train.global_batch)


# Batches ----------------------------------------------------------------------------------------


def next_batch(run: OpenRun) -> Batch:
    """Returns this rank's next batch, once every rank has one; a collective call.

    Raises:
        PreparationFailedError: the concurrent preparation failed; on all ranks, after saving the
            run.
    """
    run.heartbeat.enter(Phase.DATA_WAIT)
    run.traces.begin(run.progress.step + 1)
    if run.state.data_is_late:
        _wait_together(run)
    try:
        return next(run.loader)
    except PreparationFailedError:
        if run.progress.step >= run.state.first_step and run.progress.step != run.state.saved_step:
            save(run)
        run.checkpoints.wait()
        log_saved(run)
        raise


def _wait_together(run: OpenRun) -> None:
    """Waits until every rank has the next batch or its error; logs how many ranks lack one."""
    began = time.monotonic()
    say_after_s = _SAY_AFTER_S
    while num_waiting := _count_waiting(run):
        seconds = time.monotonic() - began
        if seconds >= say_after_s:
            say_after_s *= 2
            run.log.write(
                "data_wait",
                run.progress.step,
                seconds=round(seconds, 1),
                ranks=num_waiting,
                reason=run.loader.wait_reason or None,
            )


def _count_waiting(run: OpenRun) -> int:
    """Waits one round for this rank's batch, and returns how many ranks still lack theirs."""
    ready = run.loader.wait_until_ready(min(_ROUND_S, run.process.timeout_s / 4))
    waiting = torch.tensor(int(not ready), device=run.process.device)
    dist.all_reduce(waiting)
    return int(waiting.item())
