"""Holds what both studies share: their report, finished runs, training until an interruption."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..compare.file import ComparisonFile
from ..compare.results import RunResult, read_run
from ..compare.tables import Table
from ..compare_command import Request, train

COMPARISONS = Path(__file__).parents[1] / "comparisons"
INTERRUPTED = 130
SWEEP_SEED = 100  # of the runs that choose learning rates; it is not used otherwise


@dataclass(frozen=True)
class Report:
    """Holds what a study has found so far."""

    tables: tuple[Table, ...]
    words: str
    picture: bytes | None  # PNG


def finished(request: Request) -> list[RunResult]:
    """Returns the figures of all runs that have finished."""
    return [found for run in request.runs if (found := read_run(run)) is not None]


def best_rates(
    sweep: Mapping[float, Request], cost: Callable[[RunResult], Any]
) -> dict[str, float]:
    """Returns the learning rate of the lowest cost, by arm; nothing until all runs have finished."""
    found = {rate: {r.arm: cost(r) for r in finished(each)} for rate, each in sweep.items()}
    arms = {run.arm for each in sweep.values() for run in each.runs}
    if any(arms != set(by_arm) for by_arm in found.values()):
        return {}
    return {arm: min(found, key=lambda rate: found[rate][arm]) for arm in arms}


def with_rates(file: ComparisonFile, rates: Mapping[str, float]) -> ComparisonFile:
    """Gives every arm of a comparison its own learning rate, and says so in its label."""
    arms = {
        name: entry.model_copy(
            update={
                "label": f"{entry.label}, rate {rates[name]:g}",
                "optim": {**entry.optim, "learning_rate": rates[name]},
            }
        )
        for name, entry in file.arms.items()
    }
    return file.model_copy(update={"arms": arms})


def train_all(requests: Iterable[Request], console: Console) -> int:
    """Trains one request after another; an interruption ends them all, a failed run does not."""
    worst = 0
    for request in requests:
        worst = max(worst, train(request, console))
        if worst == INTERRUPTED:
            break
    return worst


def ends(interval: tuple[float, float] | None, form: str = "+.3f") -> str:
    """Returns an interval as text; nothing if there is none."""
    return "" if interval is None else f"{interval[0]:{form}} … {interval[1]:{form}}"
