"""Shows the tables of `moebius compare` and the runs in progress."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

import moebius

from .plan import PlannedRun
from .results import read_run
from .runner import RunState
from .tables import Table

_SPEED_OVER_S = 1800.0  # runs differ in speed: the time left is judged by the last half hour
_COLOURS = {"holds": "green", "does not hold": "red", "undecided": "yellow", "too few seeds": "dim"}


def render(table: Table) -> RichTable:
    """Returns a table for the terminal."""
    drawn = RichTable(
        title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(table.head):
        left = number in table.left
        drawn.add_column(
            Text(name), justify="left" if left else "right", no_wrap=not left, overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    return drawn


class Watch:
    """Draws one bar for everything and a line per active run; plain lines as runs end."""

    def __init__(self, runs: Sequence[PlannedRun], progress: Progress) -> None:
        """Takes the runs, weighted by their FLOPs."""
        self._progress = progress
        self._work = {run.folder: round(moebius.size_of(run.config).flops.training) for run in runs}
        self._steps = {run.folder: run.config.train.steps for run in runs}
        self._all: TaskID | None = None
        self._lines: dict[Any, TaskID] = {}

    def on_change(self, states: Sequence[RunState]) -> None:
        """Updates the bars."""
        total = sum(self._work[path] * steps for path, steps in self._steps.items())
        done = sum(self._work[state.run.folder] * state.step for state in states)
        finished = sum(state.state == "finished" for state in states)
        words = f"{finished}/{len(states)} runs"
        if self._all is None:  # what was there before tells nothing of the speed
            self._all = self._progress.add_task(words, total=total, completed=done, loss="")
        self._progress.update(self._all, completed=done, description=words)
        for state in states:
            self._line(state)

    def on_end(self, state: RunState) -> None:
        """Prints how a run ended."""
        run, steps = state.run, state.run.config.train.steps
        if state.state == "failed":
            self._progress.console.print(Text(state.why, style="red"))
        elif state.state == "stopped":
            self._progress.console.print(Text(f"{run.name}: stopped at step {state.step}/{steps}"))
        elif (result := read_run(run)) is not None:
            self._progress.console.print(
                Text(
                    f"{run.name}: validation loss {result.loss:.4f} after {result.steps:,} steps, "
                    f"{result.step_s * 1e3:.0f} ms a step"
                )
            )

    def _line(self, state: RunState) -> None:
        folder = state.run.folder
        if state.state != "running":
            if folder in self._lines:
                self._progress.remove_task(self._lines.pop(folder))
            return
        if folder not in self._lines:
            self._lines[folder] = self._progress.add_task(
                state.run.name, total=self._steps[folder], completed=state.step, loss=""
            )
        scoring = "scoring" if state.phase == "score" else ""
        loss = "" if state.loss is None else f"loss {state.loss:.3f}"
        words = scoring or f"step {state.step:,}/{self._steps[folder]:,}, {loss}".rstrip(", ")
        self._progress.update(self._lines[folder], completed=state.step, loss=words)


@contextmanager
def progress_of(runs: Sequence[PlannedRun], console: Console) -> Iterator[Watch]:
    """Yields the progress display of runs, with bars only in a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[loss]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        speed_estimate_period=_SPEED_OVER_S,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield Watch(runs, progress)
