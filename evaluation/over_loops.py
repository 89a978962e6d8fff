"""Measures a looped model with several numbers of loops: a table and a picture.

More loops than trained rarely help; fewer may be enough, and cost less.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..data_pipeline.words import run_and_step
from ..distributed.checkpoint.format import Weights, find_checkpoint
from ..model.cost import forward_flops
from ..train.record.run_folder import config_of
from .perplexity import measure
from .zero_shot import ZeroShotReport

PICTURE = "loops.png"


@dataclass(frozen=True)
class OverLoops:
    """Holds what one checkpoint scores with each number of loops."""

    step: int
    trained: int  # R
    loops: tuple[int, ...]
    flops: tuple[float, ...]  # forward, per token
    figures: dict[str, tuple[float, ...]]  # by name: "loss", or task and metric


def measure_over_loops(
    run_dir: Path,
    loops: Sequence[int],
    *,
    scores: Callable[[int], ZeroShotReport | None] | None = None,
    weights: Weights = "trained",
) -> OverLoops:
    """Measures the validation loss, or zero-shot tasks, with each number of loops.

    Args:
        run_dir: a checkpoint's folder, or a run that saves none meanwhile.
        loops: repeats of the core.
        scores: scores tasks with a number of loops (`measure_tasks`); None: the loss is measured.
        weights: whose loss: those of the step, or their average.

    Raises:
        ValueError: the run cannot be read, its model shares no layers, or several ranks measure.
    """
    found: dict[str, list[float]] = {}
    measured_step = 0
    for number in loops:
        if scores is None:
            measured = measure(run_dir, loops=number, weights=weights)
            measured_step = measured.step
            found.setdefault("loss", []).append(measured.result.loss)
            continue
        report = scores(number)
        if report is None:
            raise ValueError(
                "--loops with several numbers measures in one process, without torchrun"
            )
        measured_step = report.step
        for result in report.tasks:
            for metric, estimate in result.metrics.items():
                found.setdefault(f"{result.name} {metric}", []).append(estimate.value)
    config = config_of(find_checkpoint(run_dir))
    per_depth = [config.model.with_loops(number) for number in loops]
    return OverLoops(
        measured_step,
        config.model.num_repeats,
        tuple(loops),
        tuple(forward_flops(model, config.data.seq_len).forward for model in per_depth),
        {name: tuple(values) for name, values in found.items()},
    )


def table_of(found: OverLoops) -> Table:
    """Returns the figures as a table, one number of loops a row."""
    title = f"step {found.step}, trained with {found.trained} loops"
    table = Table(title=title, title_justify="left", box=None, min_width=len(title))
    for name in ("loops", "forward FLOPs/token", *found.figures):
        table.add_column(name, justify="right")
    for index, number in enumerate(found.loops):
        values = [f"{values[index]:.4f}" for values in found.figures.values()]
        table.add_row(str(number), f"{found.flops[index] / 1e6:,.2f}M", *values)
    return table


def draw(found: OverLoops, run_dir: Path) -> Path:
    """Draws the figures over the loops into the run folder; returns the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(6.4, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    axes = figure.subplots()
    for name, values in found.figures.items():
        axes.plot(found.loops, values, marker="o", label=name)
    axes.axvline(found.trained, color="#8d6a9f", linestyle=":", label="trained")
    axes.set_xscale("log", base=2)
    axes.set_xticks(found.loops, [str(number) for number in found.loops])
    axes.set_xlabel("loops")
    axes.set_ylabel("validation loss, nats per token" if "loss" in found.figures else "score")
    axes.legend()
    path = run_and_step(run_dir)[0] / PICTURE
    figure.savefig(path)
    return path
