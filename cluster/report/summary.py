"""Prints how a run ended: a few lines and one picture.

Causes, paths and reasons are shown as `Text`, because rich would read their square brackets as markup.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..job import JobStatus, RootCause, State
from .data_progress import duration, last_record, progress_words
from .history import History, Start, read_history

PICTURE = "summary.png"
MAX_PANELS = 6  # depth steps whose expert load is drawn over time

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
    console.print(closing_words(status, picture=picture))


def closing_words(
    status: JobStatus, *, picture: Path | None = None, story: str | None = None
) -> Group:
    """Returns the closing lines of a job: its result, or the root cause.

    Args:
        picture: the file with the drawn curves.
        story: begins with the state, and replaces the state and its reason in the first line.
    """
    history = read_history(status.run_dir)
    words = f"  {status.reason}" if story is None else story.removeprefix(status.state.value)
    title = Text.assemble((status.state.value, STATE_STYLES.get(status.state, "bold")), words)
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(status, history, picture):
        table.add_row(Text(name, style="dim"), Text(value))  # causes hold [brackets]
    parts: list[Any] = [title, Padding(table, (0, 0, 0, 2))]
    if status.root_cause is not None and status.state in (State.FAILED, State.LOST):
        parts.append(Padding(_explain(status.root_cause, status.run_dir), (1, 0, 0, 2)))
    return Group(*parts)


def _rows(status: JobStatus, history: History, picture: Path | None) -> list[tuple[str, str]]:
    rows = []
    if history.validation:
        first, last = (
            history.validation[min(history.validation)],
            history.validation[max(history.validation)],
        )
        rows.append(
            (
                "validation loss",
                f"{first:.4f} → {last:.4f}   (perplexity {_exp(first)} → {_exp(last)})",
            )
        )
    if history.step is not None:
        rows.append(("training", _training(status, history)))
    if (record := last_record(status.run_dir)) is not None:
        rows.append(("data", progress_words(record)))
    if status.restarts:
        rows.append(("restarts", _restarts(status, history)))
    rows.append(("run folder", str(status.run_dir)))
    if picture is not None:
        rows.append(("picture", str(picture)))
    return rows


def _training(status: JobStatus, history: History) -> str:
    words = f"{history.step:,} steps"
    if "tokens" in history.last:
        words += f", {history.last['tokens']:,} tokens"
    if any(history.tokens_per_s.values()):
        words += f", {median(history.tokens_per_s.values()):,.0f} tokens/s"
    if status.submitted_at and status.ended_at:
        words += f", {duration(status.ended_at - status.submitted_at)} in all"
    return words


def _restarts(status: JobStatus, history: History) -> str:
    words = str(status.restarts)
    if status.root_cause is not None:
        words += f"   {status.root_cause.summary}"
    if history.restarts:
        words += f"; {describe_start(history.restarts[-1])}"
    return words


def describe_start(start: Start) -> str:
    """Describes where a generation resumed the run."""
    where = (
        "from the beginning"
        if start.resumed_from is None
        else f"from the checkpoint of step {start.resumed_from}"
    )
    return f"generation {start.generation} continued {where}"


def _explain(cause: RootCause, run_dir: Path) -> Group:
    parts: list[Any] = [Text(f"root cause: {cause.summary}", style="bold")]
    if cause.where:
        parts.append(Text(f"at {cause.where}"))
    if cause.traceback:
        parts.append(
            Padding(Text("\n".join(cause.traceback.splitlines()[-12:]), style="dim"), (0, 0, 0, 2))
        )
    if cause.log:
        parts.append(Text(f"log: {run_dir / cause.log}"))
    return Group(*parts)


def _exp(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 50 else "∞"


# ---- the picture


def draw_summary(run_dir: Path) -> Path:
    """Draws the loss curve and, if there are experts, their load per depth step over training.

    Returns the PNG: summary.png in the run folder.

    Raises:
        ValueError: the run has made no step yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = read_history(run_dir)
    if not history.loss:
        raise ValueError(f"{run_dir}: there is nothing to draw: the run has made no step")
    path = run_dir / PICTURE
    depths = _chosen_depths(history)
    figure: Any = Figure(figsize=(12, 10.5 if depths else 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    rows: Any = figure.subfigures(3, 1, height_ratios=[1.25, 1.0, 0.85]) if depths else [figure]
    _draw_loss(rows[0], history, title=run_dir.name)
    if depths:
        _draw_loads(rows[1], history, depths)
        _draw_violation(rows[2], history)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.savefig(path)
    return path


_INK, _TRAIN, _MEAN, _VALIDATION, _RESTART = "#22313f", "#7aa6c2", "#2e6f95", "#d1495b", "#8d6a9f"


def _draw_loss(figure: Any, history: History, *, title: str) -> None:
    axes = _axes(figure, f"{title}: loss", "loss in nats per token")
    steps = sorted(history.loss)
    losses = [history.loss[step] for step in steps]
    smooth = _running_mean(losses, len(losses) // 60)
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.55, label="training, each step")
    axes.plot(steps, smooth, color=_MEAN, linewidth=2.0, label="training, running mean")
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
    for start in history.restarts:
        _mark_restart(axes, start)
    axes.legend(frameon=False, fontsize=10.5, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _mark_restart(axes: Any, start: Start) -> None:
    at = start.reached or 0
    axes.axvline(at, color=_RESTART, linestyle="--", linewidth=1.4)
    left, right = axes.get_xlim()
    late = at > left + 0.75 * (right - left)  # then the label stands left of the line
    axes.annotate(
        f"restarted after step {at},\nresumed from {start.resumed_from or 0}",
        (at, 0.5),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        xytext=(-6 if late else 6, 0),
        ha="right" if late else "left",
        va="center",
        color=_RESTART,
        fontsize=10,
    )


def _draw_loads(figure: Any, history: History, depths: Sequence[int]) -> None:
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    steps = sorted(history.loads)
    newest = history.loads[steps[-1]]
    load_TLE = np.array([history.loads[step].fractions for step in steps])
    load_TLE = load_TLE * load_TLE.shape[2]  # 1 is the mean load
    top = max(2.0, float(np.quantile(load_TLE, 0.995)))
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    for panel, depth in zip(panels, depths, strict=True):
        panel.imshow(
            load_TLE[:, depth].T,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=TwoSlopeNorm(1.0, 0.0, top),
            extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, load_TLE.shape[2] - 0.5),
        )
        panel.set_title(f"depth step {newest.depth_name(depth)}", fontsize=11, color=_INK)
        panel.set_xlabel("training step", fontsize=11)
        panel.locator_params(axis="x", nbins=4)
    panels[0].set_ylabel("expert", fontsize=11)
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(panels[-1].images[0], ax=list(panels), pad=0.01, fraction=0.03)
    bar.set_label("load ÷ mean load", fontsize=11)
    title = "feed-forward experts: load (1 = balanced)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)


def _draw_violation(figure: Any, history: History) -> None:
    from matplotlib import colormaps

    title = "most loaded expert: excess over the mean load"
    axes = _axes(figure, title, "max ÷ mean − 1")
    steps = sorted(history.loads)
    newest = history.loads[steps[-1]]
    num_depths = len(newest.max_violation)
    for depth in range(num_depths):
        values = [history.loads[step].max_violation[depth] for step in steps]
        color = colormaps["viridis"](0.9 * depth / max(1, num_depths - 1))
        label = f"{newest.depth_name(depth)}" if depth in _spread(num_depths, MAX_PANELS) else None
        smooth = _running_mean(values, len(steps) // 60)
        axes.plot(steps, smooth, color=color, linewidth=1.6, label=label)
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)
    axes.legend(
        title="depth step",
        frameon=False,
        fontsize=10,
        ncols=MAX_PANELS,
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
    )


def _axes(figure: Any, title: str, label: str) -> Any:
    """Returns plain axes over training steps."""
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    # a run folder's name may contain dollars, which matplotlib would read as a formula
    named = {"loc": "left", "fontsize": 14, "fontweight": "bold", "parse_math": False}
    axes.set_title(title, color=_INK, **named)
    axes.set_xlabel("training step", fontsize=11)
    axes.set_ylabel(label, fontsize=11)
    return axes


def _chosen_depths(history: History) -> list[int]:
    if not history.loads:
        return []
    return _spread(len(next(iter(history.loads.values())).fractions), MAX_PANELS)


def _spread(count: int, limit: int) -> list[int]:
    """Returns at most `limit` of the numbers below `count`, evenly spread, both ends included."""
    if count <= limit:
        return list(range(count))
    return sorted({round(number * (count - 1) / (limit - 1)) for number in range(limit)})


def _running_mean(values: Sequence[float], half: int) -> list[float]:
    """Returns the mean over each value and its `half` neighbours on either side, if finite."""
    means = []
    for index in range(len(values)):
        near = values[max(0, index - half) : index + half + 1]
        finite = [value for value in near if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means
