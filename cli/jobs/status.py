"""How jobs stand: `moebius status`, `jobs`, `logs` and `top`, from run folders alone."""

import argparse
import json
import os
import sys
from pathlib import Path

from ..arguments import RUNS, Commands, add_command, add_run_argument
from ..messages import print_message

_WIDTH_OF_A_PIPE = 10_000  # whoever reads it has room
EXIT_CODES = (
    "exit code: 0 where the run goes on or ended well, 75 where it was PREEMPTED, 1 where it has "
    "FAILED or is LOST, 2 where there is no such run"
)


def add_commands(commands: Commands) -> None:
    """Declares the commands that show how jobs stand."""
    _add_status(commands)
    _add_watch(commands)
    _add_jobs(commands)
    _add_logs(commands)
    _add_top(commands)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per line (keys: docs/jobs.md)"
    )


# status -------------------------------------------------------------------------------------------


def _add_status(commands: Commands) -> None:
    text = "show how runs stand, from their run folders alone"
    parser = add_command(
        commands,
        "status",
        _status,
        text,
        examples=["status", "status runs/mine --watch", "status runs/mine --json"],
        notes=EXIT_CODES,
    )
    parser.add_argument(
        "run_dirs", type=Path, nargs="*", metavar="RUN", help=f"default: every run under {RUNS}/"
    )
    parser.add_argument("--watch", action="store_true", help="follow one run until it has ended")
    _add_json(parser)


def _add_watch(commands: Commands) -> None:
    parser = add_command(
        commands,
        "watch",
        _watch,
        "follow a run in the terminal until it has ended: loss, throughput, expert load, events",
        examples=["watch runs/mine"],
        notes=EXIT_CODES,
    )
    add_run_argument(parser)


def _watch(options: argparse.Namespace) -> int:
    """Carries out `moebius watch`."""
    return _show_one(options.run_dir, watch=True)


def _status(options: argparse.Namespace) -> int:
    """Carries out `moebius status`."""
    from ...cluster.job import JobError
    from ...cluster.report.run_report import read_report

    folders = options.run_dirs or sorted(path.parent for path in RUNS.glob("*/journal.jsonl"))
    if not folders:
        raise JobError(
            f"no runs under {RUNS.absolute()}: name a run folder, or start one with `moebius "
            "submit smoke`"
        )
    if options.watch and len(options.run_dirs) != 1:
        raise JobError("--watch follows one run: name it")
    if options.json and options.watch:
        raise JobError("--json tells how a run stands now: leave out --watch")
    if options.json:
        reports = [read_report(folder) for folder in folders]
        for report in reports:
            print(json.dumps(report.record(), ensure_ascii=False))
        return reports[0].status.exit_code if len(options.run_dirs) == 1 else 0
    if len(options.run_dirs) == 1:
        return _show_one(folders[0], watch=options.watch)
    return _show_several(folders)


def _show_one(run_dir: Path, *, watch: bool) -> int:
    from rich.console import Console

    from ...cluster.report.run_report import read_report
    from ...cluster.report.summary import closing_words

    console = Console()
    if watch:
        from ...cluster.report.live import follow

        follow(run_dir, console=console)
    report = read_report(run_dir)
    console.print(closing_words(report.status, story=report.story()))
    return report.status.exit_code


def _show_several(run_dirs: list[Path]) -> int:
    from rich.console import Console

    from ...cluster.job import read_status
    from ...cluster.report.summary import status_table

    Console().print(status_table([read_status(folder) for folder in run_dirs]))
    return 0


# jobs ---------------------------------------------------------------------------------------------


def _add_jobs(commands: Commands) -> None:
    parser = add_command(
        commands,
        "jobs",
        _jobs,
        "list the runs under a folder, newest first",
        examples=["jobs", "jobs --root runs/sweep --all", "jobs --json"],
        notes="exit code: 0, or 2 where the folder cannot be read",
    )
    parser.add_argument(
        "--root", type=Path, metavar="DIR", default=RUNS, help=f"default: {RUNS}/; three levels"
    )
    parser.add_argument(
        "--all", action="store_true", help="those that ended more than a week ago, too"
    )
    _add_json(parser)


