"""Progress bars for passes over bytes, drawn where somebody watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Told what begins and how many bytes it is about; returns what is told of every few of them."""


@contextmanager
def progress_bars(console: Console) -> Iterator[StartProgress]:
    """Yields what draws a bar for each pass over the bytes; none where nobody watches."""
    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def start_progress(what: str, num_bytes: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=num_bytes)
            return lambda more: progress.advance(task, more)

        yield start_progress
