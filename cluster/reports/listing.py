"""All runs below a folder, newest first: what `moebius jobs` shows.

A run is a folder with a journal. Runs are looked for three levels deep and not inside each other,
so that a folder of folders of runs is found and checkpoints and prepared data are not walked
through.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..job import JOURNAL, JobError
from ..preparation_progress import duration
from ..summary import STATE_STYLES
from .run_report import RunReport, read_report

MAX_DEPTH = 3
RECENT_S = 7 * 86400.0  # ended longer ago: not shown unless all are asked for

_RIGHT = ("step", "loss", "tokens/s", "restarts", "since")


def find_runs(root: Path, *, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yields the run folders below `root`, `root` itself included."""
    if (root / JOURNAL).is_file():
        yield root
        return
    if depth == 0:
        return
    try:
        with os.scandir(root) as entries:
            below = sorted(entry.name for entry in entries if _is_searched(entry))
    except PermissionError:
        return
    for name in below:
        yield from find_runs(root / name, depth=depth - 1)


def _is_searched(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def read_reports(run_dirs: Sequence[Path]) -> tuple[list[RunReport], list[str]]:
    """Returns the reports of runs, last submitted first, and why others could not be read."""
    reports, problems = [], []
    for run_dir in run_dirs:
        try:
            reports.append(read_report(run_dir))
        except JobError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{run_dir}: {error.strerror}")
    reports.sort(key=lambda report: report.status.submitted_at or 0.0, reverse=True)
    return reports, problems


def is_recent(report: RunReport) -> bool:
    """Whether the run has not ended, or ended within a week."""
    ended = report.status.ended_at
    return ended is None or time.time() - ended < RECENT_S


def jobs_table(reports: Sequence[RunReport], root: Path) -> Table:
    """Returns a table with one line per run."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("name", "state", "step", "loss", "tokens/s", "restarts", "since", "run folder"):
        table.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            overflow="fold",
            no_wrap=name not in ("name", "run folder"),
        )
    for report in reports:
        table.add_row(*_cells(report, root))
    return table


def _cells(report: RunReport, root: Path) -> list[Text]:
    status = report.status
    step = "" if status.step is None else f"{status.step}/{status.total_steps or '?'}"
    folder = status.run_dir
    shown = folder.relative_to(root) if folder != root and root in folder.parents else folder
    return [
        Text(report.name),
        Text(status.state.value, style=STATE_STYLES.get(status.state, "bold")),
        Text(step),
        Text("" if status.loss is None else f"{status.loss:.4f}"),
        Text("" if report.tokens_per_s is None else f"{report.tokens_per_s:,.0f}"),
        Text(str(status.restarts)),
        Text(duration(max(0.0, time.time() - report.since))),
        Text(str(shown)),
    ]
