"""Ending a job early: the flag in its run folder, who sets it, and the signals that do."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .job import STOP, JobError, JobStatus, read_status, write_atomically
from .liveness import LivenessWatch

# Contents of the stop flag. An empty flag asks for an end at a step boundary with a checkpoint.
STOP_NOW = "now"  # without a checkpoint
STOP_PREEMPT = "preempt"  # the same end, because the machines are taken away


def request_stop(run_dir: Path, *, now: bool = False, preempt: bool = False) -> None:
    """Asks the job to end: at the next step boundary with a checkpoint, or `now` without one.

    Args:
        preempt: end at the step boundary as PREEMPTED, because the machines are taken away.
    """
    write_atomically(run_dir / STOP, STOP_NOW if now else STOP_PREEMPT if preempt else "")


def stop_requested(run_dir: Path) -> str | None:
    """Returns how the job was asked to end: "step", "preempt" or "now"; None if it was not."""
    try:
        said = (run_dir / STOP).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return said if said in (STOP_NOW, STOP_PREEMPT) else "step"


def stop(
    run_dir: Path, *, now: bool = False, preempt: bool = False, timeout_s: float = 600.0
) -> JobStatus:
    """Asks a job to end (`request_stop`) and waits until it has.

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


@contextmanager
def interrupts_stop_the_job(run_dir: Path) -> Iterator[None]:
    """Lets SIGINT and SIGTERM set the stop flag while inside. Main thread only.

    Machines announce with SIGTERM that they will be taken away: the job ends as PREEMPTED. A second
    signal asks for an end at once.
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
