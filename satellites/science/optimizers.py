"""Compares AdamW and Muon, each with its own learning rate (satellites/science/docs/optimizers.md).

    python -m moebius_science.optimizers FOLDER [--jobs 2] [--report] [section.key=value …]

The same command continues after an interruption. `--report` trains nothing. Both write
optimizers.md and optimizers.png into FOLDER, whose seeds/ has the table of `moebius compare`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from .compare.file import ComparisonFile, read_file
from .compare.results import Curve, Results, RunResult, collect
from .compare.statistics import interval, paired_differences
from .compare.tables import Table, write_results
from .compare_command import Request, plan
from .loops.study import (
    COMPARISONS,
    SWEEP_SEED,
    Report,
    best_rates,
    ends,
    finished,
    last_loss,
    study_command,
    train_all,
    with_rates,
)

FILE = COMPARISONS / "optimizers.toml"
RATES = (0.008, 0.016, 0.032, 0.064)  # of the sweep; neighbours differ by 2
MODELS = {"dense": "dense", "moeut": "MoEUT", "sigma_moe": "σ-MoE"}
SHORT = 2 / 3  # of the steps: Muon's shorter runs


@dataclass(frozen=True)
class OptimizerStudy:
    """Plans, trains and reports the study, in a folder."""

    folder: Path
    overrides: tuple[str, ...]
    jobs: int

    def train(self, console: Console) -> int:
        """Trains the sweep, then every seed with the best rates; returns the exit code."""
        return train_all(self.requests(), console)

    def requests(self) -> Iterator[Request]:
        """Yields all runs in order; what has to be trained depends on those before."""
        yield from self.sweep().values()
        yield from self.sweep().values()  # with the rates beyond an edge
        yield from self.measured()

    def _plan(self, file: ComparisonFile, name: str, *more: str) -> Request:
        return plan(file, [*self.overrides, *more], self.folder / name, origin=FILE.name)

    def _file(self) -> ComparisonFile:
        return read_file(FILE).model_copy(update={"jobs": self.jobs})

    def sweep(self) -> dict[float, Request]:
        """Returns the runs that choose rates, by rate; at an edge one more, when it is known."""
        file = self._file()
        found = {rate: self._at(rate, file, list(file.arms)) for rate in RATES}
        more = beyond(best_rates(found, last_loss))
        return found | {rate: self._at(rate, file, arms) for rate, arms in more.items()}

    def _at(self, rate: float, file: ComparisonFile, arms: Sequence[str]) -> Request:
        chosen = _only(file, arms, seeds=(SWEEP_SEED,), name=f"{file.name}_sweep")
        return self._plan(chosen, f"rate-{rate:g}", f"optim.learning_rate={rate}")

    def measured(self) -> list[Request]:
        """Returns the runs with the best rates, all steps and then fewer; none before the sweep."""
        rates = best_rates(self.sweep(), last_loss)
        if not rates:
            return []
        file = with_rates(self._file(), rates)
        steps = round(SHORT * (file.steps or 0))
        values = {"steps": steps, "evaluations": 1, "name": f"{file.name}_short"}
        short = _only(file, [f"{model}_muon" for model in MODELS], **values)
        return [self._plan(file, "seeds"), self._plan(short, "short")]

    def report(self) -> Report:
        """Returns the tables and picture of what has finished."""
        sweep, measured = self.sweep(), self.measured()
        table = _sweep_table(sweep)
        if not measured:
            return Report((table,), "The sweep of learning rates has not finished.", None)
        full, short = (collect(each.file, each.arms, each.runs) for each in measured)
        for request, results in zip(measured, (full, short), strict=True):
            write_results(results, request.arms, request.out)
        picture = draw(full) if all(arm.runs for arm in full.arms) else None
        words = f"{full.finished} of {full.planned} runs, {short.finished} of {short.planned} short"
        return Report((table, _table(full, short)), words, picture)


def _only(file: ComparisonFile, arms: Sequence[str], **values: Any) -> ComparisonFile:
    """Returns a comparison of some of the arms, without claims."""
    chosen = {name: file.arms[name] for name in arms}
    update = {"arms": chosen, "baseline": arms[0], "claims": ()}
    return file.model_copy(update=update | values)


def beyond(rates: Mapping[str, float]) -> dict[float, list[str]]:
    """Returns the rate beyond an edge of the sweep, for the arms that are best at that edge."""
    found: dict[float, list[str]] = defaultdict(list)
    for arm, rate in rates.items():
        if rate in (RATES[0], RATES[-1]):
            found[rate / 2 if rate == RATES[0] else rate * 2].append(arm)
    return dict(found)


def steps_to(curve: Curve, loss: float) -> float:
    """Returns the first step at which a curve, straight between its points, is at most `loss`.

    The curve must get there; its first point counts from its own step.
    """
    for (before, above), (step, below) in pairwise([(curve[0][0], math.inf), *curve]):
        if below <= loss:
            share = (loss - below) / (above - below)  # 0 at the first point
            return step - share * (step - before)
    raise ValueError(f"loss {loss} is below all of the curve's {len(curve)} points")


def doublings(ours: RunResult, theirs: RunResult) -> float:
    """Returns log2 of the steps that ours needs for the other's last loss, divided by all steps.

    If ours ends higher, it is the other way round, with a plus: log2 of all steps divided by those
    that the other needs for our last loss.
    """
    if ours.loss > theirs.loss:
        return -doublings(theirs, ours)
    return math.log2(steps_to(ours.curve, theirs.loss) / theirs.steps)


def paired(results: Results, model: str) -> dict[int, tuple[RunResult, RunResult]]:
    """Returns Muon's and AdamW's runs of a model, by seed, where both have finished."""
    by_arm = {arm.arm.name: {run.seed: run for run in arm.runs} for arm in results.arms}
    muon, adamw = by_arm[f"{model}_muon"], by_arm[f"{model}_adamw"]
    return {seed: (muon[seed], adamw[seed]) for seed in sorted(muon.keys() & adamw.keys())}


# Tables and picture -------------------------------------------------------------------------------


def _sweep_table(sweep: Mapping[float, Request]) -> Table:
    rates = sorted(sweep)
    found = {rate: {run.arm: run.loss for run in finished(sweep[rate])} for rate in rates}
    rows = tuple(
        (arm.label, *(f"{found[r][arm.name]:.3f}" if arm.name in found[r] else "" for r in rates))
        for arm in sweep[RATES[0]].arms
    )
    head = ("arm", *(f"{rate:g}" for rate in rates))
    return Table(f"Validation loss by learning rate, seed {SWEEP_SEED}", head, rows)


def _table(full: Results, short: Results) -> Table:
    rows = [_row(model, full, short) for model in MODELS if paired(full, model)]
    head = ("model", "AdamW", "Muon", "Muon − AdamW", "95 %", "steps, Muon ÷ AdamW", "95 %")
    few = f"Muon at {SHORT:.0%} of the steps − AdamW"
    head = (*head, "by seed", few, "95 %", "time of a step, Muon ÷ AdamW")
    return Table("AdamW and Muon, paired by seed", head, tuple(rows), (0, 7))


def _row(model: str, full: Results, short: Results) -> tuple[str, ...]:
    pairs = paired(full, model)
    muon, adamw = ([each[place].loss for each in pairs.values()] for place in (0, 1))
    less = [ours - theirs for ours, theirs in zip(muon, adamw, strict=True)]
    logs = [doublings(*each) for each in pairs.values()]
    few = {
        run.seed: run.loss for arm in short.arms for run in arm.runs if run.arm == f"{model}_muon"
    }
    early = list(paired_differences(few, {s: each[1].loss for s, each in pairs.items()}).values())
    times = [ours.step_s / theirs.step_s for ours, theirs in pairs.values()]
    reach = interval(logs, claims=len(MODELS))
    return (
        *(MODELS[model], f"{fmean(adamw):.4f}", f"{fmean(muon):.4f}", *_mean(less)),
        f"{2 ** fmean(logs):.2f}",
        ends(None if reach is None else (2 ** reach[0], 2 ** reach[1]), ".2f"),
        " ".join(f"{2**each:.2f}" for each in logs),
        *(*_mean(early), f"{fmean(times):.2f} ({min(times):.2f} … {max(times):.2f})"),
    )


def _mean(values: Sequence[float]) -> tuple[str, str]:
    """Returns a mean and its interval, which is corrected for the number of models."""
    if not values:
        return "", ""
    return f"{fmean(values):+.4f}", ends(interval(values, claims=len(MODELS)), "+.4f")


def draw(results: Results) -> bytes:
    """Returns the curves of every model, and below the steps that Muon needs, by seed, as a PNG."""
    from .compare.picture import curves
    from .pictures.drawing import FAINT, MARKERS, PALETTE, finish_lines, label, new_figure, png
    from .pictures.drawing import title as head

    figure = new_figure(2.5 * len(MODELS) + 1.6)
    heights = [2.5] * len(MODELS) + [1.3]
    *panels, last = figure.subplots(len(heights), 1, height_ratios=heights)
    for row, (panel, model) in enumerate(zip(panels, MODELS, strict=True)):
        arms = tuple(arm for arm in results.arms if arm.arm.name.startswith(f"{model}_"))
        curves(panel, replace(results, arms=arms))
        head(panel, f"{MODELS[model]}: validation loss, mean and range over seeds")
        values = [2 ** doublings(*each) for each in paired(results, model).values()]
        style = {"color": PALETTE[1], "marker": MARKERS[1], "linestyle": "", "markersize": 5}
        last.plot(values, [row] * len(values), **style)
    last.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    last.set_yticks(range(len(MODELS)), list(MODELS.values()))
    last.set_ylim(len(MODELS) - 0.5, -0.5)
    finish_lines(last)
    label(last, x="steps to the other's last loss, Muon ÷ AdamW (left of 1: Muon is faster)")
    return png(figure, f"{results.finished} of {results.planned} runs; a mark is a seed")


if __name__ == "__main__":
    raise SystemExit(study_command("optimizers", OptimizerStudy))
