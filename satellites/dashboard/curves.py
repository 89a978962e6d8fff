"""Holds the curves of runs that the page shows, and follows runs that are still going on.

A curve is drawn with at most `MAX_POINTS` points. Thinning keeps the lowest and highest value of
each stretch of steps, so a loss spike is visible at any scale. Expert loads are kept for at most
`MAX_LOADS` steps; beyond that every other step is dropped.
"""

import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import moebius

MAX_POINTS = 1500
MAX_LOADS = 400
_MAX_SKIPPED = 1000  # skipped steps to remember

Axis = Literal["step", "tokens", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """Records an event in a run, other than a step."""

    time: float  # seconds since the epoch
    step: int | None
    words: str
    interrupts: bool = False  # steps were lost


class Curves:
    """Holds a run's curves by step, and each step's tokens and time."""

    def __init__(self) -> None:
        self.loss: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        self.average: dict[int, float] = {}
        """Validation loss of the averaged weights."""
        self.scores: dict[str, dict[int, float]] = {}
        """Accuracy by task and step."""
        self.samples: dict[str, tuple[int, str]] = {}
        """Step and text of each prompt's newest continuation."""
        self.tokens_per_s: dict[int, float] = {}
        self.learning_rate: dict[int, float] = {}
        self.grad_norm: dict[int, float] = {}
        """Before clipping."""
        self.tokens: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.hottest_expert: dict[int, float] = {}
        """Load of the fullest expert of any depth step, relative to the mean."""
        self.hottest_rank: dict[int, float] = {}
        """Rows of the busiest rank in any exchange, relative to the mean."""
        self.loads: dict[int, list[list[float]]] = {}
        """Share of routes per expert, by depth step."""
        self.depths: tuple[int, ...] = ()
        """Depth steps with experts, counted from 1; empty: all."""
        self.events: list[Event] = []
        self.step: int | None = None
        self.newest: Record = {}
        """The newest record of a step."""
        self._stride = 1
        self._num_skipped = 0
        self._order: list[tuple[float, int]] = []  # time and step, in the order of the file

    def add(self, record: Record) -> None:
        """Adds one record of the metrics."""
        match record.get("kind"):
            case "start":
                self.depths = tuple(record.get("expert_depths", ()))
            case "train":
                self._add_train(record)
            case "eval":
                self.validation[record["step"]] = record["loss"]
                if "average_loss" in record:
                    self.average[record["step"]] = record["average_loss"]
            case "scores":
                self._add_scores(record)
            case "samples":
                self.samples[record["prompt"]] = record["step"], record["text"]
            case "checkpoint" if not record.get("error"):
                self._tell(record, "checkpoint")

    def _add_train(self, record: Record) -> None:
        self.step, self.newest = record["step"], record
        step = record["step"]
        loss = record["loss"]
        self.loss[step] = math.nan if loss is None else loss  # no target counted
        self.tokens_per_s[step] = record.get("tokens_per_s", 0.0)
        for name in ("learning_rate", "grad_norm"):
            if name in record:
                getattr(self, name)[step] = float(record[name])
        self.tokens[step] = record.get("tokens", 0)
        self.times[step] = record.get("time", 0.0)
        self._order.append((self.times[step], step))
        if violations := record.get("max_violation"):
            self.hottest_expert[step] = 1 + max(violations)
        factors = [each.get("hottest_rank") for each in record.get("exchange", {}).values()]
        if known := [factor for factor in factors if factor is not None]:
            self.hottest_rank[step] = max(known)
        skipped = record.get("skipped", 0)
        if skipped > self._num_skipped and len(self.events) < _MAX_SKIPPED:
            self._tell(record, "the update was skipped: a gradient was not finite")
        self._num_skipped = skipped
        self._add_loads(step, record.get("expert_load"))

    def _add_scores(self, record: Record) -> None:
        for task, value in record.items():
            if isinstance(value, float) and task not in ("time", "seconds"):
                self.scores.setdefault(task, {})[record["step"]] = value

    def _add_loads(self, step: int, loads: list[list[float]] | None) -> None:
        if not loads or step % self._stride:
            return
        self.loads[step] = loads
        if len(self.loads) > MAX_LOADS:
            self._stride *= 2
            self.loads = {
                kept: load for kept, load in self.loads.items() if not kept % self._stride
            }

    def step_at(self, time: float) -> int | None:
        """Returns the last step completed at a time, or None."""
        before = bisect_right(self._order, (time, math.inf))
        return self._order[before - 1][1] if before else None

    def _tell(self, record: Record, words: str) -> None:
        self.events.append(Event(record["time"], record["step"], words))


class FollowedRun:
    """Follows one run; each `refresh` reads what is new. Threads can share it."""

    def __init__(self, run_dir: Path, name: str):
        self.name = name
        self.curves = Curves()
        self.state: str | None = None
        self._history = moebius.history(run_dir)
        self._lock = threading.Lock()

    def refresh(self) -> Curves:
        """Reads new records and returns the curves."""
        with self._lock:
            for record in self._history.new_records():
                self.curves.add(record)
            for entry in self._history.new_states():
                self._add_state(entry)
        return self.curves

    def _add_state(self, entry: Record) -> None:
        state, reason = entry["state"], entry["reason"]
        words = reason if state == self.state and reason else f"{state}: {reason}".rstrip(": ")
        step = entry["details"].get("step", self.curves.step_at(entry["time"]))
        self.curves.events.append(Event(entry["time"], step, words, state == "RECOVERING"))
        self.state = state


class Runs:
    """Holds the runs below a folder, including those started while the page is open."""

    def __init__(self, root: Path):
        self.root = root
        self._followed: dict[str, FollowedRun] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Returns the names of all runs, most recently active first."""
        with self._lock:
            found = {self._name_of(run_dir): run_dir for run_dir in moebius.find_runs(self.root)}
            for name in found.keys() - self._followed.keys():
                self._followed[name] = FollowedRun(found[name], name)
            return list(found)

    def _name_of(self, run_dir: Path) -> str:
        is_below = self.root in run_dir.parents  # a run, or RUN@STEP, has none below it
        return str(run_dir.relative_to(self.root)) if is_below else run_dir.absolute().name

    def chosen(self, names: Sequence[str]) -> list[FollowedRun]:
        """Returns the named runs that exist, read to the end."""
        runs = [self._followed[name] for name in names if name in self._followed]
        for run in runs:
            run.refresh()
        return runs


def points(
    curves: Curves, values: Mapping[int, float], axis: Axis
) -> tuple[list[float], list[float]]:
    """Returns a curve's positions on an axis and its values, thinned to what a screen can show.

    Args:
        curves: of the run.
        values: the curve, by step.
        axis: steps, tokens, or hours since the run's first step.
    """
    steps = list(_thinned(sorted(values), values))
    return [place(curves, step, axis) for step in steps], [values[step] for step in steps]


def place(curves: Curves, step: int, axis: Axis) -> float:
    """Returns a step's position on an axis; a step without a record takes the previous one's."""
    if axis == "step":
        return step
    known: Mapping[int, float] = curves.tokens if axis == "tokens" else curves.times
    if step not in known:
        step = max((one for one in known if one < step), default=min(known, default=step))
    value = known.get(step, 0)
    if axis == "tokens":
        return value
    return (value - min(curves.times.values(), default=value)) / 3600


def _thinned(steps: Sequence[int], values: Mapping[int, float]) -> Iterator[int]:
    """Yields the steps with the lowest and highest value of each stretch."""
    if len(steps) <= MAX_POINTS:
        yield from steps
        return
    stretches = MAX_POINTS // 2
    for number in range(stretches):
        first, end = (len(steps) * edge // stretches for edge in (number, number + 1))
        stretch = steps[first:end]
        yield from sorted(
            {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
        )


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Returns the mean over both sides, with weights that decay exponentially with the distance.

    A mean of the past alone would lag behind a falling loss. `weight` is that of a neighbour, from 0 to
    below 1. Values that are not finite are skipped.
    """
    before = _decayed(values, weight)
    after = list(reversed(_decayed(values[::-1], weight)))
    found = []
    for value, (total, norm), (later, later_norm) in zip(values, before, after, strict=True):
        own = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)  # on both sides
        weights = norm + later_norm - own[1]
        found.append((total + later - own[0]) / weights if weights else value)
    return found


def _decayed(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """Returns the weighted sum of all values up to each one, and the sum of their weights."""
    total = norm = 0.0
    sums = []
    for value in values:
        is_finite = math.isfinite(value)
        total = weight * total + (value if is_finite else 0.0)
        norm = weight * norm + is_finite
        sums.append((total, norm))
    return sums
