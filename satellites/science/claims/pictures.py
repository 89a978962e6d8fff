"""Draws one picture per claim: mean over seeds with a band from minimum to maximum, or one line per
seed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from .judge import (
    ACTIVATION_ARMS,
    CLAIMS,
    WINDOWS,
    Runs,
    activation_ratio,
    collapse_curve,
    granular_losses,
    mean_loss,
    share_of_experts,
)
from .toys import GRANULARITIES

Picture = Callable[[Axes, Runs], None]
Curve = Sequence[tuple[float, float]]
ONE_LINE_PER_SEED = ("M11",)  # paired differences, too small for the curves of two arms


def draw(claim: str, runs: Runs, path: Path) -> None:
    """Writes the picture of one claim."""
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    PICTURES[claim](figure.add_subplot(), runs)
    figure.axes[0].grid(alpha=0.3)
    shown = "" if claim in ONE_LINE_PER_SEED else " (mean, range)"
    title = f"{claim}, seeds: {len(runs[CLAIMS[claim].arms[0]])}{shown}"
    figure.legend(loc="outside upper center", ncols=2, title=title, fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def band(axes: Axes, label: str, curves: Sequence[Curve], style: str = "-") -> None:
    """Draws one arm; the curves of all seeds share their abscissae."""
    at = [x for x, _ in curves[0]]
    columns = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
    (line,) = axes.plot(at, [fmean(column) for column in columns], style, label=label)
    axes.fill_between(
        at, [min(c) for c in columns], [max(c) for c in columns], alpha=0.2, color=line.get_color()
    )


def _losses(axes: Axes, runs: Runs, arms: Sequence[str]) -> None:
    """Draws losses from the first fifth on, because earlier values would flatten the rest."""
    for arm in arms:
        curves = [run["validation_loss"] for run in runs[arm]]
        band(
            axes,
            arm,
            [[point for point in curve if point[0] >= curve[-1][0] / 5] for curve in curves],
        )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("validation loss, nats per token")


def _faster_than_dense(axes: Axes, runs: Runs) -> None:
    _losses(axes, runs, CLAIMS["M8"].arms)
    axes.axhline(
        mean_loss(runs["dense"]),
        linestyle=":",
        color="black",
        linewidth=1,
        label="dense, last (mean)",
    )


def _mixing_is_learned(axes: Axes, runs: Runs) -> None:
    for seed, (learned, uniform) in enumerate(zip(runs["MoT"], runs["MoT, uniform"], strict=True)):
        pairs = zip(uniform["validation_loss"], learned["validation_loss"], strict=True)
        steps, excess = zip(
            *((step, theirs - ours) for (step, theirs), (_, ours) in pairs), strict=True
        )
        axes.plot(steps, excess, "o-", markersize=3, label=f"seed {seed}")
    axes.axhline(0, linestyle=":", color="black", linewidth=1, label="no difference")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("validation loss: uniform − learned mixing, nats")


def _balance(axes: Axes, runs: Runs) -> None:
    for arm in CLAIMS["T3"].arms:
        band(axes, arm, [run["max_violation"] for run in runs[arm]])
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("MaxVio: largest load ÷ mean load − 1")


def _collapse(axes: Axes, runs: Runs) -> None:
    for arm in CLAIMS["X2"].arms:
        band(axes, arm, [collapse_curve(run) for run in runs[arm]], "o-")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())  # less than a decade has no other labels
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("RC = Tr(Σ_W pinv(Σ_B)); small: collapsed")


def _activation(axes: Axes, runs: Runs) -> None:
    for arm in ACTIVATION_ARMS:
        curves = [
            [(window, activation_ratio(run, [window])) for window in WINDOWS] for run in runs[arm]
        ]
        effective = fmean(share_of_experts(run) for run in runs[arm])
        band(axes, f"{arm} (effective experts {effective:.0%})", curves, "o-")
    axes.set_xticks(WINDOWS)
    axes.set_xlabel("window, tokens")
    axes.set_ylabel("activated experts: measured ÷ random routing")


def _granularity(axes: Axes, runs: Runs) -> None:
    for norm, label in ((True, "with output norm"), (False, "without output norm")):
        losses = granular_losses(runs, norm=norm)
        band(axes, label, [list(zip(GRANULARITIES, seed, strict=True)) for seed in losses], "o-")
    axes.set_xticks(GRANULARITIES)
    axes.set_xlabel("granularity G: dense width ÷ expert width")
    axes.set_ylabel("final validation loss, nats per token")


PICTURES: Mapping[str, Picture] = {
    "M8": _faster_than_dense,
    "M11": _mixing_is_learned,
    "T3": _balance,
    "X2": _collapse,
    "H3": _activation,
    "G1": _granularity,
}
