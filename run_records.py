"""Reads what runs have recorded, from their folders alone: half of what `import moebius` offers.

    for run_dir in moebius.find_runs("runs"):
        losses = [line["loss"] for line in moebius.history(run_dir).records() if line["kind"] == "eval"]

A run may be read while it trains, or years later. Nothing here imports torch.
"""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from .cluster.job import JOURNAL, METRICS, parse_entries
from .cluster.report.json_lines import JsonLinesTail
from .cluster.report.run_list import find_runs as _find_runs

Record = dict[str, Any]

_ONCE_A_STEP = ("train", "eval")


class RunHistory:
    """Reads the records of one run as plain dictionaries, and reads on while the run goes on.

    Every record of the metrics has a `kind` ("start", "train", "eval", "checkpoint", …), a `time` in
    seconds since the epoch, and mostly a `step`; docs/metrics.md lists their keys. Lines that a kill
    has torn are skipped.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._metrics = JsonLinesTail(run_dir / METRICS)
        self._journal = JsonLinesTail(run_dir / JOURNAL)

    def records(self) -> list[Record]:
        """Returns all metrics so far, in the order in which they were written.

        A run that resumes from a checkpoint records the steps after it once more: of each step the
        last record counts.
        """
        found: dict[Any, Record] = {}
        for number, record in enumerate(JsonLinesTail(self.run_dir / METRICS).stream()):
            kind = record.get("kind")
            key = (kind, record["step"]) if kind in _ONCE_A_STEP else number
            found.pop(key, None)  # so that it takes its later place
            found[key] = _with_numbers(record)
        return list(found.values())

    def new_records(self) -> Iterator[Record]:
        """Yields the metrics that were written since the last call, repeated steps included."""
        yield from map(_with_numbers, self._metrics.stream())

    def new_states(self) -> Iterator[Record]:
        """Yields the states that the job entered since the last call.

        Each has the keys `time`, `state` ("RUNNING", "RECOVERING", …), `generation`, `reason` and
        `details`, a dictionary.
        """
        for entry in parse_entries(self._journal.stream()):
            yield {
                "time": entry.time,
                "state": entry.state.value,
                "generation": entry.generation,
                "reason": entry.reason,
                "details": entry.details,
            }


def history(run_dir: str | PathLike[str]) -> RunHistory:
    """Returns the reader of a run's records; a folder without any reads as an empty history."""
    return RunHistory(Path(run_dir))


def find_runs(folder: str | PathLike[str]) -> list[Path]:
    """Returns the run folders below a folder, three levels deep, the most recently active first.

    A run folder is its own only run.
    """
    return sorted(_find_runs(Path(folder)), key=_active_at, reverse=True)


def _active_at(run_dir: Path) -> float:
    try:
        return (run_dir / JOURNAL).stat().st_mtime
    except OSError:  # the run was deleted meanwhile
        return 0.0


def _with_numbers(record: Record) -> Record:
    """Returns a record whose loss is a number: JSON has no word for nan, so a file has a text."""
    if isinstance(record.get("loss"), str):
        record["loss"] = float(record["loss"])
    return record
