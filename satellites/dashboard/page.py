"""Lays out the page, a Dash application: run selection, figures and events."""

from collections.abc import Sequence
from datetime import datetime

import plotly.graph_objects as go
from dash import Dash, Input, Output, State, dcc, html

from .curves import AXES, Axis, Event, FollowedRun, Record, Runs
from .figures import (
    COLOURS,
    imbalance_figure,
    load_figure,
    loss_figure,
    score_figure,
    throughput_figure,
    value_figure,
)

REFRESH_S = 2.0
MAX_EVENTS = 200
_CHOSEN_AT_FIRST = 3
_MARKS = {0: "none", 0.5: "0.5", 0.8: "0.8", 0.98: "0.98"}


def make_page(runs: Runs) -> Dash:
    """Returns the application for the runs below a folder, not yet served."""
    page = Dash(
        __name__, title="moebius", serve_locally=True, update_title=""
    )  # with assets/page.css
    page.layout = lambda: _layout(runs)

    @page.callback(Output("chosen", "options"), Input("clock", "n_intervals"))
    def _list_runs(_: int | None) -> list[str]:
        return runs.names()

    @page.callback(
        Output("load-of", "options"),
        Output("load-of", "value"),
        Input("chosen", "value"),
        State("load-of", "value"),
    )
    def _list_loads(names: list[str] | None, now: str | None) -> tuple[list[str], str | None]:
        names = names or []
        return names, now if now in names else next(iter(names), None)

    @page.callback(
        Output("loss", "figure"),
        Output("scores", "figure"),
        Output("throughput", "figure"),
        Output("rate", "figure"),
        Output("norm", "figure"),
        Output("imbalance", "figure"),
        Output("load", "figure"),
        Output("stand", "children"),
        Output("samples", "children"),
        Output("events", "children"),
        Input("chosen", "value"),
        Input("axis", "value"),
        Input("smoothing", "value"),
        Input("load-of", "value"),
        Input("clock", "n_intervals"),
    )
    def _draw(
        names: list[str] | None, axis: Axis, smoothing: float, load_of: str | None, _: int | None
    ) -> tuple[go.Figure | html.Table, ...]:
        chosen = runs.chosen(names or [])
        with_loads = next((run for run in chosen if run.name == load_of), None)
        return (
            loss_figure(chosen, axis, smoothing),
            score_figure(chosen, axis),
            throughput_figure(chosen, axis),
            value_figure(chosen, axis, "learning rate", "learning_rate"),
            value_figure(chosen, axis, "gradient norm", "grad_norm"),
            imbalance_figure(chosen, axis),
            load_figure(with_loads, axis),
            stand_table(chosen),
            sample_table(chosen),
            event_table(chosen),
        )

    return page


def _layout(runs: Runs) -> html.Main:
    names = runs.names()
    chosen = dcc.Dropdown(names, names[:_CHOSEN_AT_FIRST], multi=True, id="chosen")
    axis = dcc.RadioItems(list(AXES), "step", id="axis", inline=True)
    smoothing = dcc.Slider(0, 0.98, value=0.5, step=None, marks=_MARKS, id="smoothing")
    controls = [
        html.Div([html.Label("Runs", htmlFor="chosen"), chosen]),
        html.Div([html.Label("Over"), axis]),
        html.Div([html.Label("Smoothing"), smoothing]),
    ]
    cards = [
        _card(
            "Loss (line: training, diamonds: validation, open: of averaged weights)", _graph("loss")
        ),
        _card("Scores on zero-shot tasks", _graph("scores")),
        _card("Throughput", _graph("throughput")),
        _card("Learning rate", _graph("rate")),
        _card("Gradient norm, before clipping", _graph("norm")),
        _card("Imbalance", _graph("imbalance")),
        _card("How they stand", html.Div(id="stand")),
        _card("Expert load of", dcc.Dropdown([], id="load-of", clearable=False), _graph("load")),
        _card("What they write", html.Div(id="samples", className="events")),
        _card("What happened", html.Div(id="events", className="events")),
    ]
    return html.Main(
        [
            html.H1(f"moebius: {runs.root}"),
            html.Div(controls, className="controls"),
            html.Div(cards, className="grid"),
            dcc.Interval(id="clock", interval=int(REFRESH_S * 1000)),
        ]
    )


