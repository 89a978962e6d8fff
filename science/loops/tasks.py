"""Counts the steps that looped models need to learn a made-up task (science/docs/loops.md)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console

from ..compare.file import ComparisonFile, read_file
from ..compare.results import RunResult
from ..compare.statistics import interval, paired_differences
from ..compare.tables import Table, short
from ..compare_command import Request, plan
from .study import COMPARISONS, Report, ends, finished, train_all

TASKS = ("p_hop", "permutation_words")
FILE = COMPARISONS / "loops_p_hop.toml"
RATES = (0.0015, 0.003, 0.006)
THRESHOLD = 0.2  # validation loss, nats per label


@dataclass(frozen=True)
class Steps:
    """Holds an arm's steps to the threshold by seed, with one rate."""

    rate: float
    by_seed: dict[int, int | None]  # None: not reached
    most: int  # steps of a run, which count for one that does not get there

    @property
    def doublings(self) -> dict[int, float]:
        """Returns log2 of the steps by seed."""
        return {seed: math.log2(steps or self.most) for seed, steps in self.by_seed.items()}


@dataclass(frozen=True)
class TaskStudy:
    """Plans, trains and reports the study of one task, in a folder."""

    task: str
    folder: Path
    overrides: tuple[str, ...]
    jobs: int

    def train(self, console: Console) -> int:
        """Trains every arm with every rate, seed by seed; returns the exit code."""
        return train_all(self._requests(), console)

    def _file(self) -> ComparisonFile:
        file = read_file(FILE)
        arms = {
            name: entry.model_copy(update={"recipe": entry.recipe.replace("p_hop", self.task)})
            for name, entry in file.arms.items()
        }
        values = {"arms": arms, "jobs": self.jobs, "name": f"loops_{self.task}"}
        return file.model_copy(update=values)

    def _plan(self, rate: float, seeds: tuple[int, ...]) -> Request:
        file = self._file().model_copy(update={"seeds": seeds})
        texts = [*self.overrides, f"optim.learning_rate={rate}"]
        return plan(file, texts, self.folder / f"rate-{rate:g}", origin=FILE.name)

    def _requests(self) -> Iterator[Request]:
        seeds = self._file().seeds
        for count in range(1, len(seeds) + 1):
            for rate in RATES:
                yield self._plan(rate, seeds[:count])

    def report(self) -> Report:
        """Returns the table and picture of what has finished."""
        from .picture import draw_steps

        requests = {rate: self._plan(rate, self._file().seeds) for rate in RATES}
        runs = {rate: finished(request) for rate, request in requests.items()}
        arms = requests[RATES[0]].arms
        found = {arm.label: steps_by_rate(arm.name, runs) for arm in arms}
        best = {label: min(each, key=_mean) for label, each in found.items() if each}
        fixed, rows = best.get(arms[0].label), []
        for arm in arms:
            if chosen := best.get(arm.label):
                row = (arm.label, f"{arm.size.parameters.total:,}", short(arm.size.flops.forward))
                rows.append((*row, *_row(chosen, fixed if arm is not arms[0] else None)))
        head = ("arm", "parameters", "FLOPs/token", "learning rate", "reached", "median steps")
        head = (*head, "by seed", "log2 ÷ fixed R", "95 %")
        title = f"{self.task}: steps to {THRESHOLD} nats per label"
        picture = draw_steps(title, found) if best else None
        return Report((Table(title, head, tuple(rows), (0, 6)),), "", picture)


def steps_by_rate(arm: str, runs: dict[float, list[RunResult]]) -> list[Steps]:
    """Returns an arm's steps at every rate, for the seeds that have finished at all of them."""
    by_rate = {rate: {r.seed: r for r in each if r.arm == arm} for rate, each in runs.items()}
    seeds = sorted(set.intersection(*(set(each) for each in by_rate.values())))
    return [
        Steps(rate, {seed: _reached(each[seed]) for seed in seeds}, each[seeds[0]].steps)
        for rate, each in by_rate.items()
        if seeds
    ]


def _reached(run: RunResult) -> int | None:
    """Returns the first evaluated step whose validation loss is at most the threshold."""
    return next((step for step, loss in run.curve if loss <= THRESHOLD), None)


def _mean(steps: Steps) -> float:
    return fmean(steps.doublings.values())


def _row(chosen: Steps, fixed: Steps | None) -> tuple[str, ...]:
    paired = paired_differences(chosen.doublings, fixed.doublings) if fixed else {}
    by_seed = [f"{steps or f'>{chosen.most}'}" for steps in chosen.by_seed.values()]
    middle = median(steps or math.inf for steps in chosen.by_seed.values())
    return (
        *(f"{chosen.rate:g}", f"{sum(map(bool, chosen.by_seed.values()))}/{len(by_seed)}"),
        *(f"{middle:g}" if middle < math.inf else f">{chosen.most}", " ".join(by_seed)),
        *(f"{fmean(paired.values()):+.2f}" if paired else "",),
        *(ends(interval(list(paired.values()), claims=5), "+.2f"),),
    )
