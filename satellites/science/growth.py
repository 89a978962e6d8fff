"""Trains the runs of satellites/science/docs/growth.md, and reports what has finished of them.

    python -m moebius_science.growth FOLDER [--jobs 2] [--report] [section.key=value …]

Rates are chosen first, for trunks and drawn models, then every seed trains its trunks, what grows
out of them, and the same models from drawn weights. The same command continues after an
interruption. `--report` trains nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

import moebius

from .compare.file import CompareError, ComparisonFile, read_file
from .compare.one_run import START
from .compare.plan import PlannedRun, changed
from .compare.results import RunResult, read_run
from .compare.runner import locked, run_all
from .compare.statistics import interval
from .compare.tables import Table
from .compare_command import Request, plan
from .files import write_json
from .loops.study import (
    COMPARISONS,
    INTERRUPTED,
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

TRUNKS, DRAWN = COMPARISONS / "growth.toml", COMPARISONS / "growth_drawn.toml"
RATES = (0.004, 0.008, 0.016, 0.032, 0.064)
_LOOPS = ("prelude=0:1", "core=1:3", "coda=3:4", "loops=2")
_OPERATORS = {"split": ("split=2",), "experts": ("experts=x2", "noise=0.01"), "loops": _LOOPS}
Losses = dict[str, dict[int, dict[str, float]]]  # by case and seed, of "grown" and the other arms
# The arm of a grown model, its trunk, and how it grows.
CASES = {
    f"{trunk}_{operator}": (trunk, _OPERATORS[operator])
    for trunk, operators in {
        "moeut": ("split", "experts"),
        "sigma_moe": ("split", "experts", "loops"),
    }.items()
    for operator in operators
}
_DECAY = 0.4  # of the steps after the growth, at the end


@dataclass(frozen=True)
class GrowthStudy:
    """Plans, trains and reports the study, in a folder."""

    folder: Path
    overrides: tuple[str, ...]
    jobs: int

    def train(self, console: Console) -> int:
        """Trains what is missing; returns an exit code."""
        worst = train_all([*self.sweep().values(), *self.drawn_sweep().values()], console)
        if worst:
            return worst
        for seed in self._file(TRUNKS).seeds:
            worst = max(worst, self._train_seed(seed, console))
            if worst == INTERRUPTED:
                break
        return worst

    def _train_seed(self, seed: int, console: Console) -> int:
        """Trains a seed's trunks, what grows out of them, and the same models from drawn weights."""
        trunks, drawn = self.trunks((seed,)), self.drawn((seed,))
        if code := train_all([trunks], console):
            return code
        with locked(self.folder / "grown"):
            runs = [self.grown(case, trunks, drawn) for case in CASES]
            states = {state.state for state in run_all(runs, at_once=self.jobs)}
        if "stopped" in states:
            return INTERRUPTED
        return max(int("failed" in states), train_all([drawn], console))

    def _file(self, path: Path, seeds: Sequence[int] | None = None) -> ComparisonFile:
        file = read_file(path)
        given = {"jobs": self.jobs, "seeds": file.seeds if seeds is None else tuple(seeds)}
        return file.model_copy(update=given)

    def _plan(self, file: ComparisonFile, name: str, *more: str) -> Request:
        return plan(file, [*self.overrides, *more], self.folder / name, origin=file.name)

    def _swept(self, file: ComparisonFile, name: str) -> dict[float, Request]:
        rates = {rate: f"optim.learning_rate={rate}" for rate in RATES}
        return {rate: self._plan(file, f"{name}-{rate:g}", text) for rate, text in rates.items()}

    def sweep(self) -> dict[float, Request]:
        """Returns the runs that choose the trunks' rates, by rate."""
        return self._swept(self._file(TRUNKS, (SWEEP_SEED,)), "rate")

    def drawn_sweep(self) -> dict[float, Request]:
        """Returns the runs that choose the drawn models' rates, by rate."""
        return self._swept(self._drawn_file((SWEEP_SEED,)), "drawn-rate")

    def trunks(self, seeds: Sequence[int] | None = None) -> Request:
        """Returns the trunks of seeds, each with its rate; their second half is *continued*."""
        rates = best_rates(self.sweep(), last_loss)
        return self._plan(with_rates(self._file(TRUNKS, seeds), rates), "continued")

    def drawn(self, seeds: Sequence[int] | None = None) -> Request:
        """Returns the grown models from drawn weights, each with its rate."""
        rates = best_rates(self.drawn_sweep(), last_loss)
        return self._plan(with_rates(self._drawn_file(seeds), rates), "drawn")

    def _drawn_file(self, seeds: Sequence[int] | None) -> ComparisonFile:
        """Returns the drawn models, with the steps that the trunks' last FLOPs pay for."""
        file = self._file(DRAWN, seeds)
        trunks = {arm.name: arm.config for arm in self._plan(self._file(TRUNKS), "").arms}
        arms = {arm.name: arm.config for arm in self._plan(file, "").arms}
        entries = {}
        for name, entry in file.arms.items():
            steps = steps_for(arms[name], trunks[CASES[name][0]])
            entries[name] = entry.model_copy(update={"train": {**entry.train, "steps": steps}})
        return file.model_copy(update={"arms": entries})

    def grown(self, case: str, trunks: Request, drawn: Request) -> PlannedRun:
        """Returns a run that grows out of its trunk of the same seed, as its folder says."""
        trunk, words = CASES[case]
        (before,) = [run for run in trunks.runs if run.arm == trunk]
        (other,) = [run for run in drawn.runs if run.arm == case]
        steps, at, seed = other.config.train.steps, half(before.config), before.seed
        lengths = {"train.steps": at + steps, "optim.decay_steps": round(_DECAY * steps)}
        changes = [f"{key}={value}" for key, value in lengths.items()]
        source, folder = f"{before.folder}@{at}", self.grown_folder(case, seed)
        start = moebius.start_from(source, *changes, grow=words)
        if start.config.model != other.config.model:
            raise CompareError(f"{DRAWN.name}: the arm {case} is not the model that grows")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / START, {"source": source, "overrides": changes, "grow": words})
        return PlannedRun(case, seed, start.config, folder)

    def grown_folder(self, case: str, seed: int) -> Path:
        """Returns the run folder of a case and seed."""
        return self.folder / "grown" / case / f"seed-{seed}"

    # The report -----------------------------------------------------------------------------------

    def report(self) -> Report:
        """Returns the table of what has finished."""
        rates = [best_rates(each, last_loss) for each in (self.sweep(), self.drawn_sweep())]
        if not all(rates):
            return Report(
                (), "No result yet: the sweeps of learning rates have not finished.", None
            )
        found, (trunks, drawn) = self._losses(), (self.trunks(), self.drawn())
        labels = {name: entry.label for name, entry in read_file(DRAWN).arms.items()}
        write_json(self.folder / "losses.json", {"rate": rates[0] | rates[1], "losses": found})
        head = ("case", "seeds", "continued", "grown", "drawn", "grown − continued", "95 %")
        head = (*head, "grown − drawn", "95 %", "just after")
        title = f"Loss at equal FLOPs after step {half(trunks.runs[0].config)}, paired by seed"
        rows = [(labels[case], *_row(by_seed)) for case, by_seed in found.items()]
        planned = len(drawn.runs) * 2 + len(trunks.runs)
        words = f"{planned} runs are planned; a seed counts when its three runs have finished."
        return Report(
            (Table(title, head, tuple(rows)),), words, draw(found, labels) if found else None
        )

    def _losses(self) -> Losses:
        """Returns the losses of seeds whose three runs have finished, by case."""
        trunks, drawn = self.trunks(), self.drawn()
        before, from_nothing = (_by_arm(finished(each)) for each in (trunks, drawn))
        losses: Losses = {case: {} for case in CASES}
        for run in drawn.runs:  # the same cases and seeds
            folder, trunk = self.grown_folder(run.arm, run.seed), CASES[run.arm][0]
            at = half(trunks.runs[0].config)
            config = changed(run.config, train={"steps": at + run.config.train.steps})
            grown = read_run(replace(run, folder=folder, config=config))
            continued = before.get(trunk, {}).get(run.seed)
            other = from_nothing.get(run.arm, {}).get(run.seed)
            if grown and continued and other:
                last = {"continued": continued.loss, "grown": grown.loss, "drawn": other.loss}
                losses[run.arm][run.seed] = last | {"after": _just_after(grown, continued)}
        return {case: by_seed for case, by_seed in losses.items() if by_seed}


