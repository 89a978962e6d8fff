"""Prints how a run ended: a few lines and one picture.

Causes, paths and reasons are shown as `Text`, because rich would read their square brackets as markup.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...train.record.untrusted import read_text
from ..job import CONFIG, JobStatus, Journal, State
from .data_progress import duration, last_record, progress_words
from .history import GenerationStart, History, read_history

PICTURE = "summary.png"

STATE_STYLES = {
    State.SUCCEEDED: "bold green",
    State.RUNNING: "bold green",
    State.STOPPED: "bold yellow",
    State.PREEMPTED: "bold yellow",
    State.FAILED: "bold red",
    State.LOST: "bold red",
    State.RECOVERING: "bold magenta",
    State.RESIZING: "bold magenta",
    State.PREPARING: "bold cyan",
}


def show_end(status: JobStatus, console: Console) -> None:
    """Prints how a job ended, and draws its curves into the run folder."""
    picture = draw_summary(status.run_dir) if status.step is not None else None
    console.print(closing_words(status, picture=picture), crop=False)


def closing_words(
    status: JobStatus, *, picture: Path | None = None, story: str | None = None
) -> Group:
    """Returns the closing lines of a job, to print without `crop`: its result, or the root cause.

    Args:
        picture: the file with the drawn curves.
        story: begins with the state, and replaces the state and its reason in the first line.
    """
    history = read_history(status.run_dir)
    words = f"  {status.reason}" if story is None else story.removeprefix(status.state.value)
    style = STATE_STYLES.get(status.state, "bold")
    # the terminal wraps it, so that a path in it can be copied
    title = Text.assemble((status.state.value, style), words, no_wrap=True, overflow="ignore")
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(status, history, picture):
        # causes hold [brackets], and paths must not lose their ends
        table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    parts: list[Any] = [title, Padding.indent(table, 2)]
    if status.state in (State.FAILED, State.LOST):
        parts += [Padding.indent(part, 2) for part in explain_failure(status, told=words)]
    return Group(*parts)


def _rows(status: JobStatus, history: History, picture: Path | None) -> list[tuple[str, str]]:
    rows = []
    if history.validation:
        begin, end = min(history.validation), max(history.validation)
        first, last = history.validation[begin], history.validation[end]
        since = f" (step {begin:,})" if begin else ""
        words = f"{first:.4f}{since} → {last:.4f}   (perplexity {_exp(first)} → {_exp(last)})"
        rows.append(("validation loss", words))
    if history.average:
        loss = history.average[max(history.average)]
        rows.append(("averaged weights", f"{loss:.4f}   (perplexity {_exp(loss)})"))
    if history.scores:
        scores = (f"{task} {found[max(found)]:.3f}" for task, found in history.scores.items())
        rows.append(("scores", ", ".join(scores)))
    if history.step is not None:
        rows.append(("training", _training(status, history)))
    if (record := last_record(status.run_dir)) is not None:
        rows.append(("data", progress_words(record)))
    if status.restarts:
        rows.append(("restarts", _restarts(status, history)))
    if status.source is not None:
        rows.append(("start", status.source))
    rows += [("gap", gap) for gap in status.gaps]
    rows.append(("run folder", str(status.run_dir)))
    if picture is not None:
        rows.append(("picture", str(picture)))
    return rows


def _training(status: JobStatus, history: History) -> str:
    """Describes what this submission trained, as its seconds are: not the steps that it found."""
    end, since = history.step or 0, status.submitted_at or 0.0
    own = (start.resumed_from or 0 for start in history.starts if start.time >= since)
    begin = min(next(own, 0), end)
    words = f"{end - begin:,} steps" + (f" (from {begin:,} to {end:,})" if begin else "")
    if end and "tokens" in history.last:
        words += f", {history.last['tokens'] * (end - begin) // end:,} tokens"
    if any(history.tokens_per_s.values()):
        words += f", {median(history.tokens_per_s.values()):,.0f} tokens/s"
    if status.submitted_at and status.ended_at:
        words += f", {duration(status.ended_at - status.submitted_at)} in all"
    return words


def _restarts(status: JobStatus, history: History) -> str:
    words = str(status.restarts)
    if status.root_cause and status.root_cause.summary not in status.reason:
        words += f"   {status.root_cause.summary}"
    return "; ".join([words, *map(describe_start, history.restarts[-1:])])


def describe_start(start: GenerationStart) -> str:
    """Describes where a generation resumed the run."""
    step = start.resumed_from
    where = "the beginning" if step is None else f"the checkpoint of step {step}"
    return f"generation {start.generation} continued from {where}"


def explain_failure(status: JobStatus, *, told: str) -> list[Any]:
    """Returns why a job failed, and where; without the reason if it was `told` in full."""
    cause = status.root_cause
    reason = status.reason if cause is None or cause.summary in status.reason else cause.summary
    parts: list[Any] = [] if reason in told else [Text(f"root cause: {reason}", style="bold")]
    if cause and cause.where:
        parts.append(Text(f"at {cause.where}"))
    if cause and cause.traceback:
        last = "\n".join(cause.traceback.splitlines()[-12:])
        parts.append(Padding.indent(Text(last, style="dim"), 2))
    if cause and cause.log:
        parts.append(Text(f"log: {status.run_dir / cause.log}"))
    return ["", *parts] if parts else []


def _exp(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 50 else "∞"


# ---- the picture


def draw_summary(run_dir: Path) -> Path:
    """Draws the loss, the learning rate and, if there are any, scores and the most loaded expert's load.

    Returns the PNG: summary.png in the run folder.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a missing cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = read_history(run_dir)
    path, more = run_dir / PICTURE, bool(history.scores) + bool(history.hottest)
    heights = [4.6, 1.8, *[3.0] * more]
    figure: Any = Figure(figsize=(12, sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    rows = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    _draw_loss(rows[0], history, title=run_dir.name, continued=_continued(run_dir))
    _label(rows[1], "learning rate", "learning rate")
    rates = sorted(history.learning_rate.items())
    rows[1].plot(*zip(*rates, strict=True) if rates else ([], []), color=_MEAN, linewidth=2.0)
    rows[1].margins(x=0.01)
    if history.scores:
        _draw_scores(rows[2], history)
    if history.hottest:
        _draw_hottest(rows[-1], history, ceiling=_ceiling(run_dir, history))
    rows[-1].set_xlabel("training step", fontsize=11)
    figure.savefig(path)
    return path


_INK, _TRAIN, _MEAN, _VALIDATION, _RESTART = "#22313f", "#7aa6c2", "#2e6f95", "#d1495b", "#8d6a9f"


_CEILING_WITHIN = 8.0  # times the height of the curve
_FEW = 100  # points of a curve that needs no running mean


def _continued(run_dir: Path) -> set[int]:
    """Returns the generations that someone started, unlike those after a failure."""
    submitted, found = False, set[int]()
    for entry in Journal(run_dir).entries():
        if entry.state is State.SUBMITTED:
            submitted = True
        elif submitted and entry.state is State.STARTING:
            submitted = False
            found.add(entry.generation)
    return found


def _draw_loss(axes: Any, history: History, *, title: str, continued: Collection[int]) -> None:
    _label(axes, f"{title}: loss", "loss in nats per token")
    _draw_curve(axes, history.loss, "training")
    if history.validation:
        points = sorted(history.validation)
        values = [history.validation[step] for step in points]
        style = {"color": _VALIDATION, "markersize": 6, "linewidth": 1.4}
        axes.plot(points, values, "o-", label="validation", **style)
        for place, align, shift in ((0, "left", 8), (-1, "right", -2)):
            axes.annotate(
                f"{values[place]:.3f}",
                (points[place], values[place]),
                textcoords="offset points",
                xytext=(shift, 9),
                ha=align,
                color=_VALIDATION,
                fontsize=11,
                fontweight="bold",
            )
    axes.margins(x=0.01, y=0.12)
    labelled = set[str]()
    for start in history.restarts:
        name = "continued" if start.generation in continued else "restart"
        style = {"color": _RESTART, "linestyle": ":" if name == "continued" else "--"}
        label = None if name in labelled else name
        axes.axvline(start.reached or 0, label=label, **style)
        labelled.add(name)
    axes.legend(frameon=False, fontsize=10.5, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _draw_scores(axes: Any, history: History) -> None:
    _label(axes, "scores on zero-shot tasks", "accuracy")
    for task, accuracy in history.scores.items():
        curve = zip(*sorted(accuracy.items()), strict=True)
        axes.plot(*curve, marker="o", markersize=5, label=task)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=10.5, ncols=5, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _ceiling(run_dir: Path, history: History) -> float:
    """Returns E/K, the load of an expert that every token chooses; 0 if K is not known."""
    try:
        model = json.loads(read_text(run_dir / CONFIG) or "")["model"]
        top_k = model["feed_forward"]["router"]["top_k"]
        return len(history.load.fractions[0]) / top_k if history.load else 0.0
    except (ValueError, LookupError, TypeError, ZeroDivisionError, RecursionError):
        return 0.0


def _draw_hottest(axes: Any, history: History, *, ceiling: float) -> None:
    """Draws the load, and its ceiling unless that would flatten the curve."""
    highest = max(filter(math.isfinite, history.hottest.values()), default=1.0)
    _label(axes, "expert load: most loaded expert of all depth steps", "load ÷ mean load")
    _draw_curve(axes, history.hottest, "load")
    if 0 < ceiling - 1 < _CEILING_WITHIN * (highest - 1):
        axes.axhline(ceiling, color=_VALIDATION, linewidth=1.2, linestyle="--")
    axes.margins(x=0.01)
    axes.set_ylim(bottom=1)


def _draw_curve(axes: Any, curve: Mapping[int, float], name: str) -> None:
    """Draws each step and the running mean; a curve of few points alone."""
    steps = sorted(curve)
    values = [curve[step] for step in steps]
    if len(values) < _FEW:
        axes.plot(steps, values, color=_MEAN, linewidth=2.0, label=name)
        return
    smooth = _running_mean(values, len(values) // 60)
    axes.plot(steps, values, color=_TRAIN, linewidth=0.8, alpha=0.55, label=f"{name}, each step")
    axes.plot(steps, smooth, color=_MEAN, linewidth=2.0, label=f"{name}, running mean")


def _label(axes: Any, title: str, label: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    # a run folder's name may contain dollars, which matplotlib would read as a formula
    named = {"loc": "left", "fontsize": 14, "fontweight": "bold", "parse_math": False}
    axes.set_title(title, color=_INK, **named)
    axes.set_ylabel(label, fontsize=11)


def _running_mean(values: Sequence[float], half: int) -> list[float]:
    """Returns the mean over each value and its `half` neighbours on either side, if finite."""
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(math.isfinite(value) for value in values)]
    means = []
    for index in range(len(values)):
        first, last = max(0, index - half), min(len(values), index + half + 1)
        count = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / count if count else math.nan)
    return means
