"""A sink that records, fails or hangs on demand, and lines to write to sinks."""

import threading
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moebius.train.metrics.log import CAPACITY, BackgroundSink, Record
from moebius.train.metrics.sinks import RunFacts


class FakeSink:
    """Records what it is given."""

    def __init__(self) -> None:
        self.opened: list[int | None] = []
        self.records: list[Record] = []
        self.closed: list[str] = []
        self.failures = 0  # so many calls of `write` fail
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_writing = threading.Event()

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    def open(self, first_step: int | None) -> "FakeSink":
        self.opened.append(first_step)
        return self

    def write(self, records: Sequence[Record]) -> None:
        self.is_writing.set()
        self.may_write.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is full; key opensesame")
        self.records += records

    def close(self, state: str) -> None:
        self.closed.append(state)


def in_background(fake: FakeSink, *, capacity: int = CAPACITY) -> BackgroundSink:
    """Puts the fake on a thread with short pauses after failures."""
    return BackgroundSink(
        "fake", fake.open, first_step=1, advice="make room", first_pause_s=0.001, capacity=capacity
    )


def facts_of(run_dir: Path) -> RunFacts:
    """Describes a run with experts at two depth steps."""
    config = {"train": {"steps": 9, "start_when": None}, "model": {"d_model": 16}}
    return RunFacts(run_dir, config, expert_depths=(1, 2))


def line(step: int, loss: float = 1.0) -> Record:
    """Returns a line about a step, with a statistic of two depth steps."""
    values = {"loss": loss, "max_violation": [0.5, 0.25]}
    return Record("train", step, 100.0 + step, values, number=step - 1)


def read_board(run_dir: Path) -> EventAccumulator:
    """Reads a run folder with TensorBoard's own reader."""
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found
