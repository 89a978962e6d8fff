"""Collects a comparison's results: figures of every run, spread over seeds, paired differences,
verdicts.

Results are read from the run folders at any time, so a table is available while runs continue;
unfinished runs are omitted and counted.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moebius

from ..files import read_json
from .file import ClaimEntry, ComparisonFile
from .one_run import ORIGIN, SCORES
from .plan import Arm, PlannedRun
from .runner import is_trained
from .statistics import Side, Spread, Verdict, interval, paired_differences, spread, verdict

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class RunResult:
    """Holds the figures of one finished run."""

    arm: str
    seed: int
    steps: int
    loss: float  # of validation after the last step, nats per token
    curve: Curve  # validation loss by step
    step_s: float  # median
    seconds: float  # from the first to the last line of the log; of a run in one go
    scores: dict[str, float]  # of tasks, each its first metric
    commits: tuple[str, ...]  # of the code that trained it

    @property
    def perplexity(self) -> float:
        """Returns exp of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class ArmResult:
    """Summarizes an arm over its seeds, and against the baseline."""

    arm: Arm
    runs: tuple[RunResult, ...]
    loss: Spread | None  # None: no run has finished
    differences: dict[int, float]  # loss − baseline's, by seed
    difference: Spread | None
    interval: tuple[float, float] | None  # of that difference, corrected for the number of arms
    scores: dict[str, Spread]


@dataclass(frozen=True)
class Judged:
    """Holds a claim of the file and its verdict."""

    claim: ClaimEntry
    against: str
    values: dict[int, float]
    interval: tuple[float, float] | None  # of their mean, corrected for the number of claims
    verdict: Verdict


@dataclass(frozen=True)
class Results:
    """Holds everything known of a comparison."""

    file: ComparisonFile
    arms: tuple[ArmResult, ...]
    claims: tuple[Judged, ...]
    finished: int
    planned: int
    origins: tuple[dict[str, Any], ...]  # machines and code that the finished runs had

    @property
    def is_complete(self) -> bool:
        """Tells whether every run has finished."""
        return self.finished == self.planned


def read_run(run: PlannedRun) -> RunResult | None:
    """Returns a run's figures; None unless it has finished."""
    if not is_trained(run):
        return None
    lines = moebius.history(run.folder).sample()
    trained = [line for line in lines if line["kind"] == "train"]
    curve = sorted(
        (line["step"], line["loss"])
        for line in lines
        if line["kind"] == "eval" and line["step"] <= run.config.train.steps
    )
    if not curve or not trained or curve[-1][0] != run.config.train.steps:
        return None
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        steps=run.config.train.steps,
        loss=curve[-1][1],
        curve=curve,
        step_s=statistics.median(line["step_s"] for line in trained),
        seconds=round(lines[-1]["time"] - lines[0]["time"], 1),
        scores=_scores(run.folder),
        commits=tuple(dict.fromkeys(start["commit"] for start in _starts(run.folder))),
    )


def _scores(folder: Path) -> dict[str, float]:
    found: Mapping[str, Mapping[str, float]] = read_json(folder / SCORES).get("scores", {})
    return {task: next(iter(metrics.values())) for task, metrics in found.items() if metrics}


def _starts(folder: Path) -> list[dict[str, Any]]:
    return read_json(folder / ORIGIN).get("starts", [])


def collect(file: ComparisonFile, arms: Sequence[Arm], runs: Sequence[PlannedRun]) -> Results:
    """Reads all finished runs and compares them."""
    found = [(run, result) for run in runs if (result := read_run(run)) is not None]
    by_arm: dict[str, tuple[RunResult, ...]] = {
        arm.name: tuple(result for _, result in found if result.arm == arm.name) for arm in arms
    }
    origins = {
        json.dumps(start, sort_keys=True): start
        for run, _ in found
        for start in _starts(run.folder)
    }
    return Results(
        file=file,
        arms=tuple(_sum_up(arm, by_arm[arm.name], by_arm[file.baseline], file) for arm in arms),
        claims=tuple(_judge(claim, by_arm, file) for claim in file.claims),
        finished=len(found),
        planned=len(runs),
        origins=tuple(origins.values()),
    )


def _sum_up(
    arm: Arm,
    runs: tuple[RunResult, ...],
    baseline: tuple[RunResult, ...],
    file: ComparisonFile,
) -> ArmResult:
    is_baseline = arm.name == file.baseline
    differences = {} if is_baseline else paired_differences(_losses(runs), _losses(baseline))
    tasks = sorted({task for run in runs for task in run.scores})
    return ArmResult(
        arm=arm,
        runs=runs,
        loss=spread([run.loss for run in runs]) if runs else None,
        differences=differences,
        difference=spread(list(differences.values())) if differences else None,
        interval=interval(list(differences.values()), claims=len(file.arms) - 1),
        scores={
            task: spread([run.scores[task] for run in runs if task in run.scores]) for task in tasks
        },
    )


def _losses(runs: Sequence[RunResult]) -> dict[int, float]:
    return {run.seed: run.loss for run in runs}


def _judge(
    claim: ClaimEntry, by_arm: Mapping[str, Sequence[RunResult]], file: ComparisonFile
) -> Judged:
    against = claim.against or file.baseline
    values = paired_differences(_losses(by_arm[claim.arm]), _losses(by_arm[against]))
    numbers, claims = list(values.values()), len(file.claims)
    ends = interval(numbers, claims=claims)
    word = verdict(numbers, claim.side, claim.bound, claims=claims)
    return Judged(claim, against, values, ends, word)


SIDES: dict[Side, str] = {"at most": "≤", "above": ">", "below": "<"}


def as_values(results: Results) -> dict[str, Any]:
    """Returns everything as plain values for JSON; a number that is not finite is a word."""
    values = {
        "comparison": results.file.model_dump(mode="json"),
        "finished": results.finished,
        "planned": results.planned,
        "origins": list(results.origins),
        "arms": [_arm_values(arm) for arm in results.arms],
        "claims": [
            judged.claim.model_dump(mode="json")
            | {
                "against": judged.against,
                "differences": judged.values,
                "interval": judged.interval,
                "verdict": judged.verdict,
            }
            for judged in results.claims
        ],
        "runs": [
            {
                "arm": run.arm,
                "seed": run.seed,
                "steps": run.steps,
                "loss": run.loss,
                "perplexity": run.perplexity,
                "step_s": run.step_s,
                "seconds": run.seconds,
                "scores": run.scores,
                "commits": list(run.commits),
                "curve": run.curve,
            }
            for arm in results.arms
            for run in arm.runs
        ],
    }
    return _finite(values)


def _arm_values(result: ArmResult) -> dict[str, Any]:
    arm, size = result.arm, result.arm.size
    return {
        "arm": arm.name,
        "label": arm.label,
        "scaled": arm.scaled,
        "value": arm.value,
        "deviation": arm.deviation,
        "parameters": size.parameters.total,
        "active_parameters": size.parameters.active,
        "forward_flops_per_token": size.flops.forward,
        "training_flops": size.training_flops,
        "tokens": size.tokens,
        "loss": _spread_values(result.loss),
        "differences": result.differences,
        "difference": _spread_values(result.difference),
        "interval": result.interval,
        "scores": {task: _spread_values(score) for task, score in result.scores.items()},
    }


def _spread_values(found: Spread | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "mean": found.mean,
        "standard_deviation": found.deviation,
        "min": found.least,
        "max": found.most,
        "seeds": found.count,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
