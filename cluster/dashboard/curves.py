"""What the page shows of a run, read on while the run goes on, from its run folder alone.

A curve of any length is drawn with at most `MAX_POINTS` points: of each stretch of steps the lowest
and the highest stay, so that a spike of the loss is seen from however far away.
"""

import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..job import JOURNAL, METRICS, JournalEntry, State, parse_entries
from ..report.history import History, describe_trouble
from ..report.json_lines import JsonLinesTail
from ..report.run_list import find_runs

MAX_POINTS = 1500
_MAX_SKIPPED = 1000  # steps that are remembered as left out

Axis = Literal["step", "tokens", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)
EventKind = Literal["state", "checkpoint", "trouble", "skipped"]


@dataclass(frozen=True)
class Event:
    """Records what happened to a run beside its steps."""

    kind: EventKind
    time: float  # seconds since the epoch
    step: int | None
    words: str
    interrupts: bool = False  # steps were lost


class Curves(History):
    """Holds the curves of a run, and of each step where it lies in tokens and in time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.hottest_expert: dict[int, float] = {}
        """Of the fullest expert of any depth step, how many times the mean it holds."""
        self.hottest_rank: dict[int, float] = {}
        """Of the rank with most rows in any exchange, how many times the mean it holds."""
        self.events: list[Event] = []
        self._num_skipped = 0
        self._made: list[tuple[float, int]] = []  # time and step, in the order of the file

    def _add_train(self, line: Mapping[str, Any]) -> None:
        super()._add_train(line)
        step = line["step"]
        self.tokens[step] = line.get("tokens", 0)
        self.times[step] = line.get("time", 0.0)
        self._made.append((self.times[step], step))
        if violations := line.get("max_violation"):
            self.hottest_expert[step] = 1 + max(violations)
        factors = [one.get("hottest_rank") for one in line.get("exchange", {}).values()]
        if known := [factor for factor in factors if factor is not None]:
            self.hottest_rank[step] = max(known)
        skipped = line.get("skipped", 0)
        if skipped > self._num_skipped and len(self.events) < _MAX_SKIPPED:
            self._tell("skipped", line, "the update was left out: a gradient was not finite")
        self._num_skipped = skipped

    def _add_checkpoint(self, line: Mapping[str, Any]) -> None:
        super()._add_checkpoint(line)
        if not line.get("error"):
            self._tell("checkpoint", line, "checkpoint")

    def step_at(self, time: float) -> int | None:
        """Returns the last step that had been made at a time; None: none had."""
        before = bisect_right(self._made, (time, math.inf))
        return self._made[before - 1][1] if before else None

    def add_troubles(self, line: Mapping[str, Any]) -> None:
        """Takes in what a line says of checkpoints that failed and of spikes of the loss."""
        if (words := describe_trouble(line)) is not None:
            self._tell("trouble", line, words, interrupts=line.get("kind") == "rollback")

    def _tell(
        self, kind: EventKind, line: Mapping[str, Any], words: str, *, interrupts: bool = False
    ) -> None:
        time, step = line.get("time", 0.0), line.get("step")
        self.events.append(Event(kind, time, step, words, interrupts))


class FollowedRun:
    """Follows a run folder; each `refresh` reads what is new. May be shared by threads."""

    def __init__(self, run_dir: Path, name: str):
        self.run_dir, self.name = run_dir, name
        self.curves = Curves()
        self.state: State | None = None
        self._metrics = JsonLinesTail(run_dir / METRICS)
        self._journal = JsonLinesTail(run_dir / JOURNAL)
        self._lock = threading.Lock()

    def refresh(self) -> Curves:
        """Reads on, and returns the curves."""
        with self._lock:
            for line in self._metrics.stream():
                self.curves.add([line])
                self.curves.add_troubles(line)
            for entry in parse_entries(self._journal.stream()):
                self._add_entry(entry)
        return self.curves

    def _add_entry(self, entry: JournalEntry) -> None:
        if entry.state is not self.state or entry.state is State.RECOVERING:
            step = entry.details.get("step", self.curves.step_at(entry.time))
            words = f"{entry.state.value}: {entry.reason}" if entry.reason else entry.state.value
            recovers = entry.state is State.RECOVERING
            self.curves.events.append(Event("state", entry.time, step, words, recovers))
        self.state = entry.state


class Runs:
    """Holds the runs below a folder, those too that come while the page is looked at."""

    def __init__(self, root: Path):
        self.root = root
        self._followed: dict[str, FollowedRun] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Returns the names of all runs there are now, newest first."""
        with self._lock:
            for run_dir in find_runs(self.root):
                name = self._name_of(run_dir)
                if name not in self._followed:
                    self._followed[name] = FollowedRun(run_dir, name)
            return sorted(self._followed, key=self._begun, reverse=True)

    def get(self, name: str) -> FollowedRun | None:
        """Returns a run by its name; None: there is none."""
        return self._followed.get(name)

    def chosen(self, names: Sequence[str]) -> list[FollowedRun]:
        """Returns those of the named runs that there are, read on to their ends."""
        runs = [run for name in names if (run := self.get(name)) is not None]
        for run in runs:
            run.refresh()
        return runs

    def _name_of(self, run_dir: Path) -> str:
        return (
            run_dir.absolute().name if run_dir == self.root else str(run_dir.relative_to(self.root))
        )

    def _begun(self, name: str) -> float:
        try:
            return (self._followed[name].run_dir / JOURNAL).stat().st_mtime
        except OSError:
            return 0.0


def points(
    curves: Curves, values: Mapping[int, float], axis: Axis
) -> tuple[list[float], list[float]]:
    """Returns a curve's places on an axis and its values, thinned out to what a screen can show.

    Args:
        curves: of the run.
        values: by step.
        axis: what the places are: steps, tokens, or hours since the run's first step.
    """
    steps = list(_thinned(sorted(values), values))
    return [place(curves, step, axis) for step in steps], [values[step] for step in steps]


def place(curves: Curves, step: int, axis: Axis) -> float:
    """Returns where a step lies on an axis; a step that has no line of its own, at the next before."""
    if axis == "step":
        return step
    known: Mapping[int, float] = curves.tokens if axis == "tokens" else curves.times
    if step not in known:
        step = max((one for one in known if one < step), default=min(known, default=step))
    value = known.get(step, 0)
    return value if axis == "tokens" else (value - min(curves.times.values(), default=value)) / 3600


def _thinned(steps: Sequence[int], values: Mapping[int, float]) -> Iterator[int]:
    """Yields the steps of the lowest and the highest value of each stretch."""
    if len(steps) <= MAX_POINTS:
        yield from steps
        return
    stretches = MAX_POINTS // 2
    for number in range(stretches):
        here = steps[number * len(steps) // stretches : (number + 1) * len(steps) // stretches]
        yield from sorted({min(here, key=values.__getitem__), max(here, key=values.__getitem__)})


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Returns the exponential moving average, unbiased from the first value on.

    `weight` is that of what came before, 0 to below 1; values that are not finite are passed over.
    """
    total = norm = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        found.append(total / norm if norm else value)
    return found
