"""The one log of a run's metrics: each line goes to metrics.jsonl at once, and to the other sinks
from threads of their own.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..record.redaction import redact, redact_values
from ..sinks.json_lines import JsonLines
from .background import BackgroundSink
from .records import Record

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
_CLOSE_S = 60.0  # how long a run that has ended waits for its sinks
_CLOSE_FAILED_S = 5.0  # and one that has failed, which others wait for


class MetricsLog:
    """Takes the lines of a run, on rank 0; silent on every other rank."""

    def __init__(
        self, run_dir: Path, *, active: bool, sinks: Sequence[BackgroundSink] = ()
    ) -> None:
        """Opens metrics.jsonl, if `active`; the sinks are closed with it."""
        self._lines = JsonLines(run_dir / FILE) if active else None
        self._sinks = tuple(sinks)
        self._numbers: Counter[str] = Counter()
        self._state = "failed"  # until a line says how the run has ended
        self._is_failing = False  # the last line was not written, and that was told

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the log, in a hurry after an error."""
        self.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one line; it is in the file when this returns, for readers follow it.

        A line that cannot be written, to a full disk for example, is lost: a warning says so, once.
        """
        if self._lines is None:
            return
        record = Record(kind, step, time.time(), _redacted(values), self._numbers[kind])
        self._numbers[kind] += 1
        if kind == "end":
            self._state = str(values.get("state"))
        try:
            self._lines.write_one(record)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("step %d: the metrics could not be written: %s", step, error)
            self._is_failing = True
        for sink in self._sinks:
            sink.write(record)

    def go_back_to(self, step: int) -> None:
        """Makes sinks that can forget what was written beyond a step; metrics.jsonl keeps it."""
        for sink in self._sinks:
            sink.go_back_to(step)

    def close(self) -> None:
        """Flushes and closes all; once is enough, twice is harmless."""
        if self._lines is None:
            return
        self._lines.close()
        self._lines = None
        for sink in self._sinks:
            sink.begin_to_close(self._state)
        limit_s = _CLOSE_FAILED_S if self._state == "failed" else _CLOSE_S
        end_s = time.monotonic() + limit_s
        for sink in self._sinks:
            sink.close(self._state, limit_s=max(0.0, end_s - time.monotonic()))


def _redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Blots secrets out of texts, lists and tables of them, and looks at no list of numbers."""
    return {
        name: redact(value)
        if isinstance(value, str)
        else redact_values(value)
        if isinstance(value, list) and value and isinstance(value[0], str | dict)
        else value
        for name, value in values.items()
    }
