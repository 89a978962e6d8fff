"""Watching a job through its run folder: a live view in a terminal, plain lines everywhere else.

Everything comes from files, so one can watch a job of any cluster, after the fact too, and a
watcher can neither slow nor stop it. Cost: two `stat` calls and the reading of what is new, four
times a second.
"""

import contextlib
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
    METRICS,
    JobStatus,
    JournalEntry,
    State,
    parse_entries,
    read_status,
    total_steps,
)
from ..liveness import LivenessWatch
from .data_progress import PREPARATION, as_record, duration, progress_words
from .history import ExpertLoad, History
from .json_lines import JsonLinesTail
from .summary import STATE_STYLES, describe_start

if TYPE_CHECKING:  # showing a job needs none of what preparing data needs
    from ...data_pipeline.make.progress import PrepareProgress

POLL_S = 0.4
PLAIN_EVERY_S = 5.0  # between two lines about steps, where there is no terminal
MAX_DEPTH_ROWS = 12
BACKLOG_BYTES = 64 << 20  # of an old run's metrics, at most so much is read before the view appears

_BLOCKS = "▁▂▃▄▅▆▇█"
_HEAT = (
    "#3b6fb6",
    "#6f9fd0",
    "#9fb9c9",
    "#8fb78f",
    "#c9b458",
    "#dd8b4a",
    "#c8373f",
)  # from idle to overloaded


@dataclass(frozen=True)
class Event:
    """Holds something that a watcher is told about."""

    time: float
    text: str
    style: str = ""


@dataclass
class View:
    """Holds what is known about a job, brought up to date by `refresh`."""

    run_dir: Path
    history: History = field(default_factory=History)
    entry: JournalEntry | None = None  # the newest one of the journal
    total: int | None = None
    status: JobStatus | None = None  # as whoever watches has judged it last
    preparation: Mapping[str, Any] | None = None  # how far the data is, if it is prepared meanwhile

    def __post_init__(self) -> None:
        preparation = self.run_dir / PREPARATION
        self._preparation = JsonLinesTail.near_the_end(preparation, num_bytes=BACKLOG_BYTES)
        self._journal = JsonLinesTail(self.run_dir / JOURNAL)
        self._metrics = JsonLinesTail.near_the_end(self.run_dir / METRICS, num_bytes=BACKLOG_BYTES)

    def refresh(self) -> list[Event]:
        """Reads what is new; returns the events in it, in the order of their times."""
        new: list[Event] = []
        for entry in parse_entries(self._journal.stream()):
            self.entry = entry
            new.append(
                Event(
                    entry.time,
                    f"{entry.state.value}: {entry.reason}",
                    STATE_STYLES.get(entry.state, ""),
                )
            )
        for line in self._metrics.stream():
            self.history.add([line])
            event = self._event_of(line)
            if event is not None:
                new.append(event)
        for record in self._preparation.stream():
            if record.get("kind") != "preparation":
                continue
            self.preparation = record
            if record.get("news"):
                new.append(Event(record["time"], f"preparing data: {record['news']}", "yellow"))
        self.total = self.total or total_steps(self.run_dir)
        return sorted(new, key=lambda event: event.time)

    def _event_of(self, line: dict[str, object]) -> Event | None:
        at = line.get("time", time.time())
        assert isinstance(at, int | float)
        match line.get("kind"):
            case "start" if (
                len(self.history.starts) > 1 or self.history.starts[-1].resumed_from is not None
            ):
                return Event(at, describe_start(self.history.starts[-1]), "magenta")
            case "eval":
                return Event(
                    at, f"validation loss {_number(line['loss'])} at step {line['step']}", "cyan"
                )
            case "data_wait":
                reason = line.get("reason") or "a slow rank"
                seconds = duration(float(_number(line["seconds"])))
                return Event(at, f"the ranks have waited {seconds} for data: {reason}", "yellow")
            case "checkpoint" if not line.get("error"):  # the journal tells of those that failed
                return Event(
                    at,
                    f"checkpoint of step {line['step']} written in {_number(line['seconds'])} s",
                    "blue",
                )
        return None


def follow(
    run_dir: Path,
    *,
    console: Console | None = None,
    live: bool | None = None,
    until: Callable[[JobStatus], bool] | None = None,
) -> JobStatus:
    """Shows a job until it has ended; returns how it stands then.

    A job whose supervisor falls silent is shown as LOST, and may come back; only after
    `GIVEN_UP_AFTER_S` without a sign of life does the watching end.

    Args:
        live: redraw in place (a terminal) or write a line per event; by default as the console can.
        until: ends the watching earlier.
    """
    console = console or Console()
    live = console.is_terminal if live is None else live
    view = View(run_dir)
    show = _follow_live if live else _follow_plain
    return show(view, console, until or (lambda status: False))


