"""`moebius status`, `watch` and `logs`: show jobs by their run folders alone."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.words import run_and_step, runs_near
from ..arguments import RUNS, Commands, add_command, add_run_argument
from ..console import console, print_message

if TYPE_CHECKING:
    from ...cluster.report.run_report import RunReport

EXIT_CODES = (
    "exit code: 0 if the run is going on or ended well, 75 if it was PREEMPTED, 1 if it FAILED "
    "or is LOST, 2 if there is no such run"
)


def add_commands(commands: Commands) -> None:
    """Declares the commands that show jobs."""
    _add_status(commands)
    _add_watch(commands)
    _add_logs(commands)


def _add_json(parser: argparse.ArgumentParser) -> None:
    text = "one JSON object per line (keys: docs/watch.md)"
    parser.add_argument("--json", action="store_true", help=text)


# status -------------------------------------------------------------------------------------------


def _add_status(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        _status,
        "show the status of a run, or list the runs below a folder, newest first",
        examples=["status", "status runs/mine", "status runs/sweep --all", "status --json"],
        notes=f"{EXIT_CODES}. Of several runs: 0.",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="*",
        metavar="RUN|FOLDER",
        default=[RUNS],
        help=f"run folders, or folders of them (three levels); default: {RUNS}/",
    )
    parser.add_argument(
        "--all", action="store_true", help="include runs that ended more than a week ago"
    )
    _add_json(parser)


def _status(options: argparse.Namespace) -> int:
    from ...cluster.job import JOURNAL

    options.folders = [run_and_step(folder)[0] for folder in options.folders]
    if len(options.folders) == 1 and (options.folders[0] / JOURNAL).is_file():
        return _show_one(options.folders[0], as_json=options.json)
    return _list_runs(options)


def _show_one(run_dir: Path, *, as_json: bool) -> int:
    from ...cluster.report.run_report import read_report

    report = read_report(run_dir)
    if as_json:
        print(json.dumps(report.record(), ensure_ascii=False))
    else:
        _print_report(report)
    return report.status.exit_code


def _print_report(report: "RunReport") -> None:
    from ...cluster.report.summary import closing_words

    console().print(closing_words(report.status, story=report.story()))


def _list_runs(options: argparse.Namespace) -> int:
    from ...cluster.job import JOURNAL, JobError
    from ...cluster.report.run_report import find_runs, is_recent, read_reports, run_table

    for folder in options.folders:
        if folder != RUNS and not folder.is_dir():
            raise JobError(f"{folder}: there is no such folder{runs_near(folder)}")
        marks = [name for name in ("checkpoints", "config.json") if (folder / name).exists()]
        if marks and not any(find_runs(folder)):
            what = f"has {' and '.join(marks)} but no {JOURNAL}, so no job was started here"
            raise JobError(f"{folder}: {what}; `moebius ckpt ls {folder}` lists its checkpoints")
    found = [run for folder in options.folders for run in find_runs(folder.absolute())]
    reports, problems = read_reports(found)
    for problem in problems:
        print_message("left out", problem, style="bold yellow")
    shown = [report for report in reports if options.all or is_recent(report)]
    if options.json:
        for report in shown:
            print(json.dumps(report.record(), ensure_ascii=False))
        return 0
    screen = console()
    root = options.folders[0].absolute()
    if shown:
        screen.print(run_table(shown, root))
    if hidden := len(reports) - len(shown):
        screen.print(f"{hidden} more ended over a week ago; --all shows them", highlight=False)
    elif not shown:
        screen.print(f"no runs under {root}", highlight=False, markup=False, soft_wrap=True)
    return 0


# watch --------------------------------------------------------------------------------------------


def _add_watch(commands: Commands) -> None:
    parser = add_command(
        commands,
        "watch",
        _watch,
        "follow a run until it ends: loss, throughput, experts, events",
        examples=["watch runs/mine"],
        notes=EXIT_CODES,
    )
    add_run_argument(parser)


def _watch(options: argparse.Namespace) -> int:
    from ...cluster.report.live import follow
    from ...cluster.report.run_report import read_report

    run_dir, _ = run_and_step(options.run_dir)
    follow(run_dir, console=console())
    report = read_report(run_dir)
    _print_report(report)
    return report.status.exit_code


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
            "logs runs/mine --generation 2",
        ],
        notes="exit code: 0, or 2 if there are no such logs",
    )
    add_run_argument(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only logs of this rank")
    parser.add_argument("--generation", type=int, metavar="N", help="only logs of this generation")
    parser.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="only the last N lines of each rank, over all its generations",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")
    _add_json(parser)


def _logs(options: argparse.Namespace) -> int:
    from ...cluster.report.logs import LogLine, follow_logs, skipped_logs

    if options.tail is not None and options.tail < 0:
        raise ValueError(f"--tail {options.tail}: must be at least 0")
    as_text = str
    if options.json:
        as_text = LogLine.as_json
    elif sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        as_text = LogLine.coloured
    run_dir, _ = run_and_step(options.run_dir)
    lines = follow_logs(
        run_dir,
        rank=options.rank,
        generation=options.generation,
        tail=options.tail,
        follow=options.follow,
    )
    if skipped := skipped_logs(run_dir):
        print(skipped, file=sys.stderr)
    for line in lines:
        print(as_text(line), flush=options.follow)
    return 0
