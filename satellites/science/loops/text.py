"""Trains a core 1, 2 or 4 times per token at equal FLOPs on text (satellites/science/docs/loops.md)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from ..compare.file import ComparisonFile, read_file
from ..compare.results import ArmResult, collect
from ..compare.tables import Table, result_tables, write_results
from ..compare_command import Request, plan
from .fit import LoopFit, fit
from .study import (
    COMPARISONS,
    SWEEP_SEED,
    Report,
    best_rates,
    ends,
    kept_experts,
    measures_of,
    train_all,
    with_rates,
)

FILE = COMPARISONS / "loops.toml"
_RATES = (0.008, 0.016, 0.032, 0.064)
RATES = {24: _RATES, 40: _RATES, 64: (0.004, *_RATES)}  # of the sweep, by width
WIDTHS = tuple(RATES)
KINDS = {"dense": "0.46", "moe": "none"}  # and their published φ


@dataclass(frozen=True)
class Point:
    """Holds one arm at one width, with the figures of its finished runs."""

    width: int
    kind: str
    loops: int
    layer: float  # parameters of one layer
    losses: dict[int, float]  # of validation after the last step, by seed
    measures: list[dict[str, float]]  # kept_experts/2, … of every seed


@dataclass(frozen=True)
class TextStudy:
    """Plans, trains and reports the study, in a folder."""

    folder: Path
    overrides: tuple[str, ...]
    jobs: int

    def train(self, console: Console) -> int:
        """Sweeps the rates of every width, then trains all seeds with the best; the exit code."""
        sweeps = [request for width in WIDTHS for request in self._sweep(width).values()]
        return train_all(sweeps, console) or train_all(self._measured(), console)

    def _file(self) -> ComparisonFile:
        return read_file(FILE).model_copy(update={"jobs": self.jobs})

    def _plan(self, file: ComparisonFile, width: int, name: str, *more: str) -> Request:
        sizes = (f"model.d_model={width}", f"model.attention.num_heads={width // 8}")
        texts = [*self.overrides, *sizes, f"model.feed_forward.d_feed_forward={4 * width}", *more]
        return plan(file, texts, self.folder / f"width-{width}" / name, origin=FILE.name)

    def _sweep(self, width: int) -> dict[float, Request]:
        file = self._file().model_copy(update={"seeds": (SWEEP_SEED,)})
        return {
            rate: self._plan(file, width, f"rate-{rate:g}", f"optim.learning_rate={rate}")
            for rate in RATES[width]
        }

    def rates(self, width: int) -> dict[str, float]:
        """Returns the best rate of every arm; nothing until the sweep of this width is complete."""
        return best_rates(self._sweep(width), lambda run: run.loss)

    def _with_rates(self, width: int, rates: dict[str, float], seeds: tuple[int, ...]) -> Request:
        update = {"name": f"loops_{width}", "seeds": seeds}
        file = with_rates(self._file(), rates).model_copy(update=update)
        return self._plan(file, width, "seeds")

    def _measured(self) -> Iterator[Request]:
        """Returns the runs with every arm's own rate, all widths of a seed before the next seed."""
        seeds = self._file().seeds
        for count in range(1, len(seeds) + 1):
            for width in WIDTHS:
                yield self._with_rates(width, self.rates(width), seeds[:count])

    def report(self) -> Report:
        """Returns the tables, fits and picture of what has finished."""
        from .picture import draw_text

        points: list[Point] = []
        tables: list[Table] = []
        for width in WIDTHS:
            if rates := self.rates(width):
                request = self._with_rates(width, rates, self._file().seeds)
                results = collect(request.file, request.arms, request.runs)
                write_results(results, request.arms, request.out)
                points += [_point(width, each, request) for each in results.arms]
                tables += result_tables(results)
        fits = {kind: found for kind in KINDS if (found := fit_of(points, kind)) is not None}
        picture = draw_text(points, fits) if fits else None
        kept = [(f"{p.width}, R = {p.loops}", p.loops, p.measures) for p in points]
        return Report((*tables, _fits(fits), kept_experts(kept)), _words(fits), picture)


def _point(width: int, result: ArmResult, request: Request) -> Point:
    kind, loops = result.arm.name.split("_")
    total = {arm.name: arm.size.parameters.total for arm in request.arms}
    layer = (total[f"{kind}_1"] - total[f"{kind}_2"]) / 2  # R = 1 has two more
    losses = {run.seed: run.loss for run in result.runs}
    folders = [request.folder / result.arm.name / f"seed-{seed}" for seed in losses]
    measures = [measures_of(folder) for folder in folders]
    return Point(width, kind, int(loops), layer, losses, measures)


def fit_of(points: list[Point], kind: str) -> LoopFit | None:
    """Returns the fit to one kind of layers; None until all widths share two seeds in every arm."""
    chosen = [point for point in points if point.kind == kind]
    if len({point.width for point in chosen}) < len(WIDTHS):
        return None
    seeds = sorted(set.intersection(*(set(point.losses) for point in chosen)))
    if len(seeds) < 2:
        return None
    losses = np.array([[point.losses[seed] for seed in seeds] for point in chosen])
    layers, loops = [p.layer for p in chosen], [p.loops for p in chosen]
    return fit(layers, loops, losses)


def _fits(fits: dict[str, LoopFit]) -> Table:
    rows = []
    for kind, found in fits.items():
        row = (kind, f"{found.phi:.2f}", ends(found.interval, ".2f"), KINDS[kind])
        row += (f"{found.alpha:.2f}", f"{found.floor:.2f}")
        rows.append((*row, f"{found.misfit:.4f}", f"{found.noise:.4f}"))
    head = ("layers", "φ", "95 %", "published φ", "α", "E", "largest misfit", "error of a mean")
    return Table("L = E + A·(N_once + r^φ·N_rec)^(−α)", head, tuple(rows))


def _words(fits: dict[str, LoopFit]) -> str:
    if len(fits) < len(KINDS):
        return "No fit yet: every width needs two seeds of all arms."
    low, high = np.quantile(fits["moe"].draws - fits["dense"].draws, [0.025, 0.975])
    word = "does not separate" if low <= 0 <= high else "separates"
    return f"φ with experts − φ dense: {low:+.2f} … {high:+.2f} (95 %): the interval {word} them."
