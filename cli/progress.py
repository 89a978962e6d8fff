"""Progress bars for passes over bytes and over the rows of tasks, drawn where somebody watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Told what begins and how many bytes or rows it is about; returns what is told of every few."""


@contextmanager
def progress_bars(console: Console) -> Iterator[StartProgress]:
    """Yields what draws a bar for each pass over the bytes; none where nobody watches."""
    with _bars(console, DownloadColumn()) as start:
        yield start


@contextmanager
def task_bars(console: Console) -> Iterator[StartProgress]:
    """Yields what draws a bar for the rows of each task; none where nobody watches."""
    with _bars(console, MofNCompleteColumn()) as start:
        yield start


@contextmanager
def _bars(console: Console, count: ProgressColumn) -> Iterator[StartProgress]:
    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def start_progress(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda more: progress.advance(task, more)

        yield start_progress
