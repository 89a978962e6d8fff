"""Follows a job through its run folder: a live view in a terminal or notebook, otherwise plain lines.

Everything comes from files, so following works for a job on any cluster, also after its end, and can neither
slow nor stop it. Cost: two `stat` calls and the new lines, twice a second; in a terminal also one scan of
this machine's processes per second.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..job import (
    JOURNAL,
    JobError,
    JobStatus,
    JournalEntry,
    State,
    current_submission,
    parse_entries,
    read_status,
    total_steps,
)
from ..liveness import LivenessWatch
from .data_progress import PREPARATION, as_record, duration, progress_words
from .history import ExpertLoad, History, begin_history, scores_of, spell_number
from .json_lines import JsonLinesTail
from .run_report import pace_words, short_cause
from .summary import STATE_STYLES, describe_start

if TYPE_CHECKING:  # showing progress must not import what prepares data
    from ...data_pipeline.make.units import PrepareProgress

POLL_S = 0.4
PLAIN_EVERY_S = 5.0  # between two lines about steps, where there is no terminal
MAX_DEPTH_ROWS = 12
_PAGE_WIDTH = 100  # characters, of the view in a notebook
_PAGE_EVENTS = 12  # lines above it
_SAMPLE_CHARS = 200  # at most, of a sample in an event
BACKLOG_BYTES = 1 << 20  # at most, of a preparation's records read before the view appears

_BLOCKS = "▁▂▃▄▅▆▇█"
# From idle to overloaded.
_HEAT = ("#3b6fb6", "#6f9fd0", "#9fb9c9", "#8fb78f", "#c9b458", "#dd8b4a", "#c8373f")


@dataclass(frozen=True)
class Event:
    """Describes one event of a job for a watcher."""

    time: float
    text: str
    style: str = ""


@dataclass
class View:
    """Holds the current state of a job; `refresh` updates it."""

    run_dir: Path
    history: History = field(default_factory=History)
    entry: JournalEntry | None = None  # the newest one of the journal
    total: int | None = None
    status: JobStatus | None = None  # the watcher's last verdict
    data: Mapping[str, Any] | None = None  # progress of data that is prepared beside the ranks

    def __post_init__(self) -> None:
        self._data = JsonLinesTail.near_the_end(self.run_dir / PREPARATION, num_bytes=BACKLOG_BYTES)
        self._journal = JsonLinesTail(self.run_dir / JOURNAL)
        self.history, self._metrics = begin_history(self.run_dir)
        self._since: float | None = None  # when the job was submitted, whose events are shown

    def refresh(self) -> list[Event]:
        """Reads what is new; returns its events in order of time."""
        new: list[Event] = []
        entries = current_submission(parse_entries(self._journal.stream()))
        if self._since is None and entries:
            self._since = entries[0].time
        for entry in entries:
            self.entry = entry
            style = STATE_STYLES.get(entry.state, "")
            # the closing words give the reason in full
            words = short_cause(entry) if entry.state is State.FAILED else entry.reason
            new.append(Event(entry.time, f"{entry.state.value}: {words}", style))
        for line in self._metrics.stream():
            self.history.add([line])
            if (event := self._event_of(line)) is not None:
                new.append(event)
        for record in self._data.stream():
            if record.get("kind") == "preparation":
                self.data = record
                if record.get("news"):
                    new.append(Event(record["time"], f"preparing data: {record['news']}", "yellow"))
        self.total = total_steps(self.run_dir) or self.total  # a continued run has another soon
        return sorted(
            (event for event in new if event.time >= (self._since or 0.0)),
            key=lambda event: event.time,
        )

    def _event_of(self, line: Mapping[str, Any]) -> Event | None:
        at, starts = line.get("time", time.time()), self.history.starts
        match line.get("kind"):
            case "start" if len(starts) > 1 or starts[-1].resumed_from is not None:
                return Event(at, describe_start(starts[-1]), "magenta")
            case "start" if words := _of_start(line):
                return Event(at, words, "blue")
            case "eval":
                words = f"validation loss {spell_number(line['loss'])} at step {line['step']}"
                if "average_loss" in line:
                    words += f", {spell_number(line['average_loss'])} with averaged weights"
                return Event(at, words, "cyan")
            case "scores" if scores := scores_of(line):
                words = ", ".join(f"{task} {accuracy:.3f}" for task, accuracy in scores.items())
                return Event(at, f"scores at step {line['step']}: {words}", "cyan")
            case "samples":
                words = " ".join(f"{line['prompt']}{line['text']}".split())
                return Event(at, f"sample at step {line['step']}: {words:.{_SAMPLE_CHARS}}", "dim")
            case "data_wait":
                reason = line.get("reason") or "a slow rank"
                seconds = duration(line["seconds"])
                return Event(at, f"the ranks have waited {seconds} for data: {reason}", "yellow")
            case "checkpoint" if not line.get("error"):  # the journal reports failed ones
                seconds = spell_number(line["seconds"])
                words = f"checkpoint of step {line['step']} written in {seconds} s"
                return Event(at, words, "blue")
        return None


def _of_start(line: Mapping[str, Any]) -> str:
    """Returns how a run's steps work, if that is worth a line."""
    graph = line.get("cuda_graph")
    words = (line.get("optimizer"), graph and f"cuda graph: {graph}")
    return "; ".join(filter(None, words))


