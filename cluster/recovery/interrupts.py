"""Ctrl-C and SIGTERM of a command that watches a job: they ask the job for a stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..job import request_stop


@contextmanager
def interrupts_ask_for_a_stop(run_dir: Path) -> Iterator[None]:
    """Lets SIGINT and SIGTERM set the stop flag while inside.

    SIGTERM is how machines say that they will be taken away: the job ends as PREEMPTED. The second
    signal asks for an end at once. Main thread only.
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