def half(config: moebius.Config) -> int:
    """Returns the step at which a trunk grows."""
    return config.train.steps // 2


def steps_for(config: moebius.Config, trunk: moebius.Config) -> int:
    """Returns the steps that cost the FLOPs of a trunk's second half."""
    each = [moebius.size_of(one).training_flops / one.train.steps for one in (trunk, config)]
    return round((trunk.train.steps - half(trunk)) * each[0] / each[1])


def _by_arm(runs: Sequence[RunResult]) -> dict[str, dict[int, RunResult]]:
    found: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        found.setdefault(run.arm, {})[run.seed] = run
    return found


def _less(by_seed: Mapping[int, Mapping[str, float]], other: str) -> list[float]:
    """Returns grown − another arm, by seed."""
    return [losses["grown"] - losses[other] for losses in by_seed.values()]


def _row(by_seed: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
    """Returns a case's losses and differences."""
    arms = ("continued", "grown", "drawn")
    means = [f"{fmean(losses[arm] for losses in by_seed.values()):.3f}" for arm in arms]
    differences = []
    for other in ("continued", "drawn"):
        less = _less(by_seed, other)
        differences += [f"{fmean(less):+.3f}", ends(interval(less, claims=len(CASES)))]
    after = fmean(losses["after"] for losses in by_seed.values())
    return (str(len(by_seed)), *means, *differences, f"{after:+.3f}")


def draw(found: Losses, labels: Mapping[str, str]) -> bytes:
    """Returns the differences of every case, by seed and with their interval, as a PNG."""
    from .pictures.drawing import (
        FAINT,
        MARKERS,
        PALETTE,
        finish_lines,
        label,
        new_figure,
        png,
        title,
    )

    figure = new_figure(2.6)
    for panel, other in zip(
        figure.subplots(1, 2, sharey=True), ("continued", "drawn"), strict=True
    ):
        for row, by_seed in enumerate(found.values()):
            less = _less(by_seed, other)
            if low_high := interval(less, claims=len(CASES)):
                panel.plot(low_high, [row] * 2, color=PALETTE[0], linewidth=1.4, alpha=0.6)
            style = {"color": PALETTE[0], "marker": MARKERS[0], "linestyle": "", "markersize": 4}
            panel.plot(less, [row] * len(less), **style)
        panel.axvline(0, color=FAINT, linestyle="--", linewidth=1)
        panel.set_yticks(range(len(found)), [labels[case] for case in found])
        panel.set_ylim(len(found) - 0.5, -0.5)
        finish_lines(panel)
        title(panel, f"grown − {other}")
        label(panel, x="nats per token")
    return png(
        figure, "left of 0, grown is better; a mark is a seed, a line the corrected 95 % interval"
    )


def _just_after(grown: RunResult, continued: RunResult) -> float:
    """Returns the difference at the first step where both were evaluated after the growth."""
    at, theirs = continued.steps // 2, dict(continued.curve)
    step, loss = next((step, loss) for step, loss in grown.curve if step > at and step in theirs)
    return loss - theirs[step]


if __name__ == "__main__":
    raise SystemExit(study_command("growth", GrowthStudy))
