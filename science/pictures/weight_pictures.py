"""Pictures of the feed-forward's inside: units that pass their ReLU, and how alike its rows are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis
from ..analysis.banks import member_name
from ..analysis.cosines import MATRICES, RowCosine
from ..analysis.hidden import PARTS
from . import drawing
from .picture import Picture, Table

_MONITORS = "the paper's training monitors"
_PART_NAMES = {"experts": "experts", "shared": "shared experts", "dense": "dense feed-forward"}


# ---- units that pass


def relu_pass_rate(analysis: Analysis) -> Picture:
    """Returns the curve of the share of hidden units that are above 0."""
    activation = analysis.model.feed_forward.activation
    absent = ""
    if activation != "relu":
        absent = (
            f"The feed-forward's activation is {activation}: no unit is switched off, so there is no "
            "share that passes."
        )
    return Picture(
        name="relu_pass_rate",
        title="Hidden units that pass the ReLU",
        explanation=(
            "Of the hidden units that a depth step computes for a token (those of its experts), the "
            "share that is above 0 and goes on to the second matrix. Untrained weights let half of "
            "them pass; training makes the code sparser. A rate near 0 is a depth step that does "
            "hardly anything, or units that have died."
        ),
        source=f"{_MONITORS} (ReLU pass rate)",
        absent=absent,
        table=lambda: _pass_table(analysis),
        draw=lambda: _draw_pass_rate(analysis),
    )


def _pass_table(analysis: Analysis) -> Table:
    hidden = analysis.hidden
    depth_X, part_X = hidden.units_LP.nonzero()
    return {
        "depth": depth_X + 1,
        "member": np.asarray(analysis.model.schedule)[depth_X],
        "part": np.asarray(PARTS)[part_X],
        "passed": hidden.passed_LP[depth_X, part_X],
        "units": hidden.units_LP[depth_X, part_X],
        "rate": hidden.rate_LP[depth_X, part_X],
    }


def _draw_pass_rate(analysis: Analysis) -> Any:
    rate_LP = 100 * analysis.hidden.rate_LP
    depths = np.arange(1, analysis.model.num_layers + 1)
    figure = drawing.new_figure(2.9)
    panel = figure.subplots()
    parts = [place for place in range(len(PARTS)) if np.isfinite(rate_LP[:, place]).any()]
    for number, place in enumerate(parts):
        drawing.line(panel, depths, rate_LP[:, place], number, _PART_NAMES[PARTS[place]])
    panel.axhline(50, color=drawing.FAINT, linewidth=1, linestyle=":")
    panel.set_ylim(0, max(55.0, 1.1 * float(np.nanmax(rate_LP, initial=0.0))))
    panel.set_xlim(0.5, analysis.model.num_layers + 0.5)
    drawing.whole_numbers(panel.xaxis)
    drawing.finish_lines(panel)
    drawing.label(panel, x="depth step", y="units above 0, %")
    drawing.title(panel, "Hidden units that pass the ReLU (dotted: chance)")
    if len(parts) > 1:
        panel.legend(fontsize=8.5, frameon=False)
    return figure


# ---- rows that are alike


def row_cosine(analysis: Analysis) -> Picture:
    """Returns the points of the mean pairwise cosine of rows of W1, W2 and W_r."""
    return Picture(
        name="row_cosine",
        title="Likeness of the feed-forward's rows",
        explanation=(
            "The mean cosine of all pairs of rows of a matrix: of W1 (what hidden units read), of W2 "
            "(what they write), and of W_r (what the router compares a token with, one row per "
            "expert). 0 is what random rows have; far above it, rows are variants of one another, "
            "and capacity is wasted. Pairs of one expert are told apart from pairs of different "
            "experts: where they are equal, it means nothing which expert a unit belongs to. It is of "
            "the weights, not of the tokens."
        ),
        source=f"{_MONITORS} (mean pairwise cosine of rows of W1, W2, W_r)",
        table=lambda: _cosine_table(analysis.cosines),
        draw=lambda: _draw_cosines(analysis.cosines),
    )


def _cosine_table(cosines: Sequence[RowCosine]) -> Table:
    return {
        "member": np.asarray([one.member for one in cosines]),
        "matrix": np.asarray([one.matrix for one in cosines]),
        "experts": np.asarray([one.experts for one in cosines]),
        "rows": np.asarray([one.rows for one in cosines]),
        "width": np.asarray([one.width for one in cosines]),
        "same_expert": np.asarray([one.same_expert for one in cosines]),
        "different_experts": np.asarray([one.different_experts for one in cosines]),
        "all_pairs": np.asarray([one.all_pairs for one in cosines]),
    }


def _draw_cosines(cosines: Sequence[RowCosine]) -> Any:
    shown = [name for name in MATRICES if any(one.matrix == name for one in cosines)]
    figure = drawing.new_figure(3.4)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, shown, strict=True):
        own = [one for one in cosines if one.matrix == name]
        has_pairs = [
            (0, "same expert", [one.same_expert for one in own]),
            (1, "different experts", [one.different_experts for one in own]),
        ]
        for number, words, values in has_pairs:
            _points(panel, own, np.asarray(values), number, words)
        panel.axhline(0, color=drawing.FAINT, linewidth=1, linestyle=":")
        step = max(1, -(-len(own) // 6))
        panel.set_xticks(range(0, len(own), step), [member_name(one.member) for one in own][::step])
        panel.set_xlim(-0.6, len(own) - 0.4)
        drawing.finish_lines(panel)
        drawing.label(panel, x="layer of the group")
        drawing.title(panel, f"{name} ({own[0].rows:,} rows)")
    drawing.label(panels[0], x="layer of the group", y="mean cosine of pairs of rows")
    _legend(figure, panels)
    return figure


def _points(
    panel: Any, own: Sequence[RowCosine], values: np.ndarray, number: int, name: str
) -> None:
    """Draws the values of one kind of pairs, side by side with those of the other."""
    if not np.isfinite(values).any():
        return
    panel.plot(
        np.arange(len(own)) + (number - 0.5) * 0.2,
        values,
        linestyle="",
        color=drawing.PALETTE[number],
        marker=drawing.MARKERS[number],
        markersize=5.5,
        label=name,
        clip_on=False,
        zorder=3,
    )


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """Names the kinds of pairs once, above all panels."""
    found = {}
    for panel in panels:
        handles, names = panel.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    figure.legend(
        list(found.values()),
        [f"pairs of the {name}" if name == "same expert" else f"pairs of {name}" for name in found],
        loc="outside upper left",
        ncols=2,
        fontsize=8.5,
        frameon=False,
    )
