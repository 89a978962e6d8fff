"""The log of a run's metrics: each line goes to metrics.jsonl at once, and to the other sinks from
threads of their own.
"""

import errno
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..record.redaction import redact, redact_values
from .background import BackgroundSink, Record

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
_CLOSE_S = 60.0  # how long a finished run waits for its sinks
_CLOSE_FAILED_S = 5.0  # how long a failed run does, since other ranks wait for it


class MetricsLog:
    """Writes the metrics of a run on rank 0; does nothing on any other rank."""

    def __init__(
        self, run_dir: Path, *, active: bool, sinks: Sequence[BackgroundSink] = ()
    ) -> None:
        """Opens metrics.jsonl if `active`; the log owns the sinks."""
        self._file = _JsonLines(run_dir / FILE) if active else None
        self._sinks = tuple(sinks)
        self._numbers: Counter[str] = Counter()
        self._state = "failed"  # until a line says how the run ended
        self._is_failing = False  # the last line could not be written, and the log said so

    def __enter__(self) -> Self:
        """Returns the log itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the log."""
        self.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one line, which readers can see as soon as this returns.

        A line that cannot be written (the disk is full, say) is lost; the first such loss is logged.
        """
        if self._file is None:
            return
        record = Record(kind, step, time.time(), _redacted(values), self._numbers[kind])
        self._numbers[kind] += 1
        if kind == "end":
            self._state = str(values.get("state"))
        try:
            self._file.write_one(record)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("step %d: the metrics could not be written: %s", step, error)
            self._is_failing = True
        slim = replace(record, values=_without_matrices(record.values))
        for sink in self._sinks:
            sink.write(slim)

    def close(self) -> None:
        """Closes the file and the sinks; a second call does nothing."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for sink in self._sinks:
            sink.begin_to_close(self._state)
        limit_s = _CLOSE_FAILED_S if self._state == "failed" else _CLOSE_S
        end_s = time.monotonic() + limit_s
        for sink in self._sinks:
            sink.close(self._state, limit_s=max(0.0, end_s - time.monotonic()))


class _JsonLines:
    """Appends each record to a file as one line of JSON."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: a line that a full disk refused must not appear later, inside another line.
        self._file = path.open("ab", buffering=0)
        self._is_torn = False  # the last line is incomplete

    def write_one(self, record: Record) -> None:
        """Writes a line, and first ends an incomplete one.

        Raises:
            OSError: the line could not be written, or not all of it.
        """
        values = {"kind": record.kind, "step": record.step, "time": round(record.time_s, 3)}
        line = json.dumps(finite(values | dict(record.values))).encode()
        line = b"\n" * self._is_torn + line + b"\n"
        written = self._file.write(line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self) -> None:
        self._file.close()


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by strings, since JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return value


def _without_matrices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what holds a number per expert and depth step, which no sink but the file shows."""
    return {
        name: value
        for name, value in values.items()
        if not (isinstance(value, list) and value and isinstance(value[0], list))
    }


def _redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Removes secrets from texts and from lists of texts or tables; skips lists of numbers."""
    redacted = {}
    for name, value in values.items():
        holds_text = isinstance(value, list) and value and isinstance(value[0], str | dict)
        if isinstance(value, str):
            redacted[name] = redact(value)
        else:
            redacted[name] = redact_values(value) if holds_text else value
    return redacted
