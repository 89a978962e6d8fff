"""Counts the steps that looped models need to learn a made-up task (satellites/science/docs/loops.md)."""

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
from ..tasks.recipes import input_of
from .study import (
    COMPARISONS,
    SWEEP_SEED,
    Report,
    best_rates,
    ends,
    finished,
    kept_experts,
    measures_of,
    train_all,
    with_rates,
)

FILE = COMPARISONS / "loops_p_hop.toml"
RATES = (0.0015, 0.003, 0.006)
THRESHOLD = 0.2  # validation loss, nats per label
_S3 = {"length": 8, "group": "s3"}
TASKS = {
    "p_hop": (),
    "permutation_words": (
        "data.seq_len=20",  # of 8 elements, the start and the end, each with its label
        f"prepare.input=['{input_of('permutation_words', 'train', sequences=200_000, **_S3)}']",
        "prepare.validation_input="
        f"['{input_of('permutation_words', 'held_out', sequences=512, **_S3)}']",
        f"prepare.tokenizer={input_of('permutation_words', 'words', group='s3')}",
    ),
}
"""The tasks, and what their runs change of the task's recipes."""


@dataclass(frozen=True)
class Steps:
    """Holds an arm's steps to the threshold by seed."""

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
        """Sweeps the rates, then trains every seed with the best of each arm; the exit code."""
        return train_all(self.sweep().values(), console) or train_all(self._measured(), console)

    def _file(self) -> ComparisonFile:
        file = read_file(FILE)
        arms = {
            name: entry.model_copy(update={"recipe": entry.recipe.replace("p_hop", self.task)})
            for name, entry in file.arms.items()
        }
        values = {"arms": arms, "jobs": self.jobs, "name": f"loops_{self.task}"}
        return file.model_copy(update=values)

    def _plan(self, file: ComparisonFile, name: str, *more: str) -> Request:
        texts = [*TASKS[self.task], *self.overrides, *more]
        return plan(file, texts, self.folder / name, origin=FILE.name)

    def sweep(self) -> dict[float, Request]:
        """Returns the runs that choose the arms' rates, by rate."""
        file = self._file().model_copy(update={"seeds": (SWEEP_SEED,)})
        return {
            rate: self._plan(file, f"rate-{rate:g}", f"optim.learning_rate={rate}")
            for rate in RATES
        }

    def _measured(self) -> Iterator[Request]:
        """Returns the runs with every arm's own rate, all arms of a seed before the next seed."""
        rates = best_rates(self.sweep(), lambda run: (_reached(run) or math.inf, run.loss))
        file = self._file()
        for count in range(1, len(file.seeds) + 1 if rates else 0):
            few = file.model_copy(update={"seeds": file.seeds[:count]})
            yield self._plan(with_rates(few, rates), "seeds")

    def report(self) -> Report:
        """Returns the table and picture of what has finished."""
        from .picture import draw_steps

        *_, request = (None, *self._measured())
        if request is None:
            return Report((), "No result yet: the sweep of learning rates has not finished.", None)
        runs, rows = finished(request), []
        found = {arm.label: steps_of(arm.name, runs) for arm in request.arms}
        fixed = found[request.arms[0].label]
        for arm in request.arms:
            if (steps := found[arm.label]).by_seed:
                row = (arm.label, f"{arm.size.parameters.total:,}", short(arm.size.flops.forward))
                rows.append((*row, *_row(steps, None if steps is fixed else fixed)))
        head = ("arm", "parameters", "forward FLOPs/token", "reached", "median steps", "by seed")
        title = f"{self.task}: steps to {THRESHOLD} nats per label"
        table = Table(title, (*head, "log2 ÷ fixed R", "95 %"), tuple(rows), (0, 5))
        kept = []
        for arm in request.arms:
            folders = [request.folder / arm.name / f"seed-{s}" for s in found[arm.label].by_seed]
            loops = arm.config.model.num_repeats
            kept.append((arm.label, loops, [measures_of(folder) for folder in folders]))
        picture = draw_steps(self.task, found) if rows else None
        return Report((table, kept_experts(kept)), "", picture)


def steps_of(arm: str, runs: list[RunResult]) -> Steps:
    """Returns an arm's steps to the threshold, of the seeds that have finished."""
    own = [run for run in runs if run.arm == arm]
    return Steps(
        {run.seed: _reached(run) for run in own}, max((run.steps for run in own), default=0)
    )


def _reached(run: RunResult) -> int | None:
    """Returns the first evaluated step whose validation loss is at most the threshold."""
    return next((step for step, loss in run.curve if loss <= THRESHOLD), None)


def _row(steps: Steps, fixed: Steps | None) -> tuple[str, ...]:
    paired = paired_differences(steps.doublings, fixed.doublings) if fixed else {}
    by_seed = [f"{each or f'>{steps.most}'}" for each in steps.by_seed.values()]
    middle = median(each or math.inf for each in steps.by_seed.values())
    return (
        f"{sum(map(bool, steps.by_seed.values()))}/{len(by_seed)}",
        *(f"{middle:g}" if middle < math.inf else f">{steps.most}", " ".join(by_seed)),
        *(f"{fmean(paired.values()):+.2f}" if paired else "",),
        *(ends(interval(list(paired.values()), claims=5), "+.2f"),),
    )
