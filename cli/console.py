"""What commands show besides their result: messages on standard error, and progress bars."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Takes a name and the number of bytes or rows; returns a function that takes each advance."""


def print_message(label: str, text: str, *, style: str = "bold red") -> None:
    """Prints "label: text" on standard error, without markup, secrets and ends of endless words."""
    from rich.console import Console
    from rich.text import Text

    from ..train.record.redaction import redact

    text = re.sub(r"(\S{300})\S+", r"\1…", redact(text))
    message = Text.assemble((f"{label}:", style), " ", text)
    Console(stderr=True, soft_wrap=True).print(message, highlight=False)


@contextmanager
def progress_bars(*, of_rows: bool = False) -> Iterator[StartProgress]:
    """Yields a function that starts a progress bar; it draws nothing without a terminal."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    count = bars.MofNCompleteColumn() if of_rows else bars.DownloadColumn()
    name = bars.TextColumn("{task.description}")
    columns = (name, bars.BarColumn(), count, bars.TimeRemainingColumn())
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def start_progress(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda more: progress.advance(task, more)

        yield start_progress