def console_of(show: bool) -> Console:
    """Returns the console of a Python program, which shows the run or nothing."""
    found = Console(quiet=not show)
    if found.is_terminal or found.is_jupyter:
        return found
    return Console(quiet=not show, width=10_000, soft_wrap=True)  # a pipe has nothing to fit into


def follow(
    run_dir: Path,
    *,
    console: Console | None = None,
    until: Callable[[JobStatus], bool] = lambda status: False,
) -> JobStatus:
    """Shows a job until it ends; returns its final status.

    A job whose supervisor falls silent is shown as LOST and may come back. Watching ends when it has been
    silent for `GIVEN_UP_AFTER_S`.

    Args:
        console: a terminal and a notebook redraw the view; elsewhere each event is a line.
        until: ends the watching earlier.
    """
    console = console or Console()
    view = View(run_dir)
    if console.is_jupyter and not console.quiet:
        _follow_in_notebook(view, until)
    elif console.is_terminal:
        _follow_live(view, console, until)
    else:
        _follow_plain(view, console, until)
    return view.status or read_status(run_dir)


def _looks(view: View, until: Callable[[JobStatus], bool]) -> Iterator[list[Event]]:
    """Yields new events until the job has ended, including the last ones."""
    liveness, was_lost = None, False  # looking for life takes a second, and an ended run has none
    while True:
        status = view.status = _status(view, liveness)
        events = view.refresh()
        is_lost = status.state is State.LOST
        if is_lost and not was_lost:
            events.append(Event(time.time(), f"LOST: {status.reason}", STATE_STYLES[State.LOST]))
        elif was_lost and not is_lost:
            words = f"{status.state}: the supervisor is back"
            events.append(Event(time.time(), words, "bold green"))
        was_lost = is_lost
        yield events
        if status.state.is_final or until(status):
            return
        liveness = liveness or LivenessWatch(view.run_dir)
        if is_lost and liveness.is_given_up():
            return
        time.sleep(POLL_S)


def _status(view: View, liveness: LivenessWatch | None) -> JobStatus:
    """Returns the job's status; the last one if its journal was deleted, which the supervisor restores."""
    try:
        return read_status(view.run_dir, liveness=liveness)
    except JobError:
        if liveness is None or view.status is None or not view.run_dir.is_dir():
            raise
        if liveness.is_given_up():
            raise
        return view.status


def _follow_live(view: View, console: Console, until: Callable[[JobStatus], bool]) -> None:
    with Live(render(view), console=console, auto_refresh=False, transient=False) as screen:
        for events in _looks(view, until):
            if events:  # they stay, above what is drawn over and over
                console.print(*map(_event_line, events), sep="\n")
            screen.update(render(view, width=console.width), refresh=True)


def _follow_in_notebook(view: View, until: Callable[[JobStatus], bool]) -> None:
    """Redraws one output of the cell without widgets; its last state stays."""
    from IPython.display import HTML, DisplayHandle

    handle, told, shown = DisplayHandle(), list[Text](), ""
    for events in _looks(view, until):
        told += map(_event_line, events)
        page = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, force_jupyter=False)
        page.print(*told[-_PAGE_EVENTS:], render(view, width=_PAGE_WIDTH), sep="\n")
        html = page.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        if html != shown:
            (handle.update if shown else handle.display)(HTML(html))
            shown = html


def _event_line(event: Event) -> Text:
    return Text.assemble((f"{_clock(event.time)} ", "dim"), (event.text, event.style))


def _follow_plain(view: View, console: Console, until: Callable[[JobStatus], bool]) -> None:
    steps = _Paced(
        console,
        lambda: view.history.step,
        lambda: (view.history.last.get("time", time.time()), step_line(view)),
    )
    data = _Paced(console, lambda: view.data, lambda: _data_line(view))
    for events in _looks(view, until):
        for event in events:
            _print_line(console, event.time, event.text)
        data.print_if_due()
        steps.print_if_due()
    steps.print_if_new()
    data.print_if_new()


class _Paced:
    """Prints a line when a value has changed, at most every few seconds."""

    def __init__(
        self, console: Console, value: Callable[[], Any], line: Callable[[], tuple[float, str]]
    ):
        self._console, self._value, self._line = console, value, line
        self._shown: Any = None
        self._due_s = 0.0

    def print_if_due(self) -> None:
        if time.monotonic() >= self._due_s:
            self.print_if_new()

    def print_if_new(self) -> None:
        if (value := self._value()) != self._shown:
            self._shown, self._due_s = value, time.monotonic() + PLAIN_EVERY_S
            _print_line(self._console, *self._line())


def _print_line(console: Console, at: float, text: str) -> None:
    """Prints a line literally: square brackets are not markup."""
    console.print(Text(f"{_clock(at)} {text}"), soft_wrap=True)


def _data_line(view: View) -> tuple[float, str]:
    data = view.data or {}
    return data.get("time", time.time()), f"preparing data: {progress_words(data)}"