def _jobs(options: argparse.Namespace) -> int:
    """Carries out `moebius jobs`."""
    from ...cluster.job import JobError
    from ...cluster.report.run_list import find_runs, is_recent, read_reports

    root = options.root.absolute()
    if options.root != RUNS and not root.is_dir():
        raise JobError(f"{options.root}: there is no such folder")
    found = list(find_runs(root)) if root.is_dir() else []
    reports, problems = read_reports(found)
    for problem in problems:
        print_message("left out", problem, style="bold yellow")
    shown = [report for report in reports if options.all or is_recent(report)]
    if options.json:
        for report in shown:
            print(json.dumps(report.record(), ensure_ascii=False))
        return 0
    from rich.console import Console

    from ...cluster.report.run_list import jobs_table

    console = Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console = Console(width=_WIDTH_OF_A_PIPE)
    if shown:
        console.print(jobs_table(shown, root, width=console.width))
    if hidden := len(reports) - len(shown):
        console.print(f"{hidden} more ended over a week ago: --all", highlight=False)
    elif not shown:
        console.print(f"no runs under {root}", highlight=False, markup=False, soft_wrap=True)
    return 0


# logs ---------------------------------------------------------------------------------------------


def _add_logs(commands: Commands) -> None:
    parser = add_command(
        commands,
        "logs",
        _logs,
        "print the logs of a run's ranks, generation by generation",
        examples=[
            "logs runs/mine --rank 0 --follow",
            "logs runs/mine --tail 20",
            "logs runs/mine --generation 2 --since 10m",
        ],
        notes="exit code: 0, or 2 where there are no such logs",
    )
    add_run_argument(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--generation", type=int, metavar="N", help="only this generation")
    parser.add_argument(
        "--since", metavar="TIME", help='how long ago ("10m", "2h") or when ("2026-11-22 03:00")'
    )
    parser.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="only the last N lines of each rank, over all its generations",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="a colour per rank; auto: on a terminal, unless NO_COLOR is set",
    )
    _add_json(parser)


def _logs(options: argparse.Namespace) -> int:
    """Carries out `moebius logs`."""
    from ...cluster.report.logs import LogLine, follow_logs, parse_since

    if options.tail is not None and options.tail < 0:
        raise ValueError(f"--tail {options.tail}: at least 0")
    as_text = str
    if options.json:
        as_text = LogLine.as_json
    elif _in_colour(options.color):
        as_text = LogLine.coloured
    lines = follow_logs(
        options.run_dir,
        rank=options.rank,
        generation=options.generation,
        since=None if options.since is None else parse_since(options.since),
        tail=options.tail,
        follow=options.follow,
    )
    for line in lines:
        print(as_text(line), flush=options.follow)
    return 0


def _in_colour(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


# top ----------------------------------------------------------------------------------------------


def _add_top(commands: Commands) -> None:
    parser = add_command(
        commands,
        "top",
        _top,
        "watch what every rank of a run is doing: step, processor, memory",
        examples=["top runs/mine", "top runs/mine --once --json"],
        notes=EXIT_CODES,
    )
    add_run_argument(parser)
    parser.add_argument("--once", action="store_true", help="one look instead of a live view")
    _add_json(parser)


def _top(options: argparse.Namespace) -> int:
    """Carries out `moebius top`."""
    from rich.console import Console

    from ...cluster.job import read_status
    from ...cluster.report.ranks import look_once, show_top

    if options.json:
        if not options.once:
            raise ValueError("--json prints one look: add --once")
        print(json.dumps(look_once(options.run_dir), ensure_ascii=False))
        return read_status(options.run_dir).exit_code
    return show_top(options.run_dir, Console(), once=options.once).exit_code
