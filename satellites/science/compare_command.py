"""Implements `moebius compare`: arms over seeds, from one file or one line to one table and one
picture.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from .compare.file import ComparisonFile
    from .compare.plan import Arm, PlannedRun
    from .compare.runner import RunState

RUNS = Path("runs")
_INTERRUPTED = 130
_COST_STEPS = 10  # of every run of --cost


@dataclass(frozen=True)
class Request:
    """Holds what is compared: the file, its arms, their runs, and where they and the tables go."""

    file: "ComparisonFile"
    arms: "list[Arm]"
    runs: "list[PlannedRun]"
    folder: Path
    out: Path


def main(words: Sequence[str]) -> int:
    """Trains and compares the arms of a file or a sweep (entry point of the group
    moebius.commands).

    Raises:
        ValueError: the comparison is not possible.
    """
    options = _parser().parse_intermixed_args(words)
    from rich.console import Console

    from .compare.progress import render
    from .compare.tables import size_table

    request, console = _request(options), Console(stderr=options.json)
    if not options.table:
        console.print(render(size_table(request.file, request.arms)))
    if options.dry_run:
        return 0
    if options.cost:
        return _cost(options, request, console)
    code = 0 if options.table else train(request, console, restarted=_names(options.restart))
    _show(options, request)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius compare",
        description="Trains a list of recipes at equal size over seeds, and compares them.",
        epilog="Run the same command again to continue. Exit code: 0 all runs have finished, 1 a "
        "run has failed, 130 it was interrupted, 2 the comparison cannot be made.",
    )
    parser.add_argument(
        "file",
        metavar="FILE|RECIPE",
        help="satellites/science/docs/compare.md lists the keys of a file",
    )
    text = "compare these values of a RECIPE's key; several sweeps give all combinations"
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="section.key=A,B,…", help=text
    )
    text = "single values to change in every arm"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)
    text = "of all runs; default: runs/compare/NAME"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=text)
    text = "how many, or which; instead of the file's"
    parser.add_argument("--seeds", metavar="N|N,N,…", help=text)
    parser.add_argument("--steps", type=int, metavar="N", help="instead of the file's")
    text = "runs at a time, instead of the file's"
    parser.add_argument("--jobs", type=int, metavar="N", help=text)
    text = "show what is equal and what is not; train nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "show what has finished so far; train nothing"
    parser.add_argument("--table", action="store_true", help=text)
    text = "train these arms again; their earlier runs are removed"
    parser.add_argument("--restart", metavar="ARM,…", help=text)
    text = "measure each arm's step time, in turn; needs an idle machine"
    parser.add_argument("--cost", action="store_true", help=text)
    text = "of --cost; default: %(default)s"
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help=text)
    text = "for tables and picture; default: the folder"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _request(options: argparse.Namespace) -> Request:
    """Reads the file, applies the options and plans the runs."""
    from .compare.file import ComparisonFile, read_file, sweep_file

    sweeps = options.sweep
    file = (
        sweep_file(options.file, sweeps, options.overrides)
        if sweeps
        else read_file(Path(options.file))
    )
    given = {
        "seeds": _seeds(options.seeds),
        "steps": _positive(options.steps, "--steps"),
        "jobs": _positive(options.jobs, "--jobs"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    file = ComparisonFile.model_validate(file.model_dump(exclude_unset=True) | given)
    folder = options.folder or RUNS / "compare" / file.name
    request = plan(file, options.overrides, folder, origin=options.file)
    return replace(request, out=options.out) if options.out else request


def plan(file: "ComparisonFile", overrides: Sequence[str], folder: Path, *, origin: str) -> Request:
    """Plans a comparison: sizes its arms, and gives every run its place in the folder.

    Raises:
        ValueError: the comparison is not possible; the message names `origin`.
    """
    from .compare.plan import plan_arms, plan_runs

    arms, folder = plan_arms(file, overrides, origin=origin), folder.absolute()
    return Request(file, arms, plan_runs(file, arms, folder), folder, folder)


def _names(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _seeds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if len(seeds) == 1:
        seeds = tuple(range(seeds[0]))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"--seeds {text}: give how many, such as 5, or different whole numbers, such as 0,1,7"
        )
    return seeds


def _positive(number: int | None, option: str) -> int | None:
    if number is not None and number < 1:
        raise ValueError(f"{option} {number} must be at least 1")
    return number


def _prepared(request: Request, console: "Console") -> Request:
    """Prepares the data shared by all arms, and returns the runs that read it."""
    import moebius

    from .compare.plan import changed, with_data

    console.print("preparing the data", style="dim")
    directory = moebius.prepare(request.arms[0].config, RUNS).data.directory
    arms = [
        replace(arm, config=changed(arm.config, data={"directory": directory}))
        for arm in request.arms
    ]
    return replace(request, arms=arms, runs=with_data(request.runs, directory))


def _cost(options: argparse.Namespace, request: Request, console: "Console") -> int:
    """Measures the time of a step of every arm."""
    from .compare.cost import measure_costs
    from .compare.progress import render
    from .compare.runner import locked
    from .compare.tables import cost_table, how_measured, write_costs

    rounds = _positive(options.rounds, "--rounds")
    assert rounds is not None
    with locked(request.folder):
        request = _prepared(request, console)
        costs = measure_costs(
            request.file,
            request.arms,
            request.folder / "cost",
            rounds=rounds,
            steps=_COST_STEPS,
            on_run=lambda words: console.print(words, markup=False, highlight=False),
        )
    written = write_costs(costs, request.arms, request.out)
    console.print(render(cost_table(costs)))
    console.print(how_measured(costs), style="dim" if costs.was_quiet else "yellow")
    _tell_written(written, console)
    return 0


def train(request: Request, console: "Console", *, restarted: Sequence[str] = ()) -> int:
    """Prepares the data, trains missing runs, and returns the exit code of `moebius compare`.

    Raises:
        ValueError: the folder is in use, or holds runs of other settings.
    """
    from .compare.plan import refuse_stale
    from .compare.progress import progress_of
    from .compare.results import collect
    from .compare.runner import locked, restart, run_all
    from .compare.tables import write_results

    file = request.file
    tasks = {"tasks": list(file.tasks), "data": file.task_data, "limit": file.task_limit}
    with locked(request.folder):
        if restarted:
            restart(request.runs, restarted)
        refuse_stale(request.runs, request.folder)
        request = _prepared(request, console)
        with progress_of(request.runs, console) as watch:

            def on_end(state: "RunState") -> None:
                watch.on_end(state)
                write_results(collect(file, request.arms, request.runs), request.arms, request.out)

            states = run_all(
                request.runs,
                at_once=file.jobs,
                scoring=lambda run: tasks if file.tasks else None,
                on_change=watch.on_change,
                on_end=on_end,
            )
    ends = {state.state for state in states}
    if "failed" in ends:
        return 1
    return 0 if ends == {"finished"} else _INTERRUPTED


def _show(options: argparse.Namespace, request: Request) -> None:
    """Writes and prints the results."""
    from rich.console import Console

    from .compare.progress import render
    from .compare.results import as_values, collect
    from .compare.tables import RULE, result_tables, write_results

    results = collect(request.file, request.arms, request.runs)
    written = write_results(results, request.arms, request.out)
    if options.json:
        print(json.dumps(as_values(results), indent=1))
        return
    console = Console()
    for table in result_tables(results):
        console.print(render(table))
    console.print(RULE, style="dim")
    _tell_written(written, console)


def _tell_written(written: "list[Path]", console: "Console") -> None:
    for path in written:
        console.print(f"written: {path}", soft_wrap=True, markup=False, highlight=False)
