"""Trains one core 1, 2 or 4 times per token at equal FLOPs on text, and fits φ (science/docs/loops.md)."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console

import moebius

from ..compare.file import ComparisonFile, read_file
from ..compare.plan import PlannedRun
from ..compare.results import RunResult
from ..compare.statistics import interval, paired_differences
from ..compare.tables import Table
from ..compare_command import Request, plan
from .fit import LoopFit, effective, fit
from .study import COMPARISONS, Report, ends, finished, record, train_all

FILE = COMPARISONS / "loops.toml"
WIDTHS = (24, 40, 64)
RATES = (0.008, 0.016, 0.032)
SWEEP_SEED = 100
LOOPS = (1, 2, 4)
KINDS = ("dense", "moe")
PUBLISHED = {"dense": "0.46", "moe": "none"}
_COMPARISONS = 2 * len(WIDTHS) * (len(LOOPS) - 1)  # differences to R = 1 in one table
_LAST_SHARE = 0.1  # of the steps, over which measures are means


@dataclass(frozen=True)
class Size:
    """Holds one width: its runs with each arm's own rate, and the layers' parameters."""

    width: int
    rates: dict[str, float]
    request: Request

    @cached_property
    def runs(self) -> dict[str, dict[int, RunResult]]:
        """Returns finished runs by arm and seed."""
        by_arm: dict[str, dict[int, RunResult]] = {arm.name: {} for arm in self.request.arms}
        for run in finished(self.request):
            by_arm[run.arm][run.seed] = run
        return by_arm

    def losses(self, arm: str) -> dict[int, float]:
        """Returns final validation losses by seed."""
        return {seed: run.loss for seed, run in self.runs[arm].items()}

    def layer(self, kind: str) -> float:
        """Returns the parameters of one layer: R = 1 has two more than R = 2."""
        total = {arm.name: arm.size.parameters.total for arm in self.request.arms}
        return (total[f"{kind}_1"] - total[f"{kind}_2"]) / 2


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
        sizes = (f"d_model={width}", f"attention.num_heads={width // 8}")
        sizes = (*sizes, f"feed_forward.d_feed_forward={4 * width}")
        texts = [*self.overrides, *(f"model.{each}" for each in sizes), *more]
        return plan(file, texts, self.folder / f"width-{width}" / name, origin=FILE.name)

    def _sweep(self, width: int) -> dict[float, Request]:
        file = self._file().model_copy(update={"seeds": (SWEEP_SEED,)})
        return {
            rate: self._plan(file, width, f"rate-{rate:g}", f"optim.learning_rate={rate}")
            for rate in RATES
        }

    def rates(self, width: int) -> dict[str, float]:
        """Returns the best rate of every arm; nothing until the sweep of this width is complete."""
        losses: dict[str, dict[float, float]] = defaultdict(dict)
        for rate, request in self._sweep(width).items():
            for run in finished(request):
                losses[run.arm][rate] = run.loss
        arms = self._file().arms
        if any(len(losses[arm]) < len(RATES) for arm in arms):
            return {}
        return {arm: min(losses[arm], key=lambda rate: losses[arm][rate]) for arm in arms}

    def sizes(self, seeds: tuple[int, ...] | None = None) -> list[Size]:
        """Returns the widths whose sweep is complete, with these seeds or all."""
        found = []
        for width in WIDTHS:
            if rates := self.rates(width):
                file = self._file()
                arms = {
                    name: entry.model_copy(
                        update={"optim": {**entry.optim, "learning_rate": rates[name]}}
                    )
                    for name, entry in file.arms.items()
                }
                file = file.model_copy(update={"arms": arms, "seeds": seeds or file.seeds})
                found.append(Size(width, rates, self._plan(file, width, "seeds")))
        return found

    def _measured(self) -> Iterator[Request]:
        """Returns the runs with every arm's own rate, all widths of a seed before the next seed."""
        seeds = self._file().seeds
        for count in range(1, len(seeds) + 1):
            for size in self.sizes(seeds[:count]):
                yield size.request

    def report(self) -> Report:
        """Returns the tables, fits and picture of what has finished."""
        from .picture import draw_text

        sizes = self.sizes()
        fits = {kind: found for kind in KINDS if (found := fit_of(sizes, kind)) is not None}
        kept = [(size, run, measures(run)) for size in sizes for run in size.request.runs]
        kept = [each for each in kept if each[2]]
        tables = (_losses(sizes), _fits(fits), _kept(kept))
        runs = [
            record(run, width=size.width, rate=size.rates[arm])
            for size in sizes
            for arm, by_seed in size.runs.items()
            for run in by_seed.values()
        ]
        measured = [
            {"width": size.width, "arm": run.arm, "seed": run.seed, "measures": values}
            for size, run, values in kept
        ]
        values = {"runs": runs, "measures": measured}
        picture = draw_text(sizes, fits) if fits else None
        return Report(tables, tuple(_words(fits)), values, picture)