def step_line(view: View) -> str:
    """Describes the newest step in one line."""
    last, validation = view.history.last, view.history.validation
    words = [
        f"step {last['step']}" + (f"/{view.total}" if view.total else ""),
        f"loss {spell_number(last['loss'])}",
    ]
    words += pace_words(last)
    if validation:
        words.append(f"validation {validation[max(validation)]:.4f}")
    if "tokens_per_s" in last:
        words.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    if last["step"] in view.history.hottest:
        words.append(f"expert load max/mean {view.history.hottest[last['step']]:.2f}")
    if "learning_rate" in last:
        words.append(f"learning rate {last['learning_rate']:.2e}")
    if "muon_learning_rate" in last:
        words.append(f"of Muon's matrices {last['muon_learning_rate']:.2e}")
    if "grad_norm" in last:
        words.append(f"gradient norm {spell_number(last['grad_norm'])}")
    return ", ".join(words)


# ---- the live view


def render(view: View, *, width: int = 100) -> Group:
    """Renders the live view of this moment."""
    parts: list[Any] = [_heading(view)]
    if view.data is not None:
        done, total = view.data.get("done", 0), view.data.get("total") or 1
        parts.append(_bar(done, total, f"data  {progress_words(view.data)}", width))
    if view.history.last:
        parts += [_progress(view, width), Text(step_line(view))]
    if view.history.load is not None:
        title = Text("expert load per depth step", style="dim")
        parts += [Text(""), title, expert_load_table(view.history.load, width=width)]
    return Group(*parts)


def _heading(view: View) -> Text:
    state = view.entry.state if view.entry else State.SUBMITTED
    style = STATE_STYLES.get(state, "bold")
    words: list[Any] = [(view.run_dir.name, "bold"), "  ", (state.value, style)]
    if view.entry and view.entry.generation:
        words.append((f"  generation {view.entry.generation}", "dim"))
    return Text.assemble(*words)


def _bar(done: float, total: float, words: str, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    bar_width = max(10, min(50, width - len(words) - 4))
    grid.add_row(ProgressBar(total=total, completed=done, width=bar_width), Text(words))
    return grid


def _progress(view: View, width: int) -> Table:
    step = view.history.step or 0
    return _bar(step, view.total or step or 1, "", width)


def expert_load_table(load: ExpertLoad, *, width: int) -> Table:
    """Returns a table with a row per depth step and a cell per expert.

    Height and colour of a cell show the expert's load; the middle is the mean.
    """
    grid = Table.grid(padding=(0, 1))
    num_depths = len(load.fractions)
    every = max(1, -(-num_depths // MAX_DEPTH_ROWS))
    for depth in range(0, num_depths, every):
        fractions = load.fractions[depth]
        excess = f"max/mean {1 + load.max_violation[depth]:.2f}"
        in_use = f"in use {load.effective_experts[depth]:.1f} of {len(fractions)}"
        grid.add_row(
            Text(f"{load.depth_name(depth):>3}", style="dim"),
            _cells(fractions, max(8, width - 44)),
            Text(f"{excess}  {in_use}", style="dim"),
        )
    return grid


def _cells(fractions: list[float], limit: int) -> Text:
    """Draws a bar per expert; with more experts than columns, the maximum of each bin."""
    per_cell = -(-len(fractions) // limit)
    columns = max(1, min(3, limit // len(fractions)))
    text = Text()
    for start in range(0, len(fractions), per_cell):
        ratio = max(fractions[start : start + per_cell]) * len(fractions)
        block = _BLOCKS[min(len(_BLOCKS) - 1, int(ratio / 2 * len(_BLOCKS)))]
        text.append(block * columns, style=_HEAT[min(len(_HEAT) - 1, int(ratio / 2 * len(_HEAT)))])
    return text


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")


# ---- data preparation


@contextlib.contextmanager
def show_preparation(console: Console) -> Iterator[Callable[["PrepareProgress"], None]]:
    """Shows data preparation; yields the callback that takes its progress reports."""
    started = shown = time.monotonic()
    last: PrepareProgress | None = None

    live = console.status("preparing data") if console.is_terminal else contextlib.nullcontext()
    with live as status:

        def on_progress(progress: "PrepareProgress") -> None:
            nonlocal last, shown
            if progress.news:
                _print_line(console, time.time(), f"preparing data: {progress.news}")
                return
            is_new = last is None or last.stage != progress.stage
            last = progress
            if status is not None:
                status.update(Text(preparation_words(progress)))
            elif is_new or time.monotonic() - shown > PLAIN_EVERY_S:
                shown = time.monotonic()
                _print_line(console, time.time(), preparation_words(progress))

        yield on_progress
    if last is None:
        words = "data is already prepared"
    else:
        took = duration(time.monotonic() - started)
        words = f"data prepared in {took}: {last.tokens:,} tokens"
    console.print(words, highlight=False)


def preparation_words(progress: "PrepareProgress") -> str:
    """Describes a preparation's progress in one line."""
    return f"preparing data: {progress_words(as_record(progress))}"
