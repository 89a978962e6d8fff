"""Draws a comparison: curves of validation loss above, paired differences below.

A line is the mean over seeds; its band reaches from the smallest to the largest seed. Below, each
mark is a seed, and the line through them spans their range; left of the dashed line an arm beats
the baseline.
"""

import math
from typing import Any

import numpy as np

from ..pictures.drawing import (
    FAINT,
    INK,
    MARKERS,
    PALETTE,
    finish_lines,
    label,
    new_figure,
    png,
    title,
)
from .results import ArmResult, Results
from .statistics import shared_points

_FIRST_SHARE = 0.1  # of the steps: what comes before would flatten the rest


def draw(results: Results) -> bytes:
    """Returns the picture as a PNG."""
    others = [arm for arm in results.arms if arm.differences]
    curves_height = 3.2 + 0.16 * len(results.arms)
    heights = [curves_height, 0.55 + 0.3 * len(others)] if others else [curves_height]
    figure = new_figure(sum(heights) + 0.5)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    curves(panels[0], results)
    if others:
        _differences(panels[1], results, others)
    file = results.file
    footer = (
        f"{file.name}: {results.finished} of {results.planned} runs, {len(file.seeds)} seeds; "
        "bands and bars: smallest to largest seed"
    )
    return png(figure, footer)


def _style(results: Results, name: str) -> tuple[str, str, str]:
    """Returns color, marker and line style of an arm."""
    number = [arm.arm.name for arm in results.arms].index(name)
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    return colour, marker, "-" if number < len(PALETTE) else "--"


def curves(panel: Any, results: Results) -> None:
    """Draws mean and range of the validation loss, from the first tenth of the steps on."""
    most = max(arm.arm.size.tokens for arm in results.arms)
    unit, unit_name = (1e6, "millions") if most >= 2e6 else (1e3, "thousands")
    for arm in results.arms:
        if not arm.runs:
            continue
        colour, marker, style = _style(results, arm.arm.name)
        tokens = arm.arm.size.tokens / arm.arm.config.train.steps
        steps, values = shared_points([run.curve for run in arm.runs])
        shown = [place for place, step in enumerate(steps) if step >= _FIRST_SHARE * steps[-1]]
        losses = np.array(values)[:, shown]
        x = np.array([steps[place] for place in shown]) * tokens / unit
        panel.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.18, linewidth=0)
        panel.plot(
            *(x, losses.mean(0)),
            color=colour,
            marker=marker,
            markevery=max(1, len(x) // 8),
            markersize=4,
            linewidth=1.4,
            linestyle=style,
            label=arm.arm.label,
        )
    finish_lines(panel)
    label(panel, x=f"tokens, {unit_name}", y="validation loss, nats per token")
    title(panel, "Validation loss, mean and range over seeds")
    panel.legend(fontsize=8.5, frameon=False, labelcolor=INK)


def _differences(panel: Any, results: Results, others: list[ArmResult]) -> None:
    """Draws every seed's difference to the baseline, one row per arm."""
    baseline = next(arm for arm in results.arms if arm.arm.name == results.file.baseline)
    for row, arm in enumerate(others):
        colour, marker, _ = _style(results, arm.arm.name)
        values = [value for value in arm.differences.values() if math.isfinite(value)]
        if not values:
            continue
        panel.plot([min(values), max(values)], [row, row], color=colour, linewidth=1.4, alpha=0.6)
        panel.plot(
            values, [row] * len(values), linestyle="", color=colour, marker=marker, markersize=5
        )
        mean = sum(values) / len(values)
        panel.plot([mean, mean], [row - 0.3, row + 0.3], color=colour, linewidth=2)
    panel.axvline(0, color=FAINT, linestyle="--", linewidth=1)
    panel.set_yticks(range(len(others)), [arm.arm.label for arm in others])
    panel.set_ylim(len(others) - 0.5, -0.5)
    finish_lines(panel)
    label(panel, x=f"validation loss − that of {baseline.arm.label}, nats (left of 0: better)")
    title(panel, "Difference to the baseline, by seed; bar: mean")
