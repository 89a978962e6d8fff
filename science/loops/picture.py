"""Draws both studies: loss over effective parameters, and steps to a threshold."""

from collections.abc import Mapping, Sequence
from statistics import fmean

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
from .fit import LoopFit
from .tasks import THRESHOLD, Steps
from .text import LOOPS, Size, effective_of

_NAMES = {"dense": "dense layers", "moe": "layers of experts"}


def draw_text(sizes: list[Size], fits: Mapping[str, LoopFit]) -> bytes:
    """Returns mean losses over N_once + r^φ·N_rec, with the law, as a PNG."""
    figure = new_figure(3.2 * len(fits) + 0.2)
    panels = figure.subplots(len(fits), 1, squeeze=False)[:, 0]
    for panel, (kind, found) in zip(panels, fits.items(), strict=True):
        shown = []
        for place, loops in enumerate(LOOPS):
            arms = [(size, loops) for size in sizes]
            x = effective_of(arms, kind, found.phi)
            runs = [size.losses(f"{kind}_{loops}").values() for size in sizes]
            for number, losses in zip(x, runs, strict=True):
                panel.plot([number, number], [min(losses), max(losses)], color=PALETTE[place])
            means = [fmean(losses) for losses in runs]
            style = {"color": PALETTE[place], "marker": MARKERS[place], "linestyle": ""}
            panel.plot(x, means, label=f"R = {loops}", **style)
            shown.append(x)
        line = np.geomspace(np.min(shown), np.max(shown), 50)
        panel.plot(line, found.law(line), color=FAINT, linewidth=1, zorder=0)
        panel.set_xscale("log")
        finish_lines(panel)
        low, high = found.interval
        title(panel, f"{_NAMES[kind]}: φ = {found.phi:.2f} (95 %: {low:.2f} … {high:.2f})")
        label(panel, x="N_once + r^φ · N_rec, parameters", y="validation loss, nats per token")
        panel.legend(fontsize=8.5, frameon=False, labelcolor=INK)
    return png(
        figure, "equal FLOPs per width; bars: smallest to largest seed; line: the fitted law"
    )


def draw_steps(
    heading: str,
    labels: Mapping[str, str],
    found: Mapping[str, Sequence[Steps]],
    best: Mapping[str, Steps],
) -> bytes:
    """Returns every seed's steps to the threshold, the arm's best rate in front, as a PNG."""
    figure = new_figure(1.2 + 0.45 * len(labels))
    panel = figure.subplots()
    for row, name in enumerate(labels):
        for place, steps in enumerate(found[name]):
            is_best = steps is best[name]
            y = row + (place - (len(found[name]) - 1) / 2) * 0.22
            for number in steps.by_seed.values():
                panel.plot(
                    *(number or steps.most, y),
                    marker=MARKERS[place % len(MARKERS)],
                    color=PALETTE[0] if is_best else FAINT,
                    alpha=1.0 if is_best else 0.5,
                    fillstyle="full" if number else "none",
                    markersize=5,
                    clip_on=False,
                )
    panel.set_xscale("log")
    panel.set_yticks(range(len(labels)), list(labels.values()))
    panel.set_ylim(len(labels) - 0.5, -0.5)
    finish_lines(panel)
    label(panel, x=f"steps until the validation loss is {THRESHOLD} nats per label")
    title(panel, heading)
    return png(
        figure, "a mark is a seed, a row a learning rate; blue: the best; hollow: not reached"
    )
