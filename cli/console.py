"""How commands print: tables and messages without a terminal's orders in them, and progress bars.

A text of a file or of the command line must not move the cursor or change the screen.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..train.record.untrusted import escaped

if TYPE_CHECKING:
    from rich.console import Console

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Takes a name and the number of bytes or rows; returns a function that takes each advance."""


def terminal(**options: Any) -> "Console":
    """Returns a rich console that spells out control characters, and obeys only its own styles."""
    from rich.console import Console

    class Terminal(Console):
        def render(self, *given: Any, **named: Any) -> Any:
            for segment in super().render(*given, **named):
                yield segment if segment.control else segment._replace(text=escaped(segment.text))

    return Terminal(**options)


def print_plain(text: object) -> None:
    """Prints a result on standard output, with control characters spelled out."""
    print(escaped(str(text)))


def print_message(label: str, text: str, *, style: str = "bold red") -> None:
    """Prints "label: text" on standard error, without markup, secrets and ends of endless words."""
    from rich.text import Text

    from ..train.record.redaction import redact

    text = re.sub(r"(\S{300})\S+", r"\1…", redact(text))
    message = Text.assemble((f"{label}:", style), " ", text)
    terminal(stderr=True, soft_wrap=True).print(message, highlight=False)


@contextmanager
def progress_bars(*, of_rows: bool = False) -> Iterator[StartProgress]:
    """Yields a function that starts a progress bar; it draws nothing without a terminal."""
    from rich import progress as bars

    console = terminal(stderr=True)
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
