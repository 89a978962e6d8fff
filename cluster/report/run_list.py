"""Lists the runs below a folder, newest first, for `moebius status FOLDER`.

A run is a folder with a journal. The search goes three levels deep and stops at runs, so checkpoints and
prepared data are not searched.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ..job import JOURNAL, JobError
from .data_progress import duration
from .run_report import RunReport, read_report
from .summary import STATE_STYLES

MAX_DEPTH = 3
RECENT_S = 7 * 86400.0  # runs that ended earlier are hidden unless all are asked for

# Columns that a narrow terminal drops, the first ones first; `moebius status RUN` shows them.
_CAN_BE_LEFT_OUT = ("tokens/s", "restarts", "loss", "name", "since", "step")
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
    except (FileNotFoundError, PermissionError):
        return
    for name in below:
        yield from find_runs(root / name, depth=depth - 1)


def _is_searched(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def read_reports(run_dirs: Sequence[Path]) -> tuple[list[RunReport], list[str]]:
    """Returns the reports of runs, last submitted first, and why others cannot be read."""
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
    """Returns whether the run has not ended, or ended within a week."""
    ended = report.status.ended_at
    return ended is None or time.time() - ended < RECENT_S


def run_table(reports: Sequence[RunReport], root: Path, *, width: int) -> Table:
    """Returns a table with one line per run.

    Args:
        root: run folders are shown relative to it.
        width: of the terminal; columns are dropped so that the run folder's name stays in one piece.
    """
    rows = [_cells(report, root) for report in reports]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = _that_fit(rows, width)
    for name in shown:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for cells in rows:
        table.add_row(*(cells[name] for name in shown))
    return table


def _that_fit(rows: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    """Returns the names of the columns that fit into `width`."""
    widths = {
        name: 2 + max(cell_len(name), *(row[name].cell_len for row in rows)) for name in rows[0]
    }
    for name in _CAN_BE_LEFT_OUT:
        if sum(widths.values()) <= width:
            break
        del widths[name]
    return list(widths)


def _cells(report: RunReport, root: Path) -> dict[str, Text]:
    status = report.status
    step = "" if status.step is None else f"{status.step}/{status.total_steps or '?'}"
    folder = status.run_dir
    shown = folder.relative_to(root) if folder != root and root in folder.parents else folder
    return {
        "name": Text(report.name),
        "state": Text(status.state.value, style=STATE_STYLES.get(status.state, "bold")),
        "step": Text(step),
        "loss": Text("" if status.loss is None else f"{status.loss:.4f}"),
        "tokens/s": Text("" if report.tokens_per_s is None else f"{report.tokens_per_s:,.0f}"),
        "restarts": Text(str(status.restarts)),
        "since": Text(duration(max(0.0, time.time() - report.since))),
        "run folder": Text(str(shown)),
    }
