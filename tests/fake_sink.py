"""A sink that remembers, fails or hangs, as a test wants it."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moebius.train.config.metrics_config import MetricsConfig
from moebius.train.metrics.background import CAPACITY, BackgroundSink
from moebius.train.metrics.records import Record, RunFacts


class FakeSink:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.opened: list[int | None] = []
        self.steps: list[int] = []
        self.records: list[Record] = []
        self.closed: list[str] = []
        self.failures = 0  # so many calls of `write` fail
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_writing = threading.Event()

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
        self.steps += [record.step for record in records]

    def go_back_to(self, step: int) -> None:
        self.steps.append(-step)

    def close(self, state: str) -> None:
        self.closed.append(state)


def in_background(fake: FakeSink, *, capacity: int = CAPACITY) -> BackgroundSink:
    """The fake on a thread, which waits next to nothing after a failure."""
    return BackgroundSink(
        "fake", fake.open, first_step=1, advice="make room", first_pause_s=0.001, capacity=capacity
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns as soon as it is so; fails after two minutes."""
    end_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def line(step: int) -> Record:
    return Record("train", step, 0.0, {"loss": 1.0, "expert_load": [[1.0]]})


def facts_of(run_dir: Path, **settings: Any) -> RunFacts:
    """A run with experts at two depth steps."""
    metrics = MetricsConfig.model_validate({"heat_map_every": 2, "depths_every": 3} | settings)
    config = {"train": {"steps": 9, "start_when": None}, "model": {"d_model": 16}}
    return RunFacts(run_dir, metrics, config, expert_depths=(1, 2))


def line_of_loads(step: int, loss: float = 1.0, number: int | None = None) -> Record:
    """A line about a step, with the load of two experts."""
    values = {
        "loss": loss,
        "max_violation": [0.5, 0.25],
        "expert_load": [[0.75, 0.25], [0.25, 0.75]],
    }
    return Record("train", step, 100.0 + step, values, step - 1 if number is None else number)


def read_board(run_dir: Path) -> EventAccumulator:
    """What TensorBoard's own reader finds in a run folder."""
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"images": 0})
    found.Reload()
    return found
