"""Draws both studies: loss over effective parameters, and steps to a threshold."""

from collections.abc import Mapping
from statistics import fmean

import numpy as np

from ..pictures.drawing import FAINT, INK, MARKERS, PALETTE, finish_lines, label, new_figure, png
from ..pictures.drawing import title as head
from .fit import LoopFit, effective
from .tasks import THRESHOLD, Steps
from .text import Point

_SPREAD = 0.5  # of an arm's seeds, in rows
_NAMES = {"dense": "dense layers", "moe": "layers of experts"}


def draw_text(points: list[Point], fits: Mapping[str, LoopFit]) -> bytes:
    """Returns losses over N_once + r^φ·N_rec, with the law, as a PNG."""
    figure = new_figure(3.2 * len(fits) + 0.2)
    panels = figure.subplots(len(fits), 1, squeeze=False)[:, 0]
    for panel, (kind, found) in zip(panels, fits.items(), strict=True):
        shown = [point for point in points if point.kind == kind]
        layers, loops_A = [p.layer for p in shown], [p.loops for p in shown]
        x = effective(layers, loops_A, found.phi) / 1e3
        line = np.geomspace(x.min(), x.max(), 50)
        law = found.floor + found.scale * (line * 1e3) ** -found.alpha
        panel.plot(line, law, color=FAINT, linewidth=1, zorder=0)
        for place, loops in enumerate(sorted({p.loops for p in shown})):
            chosen = [
                (n, p.losses.values()) for n, p in zip(x, shown, strict=True) if p.loops == loops
            ]
            for number, losses in chosen:
                panel.plot([number] * 2, [min(losses), max(losses)], color=PALETTE[place])
            means = [fmean(losses) for _, losses in chosen]
            style = {"color": PALETTE[place], "marker": MARKERS[place], "linestyle": ""}
            panel.plot([number for number, _ in chosen], means, label=f"R = {loops}", **style)
        finish_lines(panel)
        low, high = found.interval
        head(panel, f"{_NAMES[kind]}: φ = {found.phi:.2f} (95 %: {low:.2f} … {high:.2f})")
        label(
            panel,
            x="N_once + r^φ · N_rec, thousands of parameters",
            y="validation loss, nats per token",
        )
        panel.legend(fontsize=8.5, frameon=False, labelcolor=INK)
    return png(
        figure, "equal FLOPs per width; bars: smallest to largest seed; line: the fitted law"
    )


def draw_steps(title: str, found: Mapping[str, Steps]) -> bytes:
    """Returns every seed's steps to the threshold, by arm, as a PNG."""
    figure = new_figure(1.2 + 0.45 * len(found))
    panel = figure.subplots()
    for row, steps in enumerate(found.values()):
        for place, number in enumerate(steps.by_seed.values()):
            spread = _SPREAD * (place / max(1, len(steps.by_seed) - 1) - 0.5)
            panel.plot(
                *(number or steps.most, row + spread),  # seeds may need equal steps
                marker=MARKERS[0],
                color=PALETTE[0],
                linestyle="",
                fillstyle="full" if number else "none",
                markersize=5,
                clip_on=False,
            )
    panel.set_yticks(range(len(found)), list(found))
    panel.set_ylim(len(found) - 0.5, -0.5)
    finish_lines(panel)
    label(panel, x=f"steps to {THRESHOLD} nats per label")
    head(panel, title)
    return png(figure, "a mark is a seed; hollow: not reached by the last step")
