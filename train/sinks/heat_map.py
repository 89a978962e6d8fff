"""One picture of how routes spread over experts, by depth step: small, for TensorBoard."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_FULL = 3.0  # loads of so many times the mean and more have one colour
_DPI = 100
_WIDTH_IN = 6.4
_ROW_IN, _REST_IN = 0.28, 1.25


def draw_load(
    load_LN: Sequence[Sequence[float]], depths: Sequence[int], *, title: str
) -> npt.NDArray[np.uint8]:
    """Returns the load of every expert at every depth step as a picture, (height, width, 3).

    Its colours are those of cividis, which people of any colour vision tell apart: 1 is even, dark
    blue is an expert that nothing goes to.

    Args:
        load_LN: fractions of the routes; each row sums to 1, or to 0 where nothing was routed.
        depths: the depth step of each row, from 1.
        title: above the picture.
    """
    # not pyplot: its state belongs to the main thread
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    relative_LN = np.asarray(load_LN, dtype=float) * len(load_LN[0])
    height = min(_REST_IN + _ROW_IN * len(load_LN), 8.0)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    image = axes.imshow(
        relative_LN, aspect="auto", cmap="cividis", vmin=0, vmax=_FULL, interpolation="nearest"
    )
    axes.set(title=title, xlabel="expert", ylabel="depth step")
    axes.set_yticks(*_ticks(depths))
    axes.xaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=axes, label="load ÷ mean", ticks=[0, 1, 2, _FULL], aspect=12)
    bar.ax.set_yticklabels(["0", "1", "2", f"{_FULL:g}+"])
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _ticks(depths: Sequence[int]) -> tuple[list[int], list[str]]:
    """Returns rows that are labelled, and with what: all of them, or about twelve."""
    stride = -(-len(depths) // 12)
    rows = list(range(0, len(depths), stride))
    return rows, [str(depths[row]) for row in rows]
