"""Holds what both studies share: their report, finished runs, training until an interruption."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..compare.results import RunResult, read_run
from ..compare.tables import Table
from ..compare_command import Request, train

COMPARISONS = Path(__file__).parents[1] / "comparisons"
INTERRUPTED = 130


@dataclass(frozen=True)
class Report:
    """Holds what a study has found so far."""

    tables: tuple[Table, ...]
    words: str
    picture: bytes | None  # PNG


def finished(request: Request) -> list[RunResult]:
    """Returns the figures of all runs that have finished."""
    return [found for run in request.runs if (found := read_run(run)) is not None]


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