def _graph(name: str) -> dcc.Graph:
    return dcc.Graph(id=name, config={"displayModeBar": False})


def _card(title: str, *content: dcc.Graph | dcc.Dropdown | html.Div) -> html.Div:
    return html.Div([html.H2(title), *content], className="card")


def stand_table(runs: Sequence[FollowedRun]) -> html.Table:
    """Returns one row per run with its status, in the color of its curves."""
    head = html.Tr(
        [
            *map(html.Th, ("run", "state")),
            *(html.Th(name, className="number") for name in _NUMBERS),
        ]
    )
    return html.Table([head, *(_stand_row(number, run) for number, run in enumerate(runs))])


_NUMBERS = ("step", "loss", "validation", "tokens/s", "left", "passes", "MFU")


def _stand_row(number: int, run: FollowedRun) -> html.Tr:
    curves, colour = run.curves, COLOURS[number % len(COLOURS)]
    newest = curves.step
    numbers = ["–"] * len(_NUMBERS)
    if newest is not None:
        numbers[:2] = f"{newest:,}", f"{curves.loss[newest]:.4f}"
        numbers[3] = f"{curves.tokens_per_s[newest]:,.0f}"
        numbers[4:] = _pace(curves.newest, goes_on=run.state == "RUNNING")
    if curves.validation:
        numbers[2] = f"{curves.validation[max(curves.validation)]:.4f}"
    return html.Tr(
        [
            html.Td(run.name, style={"color": colour, "fontWeight": 600}),
            html.Td(run.state or "–"),
            *(html.Td(text, className="number") for text in numbers),
        ]
    )


def _pace(newest: Record, *, goes_on: bool) -> tuple[str, str, str]:
    """Returns the time left of a run that goes on, its passes over the data, and its MFU."""
    left_s = newest.get("left_s") if goes_on else None
    return (
        "–" if left_s is None else f"{left_s / 3600:,.2f} h",
        f"{newest['passes']:.2f}" if "passes" in newest else "–",
        f"{newest['mfu']:.1%}" if "mfu" in newest else "–",
    )


def sample_table(runs: Sequence[FollowedRun]) -> html.Table:
    """Returns the newest continuation of every prompt."""
    head = [html.Th("run"), html.Th("step", className="number"), html.Th("prompt and text")]
    rows = [
        html.Tr(
            [
                html.Td(run.name),
                html.Td(f"{step:,}", className="number"),
                html.Td([html.B(prompt), text]),
            ]
        )
        for run in runs
        for prompt, (step, text) in run.curves.samples.items()
    ]
    return html.Table([html.Tr(head), *rows])


def event_table(runs: Sequence[FollowedRun]) -> html.Table:
    """Returns the events of the runs, newest first; events that cost steps are highlighted."""
    events = [(event, run) for run in runs for event in run.curves.events]
    events.sort(key=lambda one: one[0].time, reverse=True)
    head = [html.Th("time"), html.Th("run"), html.Th("step", className="number"), html.Th("what")]
    return html.Table([html.Tr(head), *(_event_row(*one) for one in events[:MAX_EVENTS])])


def _event_row(event: Event, run: FollowedRun) -> html.Tr:
    moment = datetime.fromtimestamp(event.time).strftime("%d %b %H:%M:%S")
    return html.Tr(
        [
            html.Td(moment, style={"whiteSpace": "nowrap"}),
            html.Td(run.name),
            html.Td("–" if event.step is None else f"{event.step:,}", className="number"),
            html.Td(event.words),
        ],
        className="interrupts" if event.interrupts else "",
    )
