"""Waiting for data together, so that no rank waits in a collective for one that has none.

A collective ends a run after `train.timeout_s`, and that is right where a rank hangs. A slow store,
or an era that is not sealed yet, is no hang: it may take an hour. So before a step for which some
rank has no batch all ranks wait here, in short rounds of their own. Whether one has none they know
from the step before, whose gradient norm carries a flag about it: while data comes in time nothing
is exchanged.
"""

import time

import torch
import torch.distributed as dist

from ..data_pipeline.read.loader import Loader
from .metrics.log import MetricsLog
from .run import Run

_ROUND_S = 5.0  # much shorter than the time-out of a collective
_SAY_AFTER_S = 10.0  # then after twice as long, and so on


def wait_for_data(run: Run, loader: Loader, log: MetricsLog) -> None:
    """Returns once every rank has the next batch, or its error; a collective call.

    Ranks that lack it say what they wait for; rank 0 writes to the metrics how many do.
    """
    began = time.monotonic()
    say_after_s = _SAY_AFTER_S
    while num_waiting := _count_waiting(run, loader):
        seconds = time.monotonic() - began
        if seconds >= say_after_s:
            say_after_s *= 2
            log.write(
                "data_wait",
                run.progress.step,
                seconds=round(seconds, 1),
                ranks=num_waiting,
                reason=loader.wait_reason or None,
            )


def _count_waiting(run: Run, loader: Loader) -> int:
    """Waits a round for this rank's batch, and returns how many ranks still lack theirs."""
    ready = loader.wait_until_ready(min(_ROUND_S, run.process.timeout_s / 4))
    waiting = torch.tensor(int(not ready), device=run.process.device)
    dist.all_reduce(waiting)
    return int(waiting.item())
