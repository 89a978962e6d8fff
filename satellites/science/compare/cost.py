"""Measures the time of a step of every arm, relative to the baseline's.

Run it apart from training, on an otherwise idle machine. Short runs follow each other, each in a
separate process, with the arms alternating in every round, so that slow changes (clock,
temperature) affect all arms alike. Times are paired by round: a ratio compares two adjacent runs.
"""

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moebius

from .environment import environment
from .file import CompareError, ComparisonFile
from .plan import Arm, PlannedRun, changed
from .runner import run_all
from .statistics import Spread, spread

_WARM_STEPS = 3
_QUIET = 0.1  # of a core: what others may take without a word
_WATCH_S = 0.5


@dataclass(frozen=True)
class Measured:
    """Holds one short run of an arm."""

    step_s: float  # median, after warming up
    busy_cores: float  # taken by other processes just before


@dataclass(frozen=True)
class ArmCost:
    """Summarizes an arm over the rounds."""

    arm: Arm
    step_s: Spread
    time_ratio: Spread  # to the baseline, by round


@dataclass(frozen=True)
class Costs:
    """Holds the measurements and the machine."""

    file: ComparisonFile
    arms: tuple[ArmCost, ...]
    rounds: int
    steps: int
    busy_cores: float  # the largest before any run
    environment: dict[str, Any]

    @property
    def was_quiet(self) -> bool:
        """Tells whether the machine was otherwise idle."""
        return self.busy_cores <= _QUIET


Measure = Callable[[Arm, Path, int], Measured]


def measure_costs(
    file: ComparisonFile,
    arms: Sequence[Arm],
    folder: Path,
    *,
    rounds: int,
    steps: int,
    on_run: Callable[[str], None] = lambda words: None,
    measure: Measure | None = None,
) -> Costs:
    """Measures all arms in turn, round by round.

    Raises:
        CompareError: a run failed, or an arm has several ranks.
    """
    for arm in arms:
        if arm.config.world_size > 1:
            raise CompareError(
                f"arm {arm.name}: cost is measured on one rank, and job.ranks_per_node="
                f"{arm.config.job.ranks_per_node}: give job.ranks_per_node=1 mesh.ep=1"
            )
    measure = measure or _measure
    found: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            measured = measure(arm, folder / arm.name, steps)
            found[arm.name].append(measured)
            on_run(f"round {number + 1}, {arm.name}: {measured.step_s * 1e3:.1f} ms a step")
    return Costs(
        file=file,
        arms=tuple(_sum_up(arm, found[arm.name], found[file.baseline]) for arm in arms),
        rounds=rounds,
        steps=steps,
        busy_cores=max(run.busy_cores for runs in found.values() for run in runs),
        environment=environment(),
    )


def _sum_up(arm: Arm, runs: Sequence[Measured], baseline: Sequence[Measured]) -> ArmCost:
    ratios = [ours.step_s / theirs.step_s for ours, theirs in zip(runs, baseline, strict=True)]
    return ArmCost(arm, spread([run.step_s for run in runs]), spread(ratios))


def _measure(arm: Arm, folder: Path, steps: int) -> Measured:
    """Trains an arm for some steps in a separate process and reads their times from its log."""
    shutil.rmtree(folder, ignore_errors=True)
    short = {"steps": _WARM_STEPS + steps, "log_every": 1, "eval_every": 0, "eval_rows": 1}
    config = changed(arm.config, train=short, checkpoint={"every": 0})
    busy = busy_cores()
    [ended] = run_all([PlannedRun(arm.name, config.train.seed, config, folder)], at_once=1)
    if ended.state != "finished":
        raise CompareError(f"arm {arm.name}: could not be measured\n{ended.why}")
    records = moebius.history(folder).records()
    seconds = [record["step_s"] for record in records if record["kind"] == "train"]
    return Measured(statistics.median(seconds[_WARM_STEPS:]), busy)


def busy_cores() -> float:
    """Returns how many cores other processes use, while this one sleeps."""
    import psutil

    return psutil.cpu_percent(interval=_WATCH_S) / 100 * (psutil.cpu_count() or 1)