def _statuses(view: View, until: Callable[[JobStatus], bool]) -> Iterator[list[Event]]:
    """New events, again and again, until the job has ended; the last ones included."""
    liveness, was_lost = LivenessWatch(view.run_dir), False
    while True:
        status = view.status = read_status(view.run_dir, liveness=liveness)
        events = view.refresh()
        is_lost = status.state is State.LOST
        if is_lost and not was_lost:
            events.append(Event(time.time(), f"LOST: {status.reason}", STATE_STYLES[State.LOST]))
        elif was_lost and not is_lost:
            events.append(
                Event(time.time(), f"{status.state}: the supervisor is back", "bold green")
            )
        was_lost = is_lost
        yield events
        if status.state.is_final or (is_lost and liveness.is_given_up()) or until(status):
            return
        time.sleep(POLL_S)


def _follow_live(view: View, console: Console, until: Callable[[JobStatus], bool]) -> JobStatus:
    with Live(render(view), console=console, auto_refresh=False, transient=False) as screen:
        for events in _statuses(view, until):
            for event in events:  # they stay, above what is drawn over and over
                console.print(_event_line(event))
            screen.update(render(view, width=console.width), refresh=True)
    return view.status or read_status(view.run_dir)


def _follow_plain(view: View, console: Console, until: Callable[[JobStatus], bool]) -> JobStatus:
    shown_step, next_time = None, 0.0
    shown_data, next_data_time = None, 0.0
    for events in _statuses(view, until):
        for event in events:
            _print_line(console, event.time, event.text)
        if view.preparation != shown_data and time.monotonic() >= next_data_time:
            shown_data, next_data_time = view.preparation, time.monotonic() + PLAIN_EVERY_S
            _print_line(console, time.time(), _preparation_line(view))
        if view.history.step != shown_step and time.monotonic() >= next_time:
            shown_step, next_time = view.history.step, time.monotonic() + PLAIN_EVERY_S
            _print_line(console, time.time(), _step_line(view))
    if view.history.step != shown_step:
        _print_line(console, time.time(), _step_line(view))
    if view.preparation != shown_data:
        _print_line(console, time.time(), _preparation_line(view))
    return view.status or read_status(view.run_dir)


def _preparation_line(view: View) -> str:
    assert view.preparation is not None
    return f"preparing data: {progress_words(view.preparation)}"


def _print_line(console: Console, at: float, text: str) -> None:
    """As it is: square brackets in a cause are no markup."""
    console.print(Text(f"{_clock(at)} {text}"), soft_wrap=True)


def _step_line(view: View) -> str:
    last = view.history.last
    words = [
        f"step {last['step']}" + (f"/{view.total}" if view.total else ""),
        f"loss {_number(last['loss'])}",
    ]
    if view.history.validation:
        words.append(f"validation {view.history.validation[max(view.history.validation)]:.4f}")
    if "tokens_per_s" in last:
        words.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    if "max_violation" in last:
        words.append(f"expert load max/mean {1 + max(last['max_violation']):.2f}")
    return ", ".join(words)


# ---- the live view


def render(view: View, *, width: int = 100) -> Group:
    """Returns the live view of one moment."""
    parts: list[Text | Table | ProgressBar] = [_heading(view)]
    if view.preparation is not None:
        parts.append(_preparation_bar(view.preparation, width))
    if view.history.last:
        parts += [_progress(view, width), _figures(view)]
    if view.history.loads:
        newest = view.history.loads[max(view.history.loads)]
        parts += [
            Text(""),
            Text("expert load per depth step", style="dim"),
            expert_load_table(newest, width=width),
        ]
    return Group(*parts)


def _heading(view: View) -> Text:
    state = view.entry.state if view.entry else State.SUBMITTED
    generation = view.entry.generation if view.entry else 0
    words = [(view.run_dir.name, "bold"), "  ", (state.value, STATE_STYLES.get(state, "bold"))]
    if generation:
        words.append((f"  generation {generation}", "dim"))
    return Text.assemble(*words)