def fit_of(sizes: list[Size], kind: str) -> LoopFit | None:
    """Returns the fit to one kind of layers; None until all widths share two seeds in every arm."""
    arms = [(size, loops) for size in sizes for loops in LOOPS]
    losses = [size.losses(f"{kind}_{loops}") for size, loops in arms]
    seeds = sorted(set.intersection(*(set(each) for each in losses))) if losses else []
    if len(sizes) < len(WIDTHS) or len(seeds) < 2:
        return None
    once, recurrent = counts(arms, kind)
    table = np.array([[each[seed] for seed in seeds] for each in losses])
    return fit(list(once), list(recurrent), [loops for _, loops in arms], table)


def counts(arms: list[tuple[Size, int]], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns N_once and N_rec of arms: two layers, and 4/R."""
    once = np.array([2 * size.layer(kind) for size, _ in arms])
    return once, np.array([4 / loops * size.layer(kind) for size, loops in arms])


def effective_of(arms: list[tuple[Size, int]], kind: str, phi: float) -> np.ndarray:
    """Returns the effective parameters of arms."""
    loops = np.array([loops for _, loops in arms], float)
    return effective(*counts(arms, kind), loops, phi)


def measures(run: PlannedRun) -> dict[str, float]:
    """Returns a run's measures by loop, `kept_experts/2`, …: means over the last tenth of steps."""
    first = (1 - _LAST_SHARE) * run.config.train.steps
    found: dict[str, list[float]] = defaultdict(list)
    for line in moebius.history(run.folder).records():
        if line["kind"] == "train" and line["step"] > first:
            for name, value in line["auxiliary_losses"].items():
                if name.startswith(("kept_experts/", "routing_divergence/")):
                    found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}


def _losses(sizes: list[Size]) -> Table:
    rows = []
    for size in sizes:
        for arm in size.request.arms:
            losses = size.losses(arm.name)
            kind, loops = arm.name.split("_")
            paired = paired_differences(losses, size.losses(f"{kind}_1"))
            gap = interval(list(paired.values()), claims=_COMPARISONS) if loops != "1" else None
            rate = size.rates[arm.name]
            edge = " (edge)" if rate in (RATES[0], RATES[-1]) else ""
            rows.append(
                (
                    *(str(size.width), arm.label, f"{arm.size.parameters.total:,}"),
                    *(f"{rate:g}{edge}", str(len(losses))),
                    f"{fmean(losses.values()):.4f}" if losses else "",
                    " ".join(f"{value:+.3f}" for value in paired.values()) if loops != "1" else "",
                    ends(gap),
                )
            )
    head = ("width", "arm", "parameters", "learning rate", "seeds", "validation loss")
    return Table("Equal FLOPs on text", (*head, "− R = 1, by seed", "95 %"), tuple(rows), (1,))


def _fits(fits: dict[str, LoopFit]) -> Table:
    rows = tuple(
        (
            *(kind, f"{found.phi:.2f}", ends(found.interval, ".2f"), PUBLISHED[kind]),
            *(f"{found.alpha:.2f}", f"{found.floor:.2f}"),
            *(f"{found.misfit:.4f}", f"{found.noise:.4f}"),
        )
        for kind, found in fits.items()
    )
    head = ("layers", "φ", "95 %", "published φ", "α", "E", "largest misfit", "error of a mean")
    return Table("L = E + A·(N_once + r^φ·N_rec)^(−α)", head, rows)


def _words(fits: dict[str, LoopFit]) -> Iterator[str]:
    if len(fits) < len(KINDS):
        yield "No fit yet: every width needs two seeds of all arms."
        return
    low, high = np.quantile(fits["moe"].draws - fits["dense"].draws, [0.025, 0.975])
    word = "the interval does not separate" if low <= 0 <= high else "the interval separates"
    yield f"φ with experts − φ dense: {low:+.2f} … {high:+.2f} (95 %): {word} them."


def _kept(kept: list[tuple[Size, PlannedRun, dict[str, float]]]) -> Table:
    groups: dict[tuple[int, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for size, run, values in kept:
        for name, value in values.items():
            measure, loop = name.split("/")
            groups[size.width, run.arm, loop][measure].append(value)
    rows = tuple(
        (
            *(str(width), f"R = {arm.split('_')[1]}", loop, str(len(found["kept_experts"]))),
            *(f"{fmean(found['kept_experts']):.3f}", ends(interval(found["kept_experts"]), ".3f")),
            *(f"{fmean(found['routing_divergence']):.4f}",),
        )
        for (width, arm, loop), found in groups.items()
    )
    head = ("width", "arm", "loop", "seeds", "share of experts kept", "95 %", "divergence, nats")
    return Table("Experts kept from loop to loop", head, rows, (1,))
