"""Draws the page's Plotly figures as pure functions of curves.

Colors are those of Okabe and Ito, distinguishable with any color vision, and cividis for numbers.
"""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .curves import Axis, Curves, FollowedRun, place, points, smoothed

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_AXIS_TITLES = {"step": "step", "tokens": "tokens", "hours": "hours since the first step"}
_MAX_INTERRUPTIONS = 50  # the newest ones, marked in a figure
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
_FULL = 3  # times the mean; the color scale ends here
_ROW_PX, _REST_PX = 130, 110  # of the picture of loads


def loss_figure(runs: Sequence[FollowedRun], axis: Axis, smoothing: float) -> go.Figure:
    """Draws training loss (smoothed and raw), validation loss, and interruptions of runs."""
    figure = _figure("loss, nats per token", axis)
    for run, colour in _coloured(runs):
        x, y = points(run.curves, run.curves.loss, axis)
        if smoothing:
            _add_line(figure, run.name, x, y, color=colour, width=1, raw=True)
        _add_line(figure, run.name, x, smoothed(y, smoothing), color=colour)
        _add_validation(figure, run, axis, colour)
        _mark_interruptions(figure, run.curves, axis, colour)
    return figure


def throughput_figure(runs: Sequence[FollowedRun], axis: Axis) -> go.Figure:
    """Draws tokens per second over all ranks."""
    figure = _figure("tokens/s", axis)
    figure.update_yaxes(rangemode="tozero")
    for run, colour in _coloured(runs):
        x, y = points(run.curves, run.curves.tokens_per_s, axis)
        _add_line(figure, run.name, x, y, color=colour)
        _mark_interruptions(figure, run.curves, axis, colour)
    return figure


def score_figure(runs: Sequence[FollowedRun], axis: Axis) -> go.Figure:
    """Draws the accuracy on every task that was scored during training."""
    figure = _figure("accuracy", axis)
    for run, colour in _coloured(runs):
        for (task, values), dash in zip(run.curves.scores.items(), cycle(_DASHES), strict=False):
            x, y = points(run.curves, values, axis)
            _add_line(figure, f"{run.name}: {task}", x, y, color=colour, dash=dash)
    return figure


def value_figure(
    runs: Sequence[FollowedRun], axis: Axis, title: str, name: Literal["learning_rate", "grad_norm"]
) -> go.Figure:
    """Draws one number of each step."""
    figure = _figure(title, axis)
    for run, colour in _coloured(runs):
        x, y = points(run.curves, getattr(run.curves, name), axis)
        _add_line(figure, run.name, x, y, color=colour)
    return figure


def imbalance_figure(runs: Sequence[FollowedRun], axis: Axis) -> go.Figure:
    """Draws the load of the fullest expert and the busiest rank relative to the mean."""
    figure = _figure("most ÷ mean", axis)
    for run, colour in _coloured(runs):
        for what, values, dash in (
            ("fullest expert", run.curves.hottest_expert, "solid"),
            ("busiest rank", run.curves.hottest_rank, "dot"),
        ):
            if values:
                x, y = points(run.curves, values, axis)
                _add_line(figure, f"{run.name}: {what}", x, y, color=colour, dash=dash)
    figure.add_hline(y=1, line={"color": "#888888", "width": 1})
    return figure


def load_figure(run: FollowedRun | None, axis: Axis) -> go.Figure:
    """Draws every expert's load over time, one picture per depth step, relative to the mean."""
    if run is None or not run.curves.loads:
        return _empty("no expert loads recorded")
    loads = run.curves.loads
    steps = sorted(loads)
    num_depths = len(loads[steps[-1]])
    depths = run.curves.depths or range(1, num_depths + 1)
    figure = make_subplots(
        rows=num_depths,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.25 / num_depths / 2,
        row_titles=[f"depth {depth}" for depth in depths],
    )
    for index in range(num_depths):
        figure.add_heatmap(
            x=[place(run.curves, step, axis) for step in steps],
            z=_load_matrix([loads[step] for step in steps], index),
            coloraxis="coloraxis",
            hovertemplate="%{x}, expert %{y}: %{z:.2f} × mean<extra></extra>",
            row=index + 1,
            col=1,
        )
    figure.update_yaxes(title_text="expert")
    figure.update_xaxes(title_text=_AXIS_TITLES[axis], row=num_depths, col=1)
    figure.update_layout(
        template="simple_white",
        height=_ROW_PX * num_depths + _REST_PX,
        margin={"l": 55, "r": 20, "t": 20, "b": 45},
        coloraxis={"colorscale": "Cividis", "cmin": 0, "cmax": _FULL, "colorbar": _LOAD_BAR},
        uirevision=run.name,
    )
    return figure


_LOAD_BAR = {
    "title": {"text": "load ÷ mean"},
    "tickvals": [0, 1, 2, _FULL],
    "ticktext": ["0", "1", "2", f"{_FULL}+"],
}


def _load_matrix(loads: Sequence[list[list[float]]], index: int) -> list[list[float | None]]:
    """Returns loads [experts][steps] of one depth step; 1 is an even load."""
    columns = [one[index] if index < len(one) else [] for one in loads]
    experts = max(map(len, columns))
    return [
        [column[expert] * len(column) if expert < len(column) else None for column in columns]
        for expert in range(experts)
    ]


def _coloured(runs: Sequence[FollowedRun]) -> list[tuple[FollowedRun, str]]:
    return [(run, COLOURS[number % len(COLOURS)]) for number, run in enumerate(runs)]


def _figure(title: str, axis: Axis) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="simple_white",
        height=340,
        margin={"l": 60, "r": 15, "t": 15, "b": 45},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": _AXIS_TITLES[axis]}, "showgrid": True},
        yaxis={"title": {"text": title}, "showgrid": True},
        uirevision=axis,  # a zoom survives new points
        hovermode="x unified",
    )
    return figure


def _empty(words: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="simple_white", height=120, xaxis_visible=False, yaxis_visible=False
    )
    figure.add_annotation(text=words, showarrow=False, font={"size": 15, "color": "#666666"})
    return figure


def _add_line(
    figure: go.Figure,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    raw: bool = False,
    **line: Any,
) -> None:
    """Adds a line with gaps at values that are not finite; raw lines are pale and unnamed."""
    figure.add_scatter(
        x=list(x),
        y=[value if math.isfinite(value) else None for value in y],
        mode="lines" if len(x) > 1 else "markers",
        name=name,
        legendgroup=name.partition(":")[0],
        showlegend=not raw,
        hoverinfo="skip" if raw else None,
        opacity=0.25 if raw else 1.0,
        line={"width": 2} | line,
    )


def _add_validation(figure: go.Figure, run: FollowedRun, axis: Axis, colour: str) -> None:
    drawn = [("validation", run.curves.validation, "diamond")]
    if run.curves.average:
        drawn.append(("validation, averaged weights", run.curves.average, "diamond-open"))
    for what, curve, symbol in drawn:
        x, y = points(run.curves, curve, axis)
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name=f"{run.name}: {what}",
            legendgroup=run.name,
            showlegend=False,
            marker={"color": colour, "size": 8, "symbol": symbol},
        )


def _mark_interruptions(figure: go.Figure, curves: Curves, axis: Axis, colour: str) -> None:
    interruptions = [event for event in curves.events if event.interrupts]
    for event in interruptions[-_MAX_INTERRUPTIONS:]:
        x = place(curves, event.step or 0, axis)
        figure.add_vline(x=x, line={"color": colour, "width": 1, "dash": "dash"})
