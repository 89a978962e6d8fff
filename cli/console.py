"""Where commands print: their tables, messages on standard error, and progress bars.

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


_NO_WIDTH = 10_000  # columns where the output is no terminal, which has nothing to fit into


def console(*, stderr: bool = False) -> "Console":
    """Returns a console that breaks no line inside a word, and none at all where it is no terminal.

    It spells out control characters, and obeys only its own styles.
    """
    from rich.console import Console
    from rich.measure import Measurement

    class WholeWords(Console):
        def print(self, *objects: Any, **options: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            wide = self.options.update(width=_NO_WIDTH)

            def measure(shown: Any) -> Measurement:
                return Measurement.get(self, wide, shown)

            for one in objects:
                _keep_words(one, self.width, measure)
            options.setdefault("crop", False)
            before = self._width
            self._width = max(self.width, 1, *(measure(one).minimum for one in objects))
            try:
                if self.is_terminal:
                    super().print(*objects, **options)
                else:  # without the spaces that fill a table's last column
                    with self.capture() as shown:
                        super().print(*objects, **options)
                    self.file.write(re.sub(" +$", "", shown.get(), flags=re.MULTILINE))
                    self.file.flush()
            finally:
                self._width = before

        def render(self, *given: Any, **named: Any) -> Any:
            for segment in super().render(*given, **named):
                yield segment if segment.control else segment._replace(text=escaped(segment.text))

        def on_broken_pipe(self) -> None:
            raise

    found = WholeWords(stderr=stderr)
    if found.is_terminal:
        return found
    return WholeWords(stderr=stderr, width=_NO_WIDTH, soft_wrap=True)


def print_plain(text: object) -> None:
    """Prints a result on standard output, with control characters spelled out."""
    print(escaped(str(text)))


def _keep_words(shown: Any, width: int, measure: Callable[[Any], Any]) -> None:
    """Shares a width between a table's columns, none narrower than its longest word.

    Args:
        shown: the table, or what contains it: a group, or padding.
        width: in columns of the terminal.
        measure: returns the narrowest and the natural width of a part.
    """
    from rich.padding import Padding
    from rich.table import Table

    if isinstance(shown, Padding):
        _keep_words(shown.renderable, width - shown.left - shown.right, measure)
    for part in getattr(shown, "renderables", ()):
        _keep_words(part, width, measure)
    if not isinstance(shown, Table):
        return
    sizes = [[measure(cell) for cell in (one.header, *one.cells)] for one in shown.columns]
    most = [max(size.maximum for size in cells) for cells in sizes]
    least = [max(size.minimum for size in cells) for cells in sizes]
    for column, narrow, wide in zip(shown.columns, least, most, strict=True):
        column.min_width = wide if column.no_wrap else narrow
    room = max(0, width - measure(shown).minimum)
    slack = sum(most) - sum(column.min_width or 0 for column in shown.columns)
    for column, wide in zip(shown.columns, most, strict=True) if slack > room else ():
        narrow = column.min_width or 0
        column.width = narrow + (wide - narrow) * room // slack


def print_message(label: str, text: str, *, style: str = "bold red") -> None:
    """Prints "label: text" on standard error, without markup, secrets and ends of endless words."""
    from rich.text import Text

    from ..train.record.redaction import redact

    text = re.sub(r"(\S{300})\S+", r"\1…", redact(text))
    message = Text.assemble((f"{label}:", style), " ", text)
    console(stderr=True).print(message, highlight=False, soft_wrap=True)


@contextmanager
def progress_bars(*, of_rows: bool = False) -> Iterator[StartProgress]:
    """Yields a function that starts a progress bar; it draws nothing without a terminal."""
    from rich import progress as bars

    screen = console(stderr=True)
    count = bars.MofNCompleteColumn() if of_rows else bars.DownloadColumn()
    name = bars.TextColumn("{task.description}")
    columns = (name, bars.BarColumn(), count, bars.TimeRemainingColumn())
    with bars.Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:

        def start_progress(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda more: progress.advance(task, more)

        yield start_progress
