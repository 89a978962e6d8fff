"""Defines the common style of all pictures, readable at 600 pixels on a phone.

Figures are six inches wide at 200 dots per inch, so that a 9-point letter is 12 pixels high at a
width of 600. Colors are safe for color-blind readers: cividis for amounts, and the palette of Okabe
and Ito, with different markers, for categories. Everything else is grey. matplotlib is imported
when a picture is drawn, and opens no window.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH = 6.0  # inches
DPI = 200
INK, FAINT = "#22313f", "#6b7785"
# Okabe and Ito, without black and without the yellow that white paper swallows
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_PANELS = 6


def new_figure(height: float) -> Any:
    """Returns an empty figure of the common width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    return figure


def png(figure: Any, footer: str) -> bytes:
    """Returns the figure as a PNG with a small footer."""
    footer = footer.replace("$", r"\$")  # which would begin mathematics
    figure.supxlabel(footer, fontsize=7, color=FAINT, x=0.99, ha="right")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def title(panel: Any, text: str) -> None:
    """Writes a panel's title at its left."""
    panel.set_title(text, loc="left", fontsize=9.5, color=INK)


def label(panel: Any, *, x: str = "", y: str = "") -> None:
    """Labels the axes."""
    panel.set_xlabel(x, fontsize=9, color=INK)
    panel.set_ylabel(y, fontsize=9, color=INK)
    panel.tick_params(labelsize=8.5, colors=INK)


def heat(
    panel: Any,
    values: np.ndarray,
    *,
    low: float | None = None,
    high: float | None = None,
    square: bool = False,
) -> Any:
    """Draws a matrix in cividis, first row at the top; returns what a color bar needs."""
    import matplotlib

    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#d9dee3")
    shown = np.ma.masked_invalid(np.asarray(values, dtype=float))
    image = panel.imshow(
        shown,
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="equal" if square else "auto",
        interpolation="nearest" if values.shape[1] <= 900 else "antialiased",
    )
    panel.spines[:].set_visible(False)
    return image


def high_end(matrices: Sequence[np.ndarray], quantile: float, least: float = 1e-6) -> float:
    """Returns the upper end of the color scale; a few larger values are clipped."""
    known = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    return max(float(np.quantile(known, quantile)), least) if len(known) else max(least, 1.0)


def colour_bar(figure: Any, image: Any, panels: Any, text: str, *, shrink: float = 1.0) -> None:
    """Draws the color scale to the right of the panels, with an arrow if values exceed it."""
    drawn = panels if isinstance(panels, list) else [panels]
    above = any(np.ma.max(panel.images[0].get_array()) > image.norm.vmax for panel in drawn)
    bar = figure.colorbar(
        image,
        ax=panels,
        pad=0.02,
        fraction=0.06,
        aspect=24,
        shrink=shrink,
        extend="max" if above else "neither",
    )
    bar.set_label(text, fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)


def row_names(panel: Any, names: Sequence[object]) -> None:
    """Names as many rows of a matrix as fit."""
    step = max(1, -(-len(names) // 24))
    places = range(0, len(names), step)
    panel.set_yticks(list(places), [str(names[place]) for place in places])


def column_names(panel: Any, names: Sequence[object], *, room: int = 16) -> None:
    """Names as many columns of a matrix as fit."""
    step = max(1, -(-len(names) // room))
    places = range(0, len(names), step)
    panel.set_xticks(list(places), [str(names[place]) for place in places])


def part_groups(panel: Any, members: Sequence[int]) -> None:
    """Draws white lines between the rows of different layers, if layers have several rows."""
    if len(set(members)) == len(members):
        return
    for row in range(1, len(members)):
        if members[row] != members[row - 1]:
            panel.axhline(row - 0.5, color="white", linewidth=2.5)


def line(panel: Any, x: np.ndarray, y: np.ndarray, number: int, name: str) -> None:
    """Draws one line with markers; its number determines color and marker."""
    panel.plot(
        x,
        y,
        color=PALETTE[number % len(PALETTE)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        label=name,
        linestyle="-" if number < len(PALETTE) else "--",
        clip_on=False,  # a marker at 0 or 1 is whole
        zorder=3,
    )


def finish_lines(panel: Any) -> None:
    """Gives a panel of lines a light grid and no box."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, color="#e4e8ec", linewidth=0.6)
    panel.set_axisbelow(True)


def whole_numbers(axis: Any) -> None:
    """Puts ticks only at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
