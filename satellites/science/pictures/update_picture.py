"""Draws each depth step's effect on the residual stream."""

from typing import Any

import numpy as np

from ..analysis.analyse import Analysis
from ..analysis.updates import COLUMNS
from . import drawing
from .picture import Picture, Table


def update_magnitude(analysis: Analysis) -> Picture:
    """Draws update, input, their ratio and cosine over depth."""
    return Picture(
        name="update_magnitude",
        title="Update magnitude per depth step",
        table=lambda: _table(analysis),
        draw=lambda: _draw(analysis),
    )


def _table(analysis: Analysis) -> Table:
    schedule = analysis.config.model.schedule
    means_LC = analysis.updates.means_LC
    columns: Table = {
        "depth": np.asarray([step.depth for step in schedule]),
        "member": np.asarray([step.member for step in schedule]),
        "tokens": analysis.updates.tokens_L,
    }
    return columns | {name: means_LC[:, place] for place, name in enumerate(COLUMNS)}


def _draw(analysis: Analysis) -> Any:
    table = _table(analysis)
    figure = drawing.new_figure(4.6)
    lengths, ratio, cosine = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [1.5, 1, 1]}
    )
    drawing.line(lengths, table["depth"], table["input_norm"], 0, "input ‖x_in‖₂")
    drawing.line(lengths, table["depth"], table["update_norm"], 1, "update ‖x_out − x_in‖₂")
    drawing.line(ratio, table["depth"], table["ratio"], 2, "ratio")
    drawing.line(cosine, table["depth"], table["abs_cosine"], 3, "cosine")
    known = np.concatenate((table["input_norm"], table["update_norm"]))
    known = known[np.isfinite(known) & (known > 0)]
    if len(known) and known.max() > 30 * known.min():
        lengths.set_yscale("log")
    else:
        lengths.set_ylim(bottom=0)
    ratio.set_ylim(0, 1.1 * np.nanmax(table["ratio"], initial=1e-9))
    least = float(np.nanmin(table["abs_cosine"], initial=1.0))
    low = 0.0 if least < 0.6 else min(0.995, 1 - 1.3 * (1 - least))
    cosine.set_ylim(low, 1 + 0.05 * (1 - low))
    for panel in (lengths, ratio, cosine):
        drawing.finish_lines(panel)
        drawing.label(panel)
    drawing.label(lengths, y="length")
    drawing.label(ratio, y="update / input")
    drawing.label(cosine, x="depth step", y="|cos(in, out)|")
    cosine.set_xlim(0.5, analysis.config.model.num_layers + 0.5)
    drawing.whole_numbers(cosine.xaxis)
    drawing.title(lengths, "Update of the residual stream per depth step")
    lengths.legend(fontsize=8.5, frameon=False)
    return figure
