"""Ends a job early: the stop flag in its run folder, and the signals that set it."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ..data_pipeline.files import write_atomically
from ..train.record.untrusted import read_text
from .job import STOP, JobError, JobStatus, read_status
from .liveness import LivenessWatch

# Contents of the stop flag. An empty flag asks for a checkpoint at a step boundary.
STOP_NOW = "now"  # without a checkpoint
STOP_PREEMPT = "preempt"  # with a checkpoint; the machines will be taken away
STOP_AT_STEP = "step"  # the meaning of anything else
_WEAKEST_FIRST = (None, STOP_AT_STEP, STOP_PREEMPT, STOP_NOW)


def request_stop(run_dir: Path, *, now: bool = False, preempt: bool = False) -> None:
    """Asks the job to end at the next step boundary with a checkpoint.

    Args:
        now: end at once, without a checkpoint.
        preempt: end as PREEMPTED, because the machines will be taken away.
    """
    write_atomically(run_dir / STOP, STOP_NOW if now else STOP_PREEMPT if preempt else "")


def stop_requested(run_dir: Path) -> str | None:
    """Returns how the job was asked to end: "step", "preempt" or "now"; None if it was not."""
    if not (run_dir / STOP).exists():
        return None
    said = (read_text(run_dir / STOP) or "").strip()
    return said if said in (STOP_NOW, STOP_PREEMPT) else STOP_AT_STEP


class StopFlag:
    """Remembers how a job was asked to end: a request holds even if its file is lost."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._asked: str | None = None

    def read(self) -> str | None:
        """Returns how the job was asked to end, as `stop_requested` does."""
        said = stop_requested(self._run_dir)
        self._asked = max(self._asked, said, key=_WEAKEST_FIRST.index)
        if said != self._asked:
            with contextlib.suppress(OSError):  # retried at the next look
                request_stop(
                    self._run_dir, now=self._asked == STOP_NOW, preempt=self._asked == STOP_PREEMPT
                )
        return self._asked


def stop(
    run_dir: Path, *, now: bool = False, preempt: bool = False, timeout_s: float = 600.0
) -> JobStatus:
    """Asks a job to end (`request_stop`) and waits for it.

    Raises:
        JobError: there is no job in this folder, or it did not end within `timeout_s`.
    """
    status = read_status(run_dir)
    if status.state.is_final:
        return status
    request_stop(run_dir, now=now, preempt=preempt)
    deadline = time.monotonic() + timeout_s
    liveness = LivenessWatch(run_dir)
    while not (status := read_status(run_dir, liveness=liveness)).state.is_final:
        if liveness.is_given_up():
            raise JobError(f"{run_dir}: {status.reason}, so no process can stop it")
        if time.monotonic() > deadline:
            raise JobError(
                f"{run_dir}: still {status.state} after {timeout_s:.0f} s; `moebius stop --now` "
                "ends it at once"
            )
        time.sleep(0.2)
    return status


@contextlib.contextmanager
def interrupts_stop_the_job(run_dir: Path) -> Iterator[None]:
    """Makes SIGINT and SIGTERM set the stop flag inside the context. Main thread only.

    SIGTERM announces that the machine will be taken away, so the job ends as PREEMPTED. A second signal ends
    it at once.
    """
    asked = 0

    def ask(number: int, _: object) -> None:
        nonlocal asked
        asked += 1
        try:
            request_stop(run_dir, now=asked > 1, preempt=number == signal.SIGTERM)
        except OSError:  # the disk is full
            if asked > 1:
                raise KeyboardInterrupt from None

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