def _preparation_bar(record: Mapping[str, Any], width: int) -> Table:
    words = f"data  {progress_words(record)}"
    grid = Table.grid(padding=(0, 2))
    total = record.get("total") or 1
    bar = ProgressBar(
        total=total,
        completed=record.get("done", 0),
        width=max(10, min(50, width - len(words) - 4)),
    )
    grid.add_row(bar, Text(words))
    return grid


def _progress(view: View, width: int) -> Table:
    step, total = view.history.step or 0, view.total
    words = f"step {step}" + (f"/{total}" if total else "")
    left_s = _remaining_s(view)
    if left_s:
        words += f"  {duration(left_s)} left"
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=total or step or 1, completed=step, width=max(10, min(50, width - len(words) - 4))
    )
    grid.add_row(bar, Text(words))
    return grid


def _remaining_s(view: View) -> float | None:
    last = view.history.last
    if not view.total or "step_s" not in last:
        return None
    return (view.total - last["step"]) * (last["step_s"] + last.get("data_wait_s", 0.0))


def _figures(view: View) -> Text:
    last, validation = view.history.last, view.history.validation
    words: list[str | tuple[str, str]] = [("loss ", "dim"), (_number(last["loss"]), "bold")]
    if validation:
        first, newest = validation[min(validation)], validation[max(validation)]
        words += [
            ("   validation ", "dim"),
            (f"{first:.4f} → {newest:.4f}" if len(validation) > 1 else f"{first:.4f}", "bold cyan"),
        ]
    if "tokens_per_s" in last:
        words += [("   tokens/s ", "dim"), f"{last['tokens_per_s']:,.0f}"]
    if "learning_rate" in last:
        words += [("   learning rate ", "dim"), f"{last['learning_rate']:.2e}"]
    if "grad_norm" in last:
        words += [("   gradient norm ", "dim"), _number(last["grad_norm"])]
    return Text.assemble(*words)


def expert_load_table(load: ExpertLoad, *, width: int) -> Table:
    """Returns a table with a row per depth step and a cell per expert.

    Height and colour of a cell tell the expert's load; the middle is the mean.
    """
    grid = Table.grid(padding=(0, 1))
    num_depths = len(load.fractions)
    shown = (
        range(num_depths)
        if num_depths <= MAX_DEPTH_ROWS
        else range(0, num_depths, -(-num_depths // MAX_DEPTH_ROWS))
    )
    for depth in shown:
        fractions = load.fractions[depth]
        cells = _cells(fractions, max(8, width - 44))
        excess = f"max/mean {1 + load.max_violation[depth]:.2f}"
        in_use = f"in use {load.effective_experts[depth]:.1f} of {len(fractions)}"
        grid.add_row(
            Text(f"{load.depth_name(depth):>3}", style="dim"),
            cells,
            Text(f"{excess}  {in_use}", style="dim"),
        )
    return grid


def _cells(fractions: list[float], limit: int) -> Text:
    """A bar per expert; with more experts than columns, the most loaded one of each bin."""
    per_cell = -(-len(fractions) // limit)
    columns = max(1, min(3, limit // len(fractions)))
    text = Text()
    for start in range(0, len(fractions), per_cell):
        ratio = max(fractions[start : start + per_cell]) * len(fractions)
        block = _BLOCKS[min(len(_BLOCKS) - 1, int(ratio / 2 * len(_BLOCKS)))]
        text.append(block * columns, style=_HEAT[min(len(_HEAT) - 1, int(ratio / 2 * len(_HEAT)))])
    return text


def _event_line(event: Event) -> Text:
    return Text.assemble((f"{_clock(event.time)} ", "dim"), (event.text, event.style))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")


def _number(value: object) -> str:
    """Four significant digits; what is not finite comes from the file as a string."""
    return f"{float(value):.4g}" if isinstance(value, int | float) else str(value)


# ---- data preparation


@contextlib.contextmanager
def show_preparation(
    console: Console, *, live: bool | None = None
) -> Iterator[Callable[["PrepareProgress"], None]]:
    """Shows data preparation while inside; yields the callback that takes its reports."""
    live = console.is_terminal if live is None else live
    started = time.monotonic()
    last: PrepareProgress | None = None
    shown = started

    with console.status("preparing data") if live else contextlib.nullcontext() as status:

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
        console.print("data is prepared already", highlight=False)
    else:
        seconds = time.monotonic() - started
        console.print(
            f"data prepared in {duration(seconds)}: {last.tokens:,} tokens", highlight=False
        )


def preparation_words(progress: "PrepareProgress") -> str:
    """Returns how far a preparation is, in a line."""
    return f"preparing data: {progress_words(as_record(progress))}"
