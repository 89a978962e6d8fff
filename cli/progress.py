"""Shows progress bars for bytes and for rows of tasks, in a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Takes a name and the number of bytes or rows; returns a function that takes each advance."""


@contextmanager
def progress_bars(console: Console, *, of_rows: bool = False) -> Iterator[StartProgress]:
    """Yields a function that starts a progress bar; it draws nothing without a terminal."""
    count = MofNCompleteColumn() if of_rows else DownloadColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def start_progress(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda more: progress.advance(task, more)

        yield start_progress
