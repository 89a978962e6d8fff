"""The page itself, a Dash application: which runs are chosen, how they are drawn, what happened."""

from collections.abc import Sequence
from datetime import datetime

import plotly.graph_objects as go
from dash import Dash, Input, Output, State, dcc, html

from .curves import AXES, Axis, Event, FollowedRun, Runs
from .figures import (
    COLOURS,
    imbalance_figure,
    load_figure,
    loss_figure,
    throughput_figure,
)

REFRESH_S = 2.0
MAX_EVENTS = 200
_CHOSEN_AT_FIRST = 3

_STYLE = """
body { margin: 0; font-family: system-ui, sans-serif; color: #222; background: #f6f6f4; }
main { max-width: 1500px; margin: auto; padding: 0 12px 40px; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 4px 0; font-weight: 600; }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); }
.card { background: white; border: 1px solid #ddd; border-radius: 6px; padding: 8px 10px; min-width: 0; overflow-x: auto; }
.controls { display: flex; flex-wrap: wrap; gap: 18px; align-items: center; margin-bottom: 12px; }
.controls > div { min-width: 220px; flex: 1; }
.controls > div:last-child { padding: 0 24px; box-sizing: border-box; }
table { border-collapse: collapse; font-size: 0.85rem; width: 100%; }
td, th { text-align: left; padding: 3px 8px; border-bottom: 1px solid #eee; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.interrupts td { background: #fdf1e6; }
.events { max-height: 420px; overflow: auto; }
"""


def make_page(runs: Runs) -> Dash:
    """Returns the application for the runs below a folder; it is not served yet."""
    page = Dash("moebius", title="moebius", serve_locally=True, update_title="")
    page.index_string = page.index_string.replace("</head>", f"<style>{_STYLE}</style></head>")
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
        Output("throughput", "figure"),
        Output("imbalance", "figure"),
        Output("load", "figure"),
        Output("stand", "children"),
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
            throughput_figure(chosen, axis),
            imbalance_figure(chosen, axis),
            load_figure(with_loads, axis),
            stand_table(chosen),
            event_table(chosen),
        )

    return page


def _layout(runs: Runs) -> html.Main:
    names = runs.names()
    return html.Main(
        [
            html.H1(f"moebius: {runs.root}"),
            html.Div(
                [
                    html.Div(
                        [
                            html.Label("Runs", htmlFor="chosen"),
                            dcc.Dropdown(names, names[:_CHOSEN_AT_FIRST], multi=True, id="chosen"),
                        ],
                        style={"flex": "3 1 330px"},
                    ),
                    html.Div(
                        [
                            html.Label("Over"),
                            dcc.RadioItems(list(AXES), "step", id="axis", inline=True),
                        ]
                    ),
                    html.Div(
                        [
                            html.Label("Smoothing"),
                            dcc.Slider(0, 0.98, value=0.8, step=None, marks=_MARKS, id="smoothing"),
                        ]
                    ),
                ],
                className="controls",
            ),
            html.Div(
                [
                    _card(
                        "Loss (line: training, diamonds: validation)",
                        _graph("loss"),
                    ),
                    _card("Throughput", _graph("throughput")),
                    _card("Imbalance", _graph("imbalance")),
                    _card("How they stand", html.Div(id="stand")),
                    html.Div(
                        [
                            html.H2("Expert load of"),
                            dcc.Dropdown([], id="load-of", clearable=False),
                            _graph("load"),
                        ],
                        className="card",
                    ),
                    _card("What happened", html.Div(id="events", className="events")),
                ],
                className="grid",
            ),
            dcc.Interval(id="clock", interval=int(REFRESH_S * 1000)),
        ]
    )


_MARKS = {0: "none", 0.5: "0.5", 0.8: "0.8", 0.98: "0.98"}


def _graph(name: str) -> dcc.Graph:
    return dcc.Graph(id=name, config={"displayModeBar": False})


def _card(title: str, content: dcc.Graph | html.Div) -> html.Div:
    return html.Div([html.H2(title), content], className="card")


def stand_table(runs: Sequence[FollowedRun]) -> html.Table:
    """Returns where each run stands, a row each, in the colour of its curves."""
    head = ("run", "state", "step", "loss", "validation", "tokens/s")
    rows = []
    for number, run in enumerate(runs):
        curves = run.curves
        newest = curves.step
        numbers = (
            "–" if newest is None else f"{newest:,}",
            "–" if newest is None else f"{curves.loss[newest]:.4f}",
            f"{curves.validation[max(curves.validation)]:.4f}" if curves.validation else "–",
            "–" if newest is None else f"{curves.tokens_per_s[newest]:,.0f}",
        )
        rows.append(
            html.Tr(
                [
                    html.Td(
                        run.name, style={"color": COLOURS[number % len(COLOURS)], "fontWeight": 600}
                    ),
                    html.Td("–" if run.state is None else run.state.value),
                    *(html.Td(text, className="number") for text in numbers),
                ]
            )
        )
    of_text = ("run", "state")
    heads = [html.Th(name, className="" if name in of_text else "number") for name in head]
    return html.Table([html.Tr(heads), *rows])


def event_table(runs: Sequence[FollowedRun]) -> html.Table:
    """Returns what happened to the runs, newest first; what cost steps stands out."""
    events = [(event, run) for run in runs for event in run.curves.events]
    events.sort(key=lambda one: one[0].time, reverse=True)
    head = html.Tr(
        [
            html.Th(name, className="number" if name == "step" else "")
            for name in ("time", "run", "step", "what")
        ]
    )
    return html.Table([head, *(_event_row(*one) for one in events[:MAX_EVENTS])])


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
