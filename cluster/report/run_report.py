"""Summarises runs from their run folders: one line for people, one JSON object for scripts, a table of all.

"SUCCEEDED at step 9,500 after 7 h 12 min; 3 recoveries: rank 5 killed (2 ×), node 1 lost; last checkpoint
step 9,500". docs/watch.md lists the keys of the JSON object.

Cost: another read of the journal, the end of metrics.jsonl, and one listing of the checkpoint folder.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..job import (
    JOURNAL,
    JobError,
    JobStatus,
    Journal,
    JournalEntry,
    RootCause,
    State,
    as_details,
    current_submission,
    last_train_line,
    read_status,
)
from .data_progress import duration
from .summary import STATE_STYLES

MAX_CAUSE = 60  # characters of a cause that has no shorter name
MAX_DEPTH = 3  # of run folders below a folder
RECENT_S = 7 * 86400.0  # runs that ended earlier are hidden unless all are asked for

_CHECKPOINT = re.compile(r"step_(\d{8,})")
_NODE_LOST = re.compile(r"node (\d+) was lost")


_TOLD_WITH_REASON = (State.FAILED, State.LOST, State.PLACING, State.STARTING, State.RESIZING)


@dataclass(frozen=True)
class Recovery:
    """Records one interruption after which the job continued."""

    time: float  # when the interruption was noticed, seconds since the epoch
    generation: int  # the interrupted one
    step: int | None  # the last step before
    cause: str  # a few words: "rank 5 killed"
    reason: str  # the journal's full text
    seconds: float | None  # until the next new step; None: there was none


@dataclass(frozen=True)
class RunReport:
    """Summarises the last submission in a run folder."""

    status: JobStatus
    name: str
    since: float  # when the state was entered, seconds since the epoch
    tokens_per_s: float | None
    last_checkpoint: int | None
    recoveries: tuple[Recovery, ...]
    commit: str | None = None  # of the submitted code
    newest: Mapping[str, Any] = field(default_factory=dict)  # the newest "train" line

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds from the submission to the end, or to now."""
        status = self.status
        begun = self.since if status.submitted_at is None else status.submitted_at
        return max(0.0, (status.ended_at or time.time()) - begun)

    def story(self) -> str:
        """Describes what happened, in one line."""
        parts = [self._where_it_stands()]
        if self.status.state is State.RUNNING and (pace := pace_words(self.newest)):
            parts.append(", ".join(pace))
        if self.status.state in _TOLD_WITH_REASON:
            parts.append(_shortened(self.status.reason, 3 * MAX_CAUSE))
        parts.append(self._recoveries_in_words())
        if self.last_checkpoint is None:
            parts.append("no checkpoint")
        else:
            parts.append(f"last checkpoint step {self.last_checkpoint:,}")
        return "; ".join(parts)

    def _where_it_stands(self) -> str:
        status = self.status
        if status.step is None:
            at = "before the first step"
        else:
            at = f"at step {status.step:,}"
            if not status.state.is_final and status.total_steps:
                at += f" of {status.total_steps:,}"
        joined = "after" if status.state.is_final else "for"
        return f"{status.state.value} {at} {joined} {duration(self.elapsed_s)}"

    def _recoveries_in_words(self) -> str:
        if not self.recoveries:
            return "no recoveries"
        count = len(self.recoveries)
        causes = Counter(recovery.cause for recovery in self.recoveries)
        told = [cause + (f" ({times} ×)" if times > 1 else "") for cause, times in causes.items()]
        return f"{count} recover{'ies' if count > 1 else 'y'}: {', '.join(told)}"

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON values (docs/watch.md lists the keys)."""
        status = self.status
        return {
            "run": str(status.run_dir),
            "name": self.name,
            "commit": self.commit,
            "source": status.source,
            "state": status.state.value,
            "reason": status.reason,
            "story": self.story(),
            "since": self.since,
            "generation": status.generation,
            "restarts": status.restarts,
            "step": status.step,
            "total_steps": status.total_steps,
            "loss": _finite_or_text(status.loss),
            "tokens_per_s": _finite_or_text(self.tokens_per_s),
            **{key: self.newest.get(key) for key in ("left_s", "passes", "mfu")},
            "last_checkpoint": self.last_checkpoint,
            "submitted_at": status.submitted_at,
            "ended_at": status.ended_at,
            "elapsed_s": round(self.elapsed_s, 3),
            "heartbeat_age_s": status.heartbeat_age_s,
            "gaps": list(status.gaps),
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
            "root_cause": None if status.root_cause is None else as_details(status.root_cause),
            "exit_code": status.exit_code,
        }


def read_report(run_dir: Path) -> RunReport:
    """Reads the report of the last submission in a run folder.

    Raises:
        JobError: there is no job in this folder.
    """
    status = read_status(run_dir)
    entries = current_submission(Journal(run_dir).entries())
    newest = last_train_line(run_dir) or {}
    if status.state is not State.RUNNING:
        newest.pop("left_s", None)  # it makes no steps
    rate = newest.get("tokens_per_s")
    return RunReport(
        status=status,
        name=str(entries[0].details.get("name") or run_dir.absolute().name),
        since=_entered_at(entries),
        tokens_per_s=None if rate is None else float(rate),
        last_checkpoint=last_checkpoint(run_dir),
        recoveries=tuple(recoveries(entries)),
        commit=entries[0].details.get("commit"),
        newest=newest,
    )


def pace_words(newest: Mapping[str, Any]) -> list[str]:
    """Returns what a "train" line says of time left, passes over the data, and MFU."""
    words = [f"{duration(newest['left_s'])} left"] if newest.get("left_s") else []
    words += [f"{newest['passes']:.2f} passes over the data"] if "passes" in newest else []
    return words + ([f"MFU {newest['mfu']:.1%}"] if "mfu" in newest else [])


def last_checkpoint(run_dir: Path) -> int | None:
    """Returns the step of the newest checkpoint in a run folder; None without one."""
    try:
        names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    steps = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)


def recoveries(entries: Sequence[JournalEntry]) -> list[Recovery]:
    """Returns each recovery of a job, from the journal entries of one submission."""
    found = []
    for number, entry in enumerate(entries):
        if entry.state is not State.RECOVERING:
            continue
        again = next((one for one in entries[number:] if one.state is State.RUNNING), None)
        found.append(
            Recovery(
                time=entry.time,
                generation=entry.generation,
                step=entry.details.get("step"),
                cause=short_cause(entry),
                reason=entry.reason,
                seconds=None if again is None else round(max(0.0, again.time - entry.time), 3),
            )
        )
    return found


def short_cause(entry: JournalEntry) -> str:
    """Returns why a generation ended, in a few words that are equal for equal causes."""
    details = entry.details.get("root_cause")
    if not isinstance(details, dict) or "summary" not in details:
        return _shortened(entry.reason.partition(";")[0])
    cause = RootCause.from_details(details)
    if lost := _NODE_LOST.search(cause.summary):
        return f"node {lost[1]} lost"
    if cause.rank is None:
        return _shortened(cause.summary)
    if cause.on_purpose:
        return f"rank {cause.rank} killed by the fault drill"
    if cause.signal is not None:
        how = "killed" if cause.signal == "SIGKILL" else f"ended by {cause.signal}"
        return f"rank {cause.rank} {how}"
    if cause.error:
        return f"rank {cause.rank}: {_shortened(cause.error)}"
    if cause.exit_code:
        return f"rank {cause.rank} exited with code {cause.exit_code}"
    return _shortened(cause.summary)


def _entered_at(entries: Sequence[JournalEntry]) -> float:
    """Returns when the newest state was entered; lines that repeat it do not count."""
    entered = entries[-1].time
    for entry in reversed(entries):
        if entry.state is not entries[-1].state:
            break
        entered = entry.time
    return entered


def _shortened(text: str, limit: int = MAX_CAUSE) -> str:
    """Cuts a text to one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _finite_or_text(value: float | None) -> float | str | None:
    """Returns numbers that JSON lacks as text: "nan", "inf" or "-inf"."""
    return value if value is None or math.isfinite(value) else str(value)


# Runs below a folder ------------------------------------------------------------------------------


def find_runs(root: Path, *, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yields the run folders below `root`, itself included; does not look into run folders."""
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


def run_table(reports: Sequence[RunReport], root: Path) -> Table:
    """Returns a table with one line per run, whose folder is shown relative to `root`."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run folder", "state"):
        table.add_column(name, overflow="fold")
    for name in ("step", "loss", "tokens/s", "left", "since"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        status, rate = report.status, report.tokens_per_s
        folder = status.run_dir
        shown = folder.relative_to(root) if folder != root and root in folder.parents else folder
        table.add_row(
            Text(str(shown)),
            Text(status.state.value, style=STATE_STYLES.get(status.state, "bold")),
            "" if status.step is None else f"{status.step}/{status.total_steps or '?'}",
            "" if status.loss is None else f"{status.loss:.4f}",
            "" if rate is None else f"{rate:,.0f}",
            duration(report.newest["left_s"]) if "left_s" in report.newest else "",
            duration(max(0.0, time.time() - report.since)),
        )
    return table
