"""Holds what studies share: their command and report, finished runs, training until an interruption."""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console

import moebius

from ..compare.file import ComparisonFile
from ..compare.results import RunResult, read_run
from ..compare.statistics import interval
from ..compare.tables import Table, markdown
from ..compare_command import Request, train
from ..files import write_whole

COMPARISONS = Path(__file__).parents[1] / "comparisons"
INTERRUPTED = 130
_LAST_SHARE = 0.1  # of the steps, over which measures are means
SWEEP_SEED = 100  # of the runs that choose learning rates; it is not used otherwise


@dataclass(frozen=True)
class Report:
    """Holds what a study has found so far."""

    tables: tuple[Table, ...]
    words: str
    picture: bytes | None  # PNG


class Study(Protocol):
    """Trains the runs of a protocol, and reports what has finished of them."""

    @property
    def folder(self) -> Path:
        """Returns where its runs and its report are."""
        ...

    def train(self, console: Console) -> int:
        """Trains what is missing; returns an exit code."""
        ...

    def report(self) -> Report:
        """Returns what has finished."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every study takes from the command line."""
    parser.add_argument("folder", type=Path, help="of all runs and of the report")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="train nothing")


def study_command(name: str, study: Callable[[Path, tuple[str, ...], int], Study]) -> int:
    """Trains and reports a study as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m moebius_science.{name}",
        description=f"satellites/science/docs/{name}.md has the protocol",
    )
    add_arguments(parser)
    options = parser.parse_intermixed_args()
    chosen = study(options.folder.absolute(), tuple(options.overrides), options.jobs)
    return carry_out(chosen, name, only_report=options.report)


def carry_out(study: Study, name: str, *, only_report: bool) -> int:
    """Trains a study, and writes and prints its report, NAME.md and NAME.png; the exit code."""
    console, folder = Console(), study.folder
    code = 0 if only_report else study.train(console)
    found = study.report()
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"## {table.title}\n\n{markdown(table)}" for table in found.tables]
    words = "\n\n".join([*parts, found.words]).strip() + "\n"
    write_whole(folder / f"{name}.md", words.encode())
    if found.picture:
        write_whole(folder / f"{name}.png", found.picture)
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    return code


def finished(request: Request) -> list[RunResult]:
    """Returns the figures of all runs that have finished."""
    return [found for run in request.runs if (found := read_run(run)) is not None]


def last_loss(run: RunResult) -> float:
    """Returns a run's last validation loss; infinity if it diverged."""
    return run.loss if math.isfinite(run.loss) else math.inf


def best_rates(
    sweep: Mapping[float, Request], cost: Callable[[RunResult], Any]
) -> dict[str, float]:
    """Returns the learning rate of the lowest cost, by arm; nothing until all runs have finished."""
    found = {rate: finished(each) for rate, each in sweep.items()}
    if any(len(found[rate]) < len(each.runs) for rate, each in sweep.items()):
        return {}
    costs: dict[str, dict[float, Any]] = defaultdict(dict)
    for rate, runs in found.items():
        for run in runs:
            costs[run.arm][rate] = cost(run)
    return {arm: min(by_rate, key=by_rate.__getitem__) for arm, by_rate in costs.items()}


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


def measures_of(run_dir: Path) -> dict[str, float]:
    """Returns the measures of routing by loop, as means over the last tenth of steps."""
    lines = [each for each in moebius.history(run_dir).records() if each["kind"] == "train"]
    found: dict[str, list[float]] = defaultdict(list)
    for line in lines[-max(1, round(_LAST_SHARE * len(lines))) :]:
        for name, value in line.get("auxiliary_losses", {}).items():
            if name.startswith(("kept_experts/", "routing_divergence/")):
                found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}


def kept_experts(arms: Iterable[tuple[str, int, Sequence[Mapping[str, float]]]]) -> Table:
    """Returns the table of routing from loop to loop, of arms: label, loops, measures by seed."""
    rows = []
    for label, loops, measures in arms:
        for loop in range(2, loops + 1):
            names = (f"kept_experts/{loop}", f"routing_divergence/{loop}")
            found = [values for values in measures if names[0] in values]
            if found:
                kept, divergence = ([values[name] for values in found] for name in names)
                row = (label, str(loop), str(len(found)), f"{fmean(kept):.3f}")
                rows.append((*row, ends(interval(kept), ".3f"), f"{fmean(divergence):.4f}"))
    head = ("arm", "loop", "seeds", "share of experts kept", "95 %", "divergence, nats")
    return Table("Experts kept from loop to loop", head, tuple(rows), (0,))


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
