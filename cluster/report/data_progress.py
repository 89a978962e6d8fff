"""Records how far a job's data is prepared: `preparation.jsonl` in the run folder.

The process that prepares data beside the ranks appends a line about once a second. Reading it needs neither
Ray nor data_pipeline/.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .json_lines import JsonLinesTail

if TYPE_CHECKING:  # showing progress must not import what prepares data
    from ...data_pipeline.make.units import PrepareProgress

PREPARATION = "preparation.jsonl"
COMPLETE = "complete"
FAILED = "failed"
EXIT_FAILED = 3
"""Exit code of a preparation that would fail again."""


_WRITE_EVERY_S = 1.0
_TAIL_BYTES = 64 << 10


class ProgressLog:
    """Appends preparation progress to a run folder."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / PREPARATION
        self._last: dict[str, Any] = {}
        self._written = 0.0

    def write(self, progress: "PrepareProgress") -> None:
        """Appends a report, unless little has changed since the last one."""
        record = as_record(progress)
        same = all(record[key] == self._last.get(key) for key in ("stage", "segments", "total"))
        if same and not record["news"] and time.monotonic() - self._written < _WRITE_EVERY_S:
            return
        self._append(record)

    def end(self, stage: str, error: str = "") -> None:
        """Records that the data is complete, or why it never will be."""
        self._append(self._last | {"stage": stage, "news": "", "error": error, "eta_s": None})

    def _append(self, record: dict[str, Any]) -> None:
        self._last, self._written = record, time.monotonic()
        line = json.dumps({"kind": "preparation", "time": time.time()} | record) + "\n"
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line)


def as_record(progress: "PrepareProgress") -> dict[str, Any]:
    """Returns a progress report as JSON values."""
    sources = [asdict(source) for source in progress.sources]
    return {
        "stage": progress.stage,
        "done": progress.done,
        "total": progress.total,
        "tokens": progress.tokens,
        "segments": sum(source["segments"] for source in sources),
        "tokens_per_s": progress.tokens_per_s,
        "eta_s": progress.eta_s,
        "news": progress.news,
        "sources": sources,
    }


def last_record(run_dir: Path) -> dict[str, Any] | None:
    """Returns the newest progress record; None if no data is prepared beside the run."""
    path = run_dir / PREPARATION
    if not path.exists():
        return None
    lines = JsonLinesTail.near_the_end(path, num_bytes=_TAIL_BYTES).read()
    return next((line for line in reversed(lines) if line.get("kind") == "preparation"), None)


def progress_words(record: Mapping[str, Any]) -> str:
    """Describes a preparation's progress in one line."""
    words = record["stage"]
    if record.get("total"):
        words += f" {record.get('done', 0)}/{record['total']}"
    if record.get("tokens"):
        words += f", {record['tokens']:,} tokens"
    sources = record.get("sources", ())
    if len(sources) > 1:
        words += f" ({', '.join(map(_source_words, sources))})"
    if segments := record.get("segments"):
        words += f", {segments:,} segment{'s' if segments > 1 else ''} sealed"
    is_at_work = record.get("done", 0) < record.get("total", 0)
    if record.get("tokens_per_s") is not None and is_at_work:
        words += f", {record['tokens_per_s']:,.0f} tokens/s"
        if record.get("eta_s") is not None:
            words += f", {duration(record['eta_s'])} left"
    return words + (f": {record['error']}" if record.get("error") else "")


def _source_words(source: Mapping[str, Any]) -> str:
    words = f"{source['name']} {source['done']}/{source['total']}, {source['tokens']:,}"
    if source.get("eta_s") is not None and source["done"] < source["total"]:
        words += f", {duration(source['eta_s'])} left"
    return words


def duration(seconds: float) -> str:
    """Formats seconds for people: 12 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
