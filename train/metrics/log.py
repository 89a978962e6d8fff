"""The metrics log: each line goes to metrics.jsonl at once, and to other sinks from background
threads. No sink can delay or fail a step.

    write ─> bounded queue (when full, the oldest line is dropped and counted) ─> thread ─> sink

A sink's first failure is logged with advice. It is then reopened after 5 s, 10 s, and so on up to 5
minutes; once it works again, the log says how many lines it missed.
"""

import io
import json
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from ...data_pipeline.files import append_line
from ..record.redaction import redact, redact_values

logger = logging.getLogger(__name__)

CAPACITY = 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_BATCH = 200
_ATTEMPTS = 3  # with the same lines, which may be the cause and are then dropped


@dataclass(frozen=True)
class Record:
    """Holds one line of the metrics, without secrets."""

    kind: str  # "train", "eval", "checkpoint", …
    step: int
    time_s: float  # since the epoch
    values: Mapping[str, Any]
    number: int = 0  # among this process's lines of the same kind, from 0


class Sink(Protocol):
    """Writes metrics to one destination. One thread makes all calls; any error is retried."""

    def write(self, records: Sequence[Record]) -> None:
        """Writes the records in the given order."""
        ...

    def close(self, state: str) -> None:
        """Flushes and closes; `state` is "finished", "stopped" or "failed"."""
        ...


class BackgroundSink:
    """Passes lines to a sink from a thread; only `close` ever waits for the sink."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[int | None], Sink],
        *,
        first_step: int,
        advice: str = "",
        capacity: int = CAPACITY,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Starts the thread, which opens the sink.

        Args:
            name: of the sink, for messages.
            open_sink: opens the sink, in the thread, and again after each failure. Its argument is
                the first step that this process writes, so that it can hide later steps of an
                earlier process; None after a failure.
            first_step: the first step that this process writes.
            advice: what to do when the sink fails.
            capacity: maximum number of waiting lines.
            first_pause_s: the pause after a first failure; it doubles with each further one.
        """
        self.name = name
        self._open_sink = open_sink
        self._first_step: int | None = first_step
        self._advice = advice
        self._capacity = capacity
        self._first_pause_s = self._pause_s = first_pause_s
        self._queue: deque[Record] = deque()
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._state = "failed"
        self._sink: Sink | None = None
        self._lost, self._lost_in_all = 0, 0  # lines: since the sink last worked, and ever
        self._is_failing = False
        self._was_slow = False  # it was logged
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queues a line; drops the oldest one when the queue is full."""
        with self._changed:
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self._count_lost(1)
            self._queue.append(record)
            self._changed.notify()

    def begin_to_close(self, state: str) -> None:
        """Tells the thread to write the queue and close the sink, without waiting."""
        self._state = state
        self._is_ending.set()
        with self._changed:
            self._changed.notify()

    def close(self, state: str, *, limit_s: float) -> None:
        """Closes the sink and waits for it, at most `limit_s` seconds."""
        self.begin_to_close(state)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.warning(
                "metrics: %s did not close within %g s and was abandoned; it lacks up to %d lines "
                "(metrics.jsonl has them all)",
                self.name,
                limit_s,
                len(self._queue) + self._lost,
            )

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while records := self._take():
            self._deliver(records)
        if self._sink is not None:
            self._close_sink(self._sink)
        if self._lost_in_all:
            logger.warning("metrics: %s lacks %d lines in all", self.name, self._lost_in_all)

    def _take(self) -> list[Record]:
        """Waits for lines and returns some of them; none once the sink must close."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_ending.is_set())
            return [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]

    def _deliver(self, records: Sequence[Record]) -> None:
        for _ in range(_ATTEMPTS):
            try:
                if self._sink is None:
                    self._sink = self._open_sink(self._first_step)
                    self._first_step = None
                self._sink.write(records)
            except Exception as error:  # noqa: BLE001 - no library's error may end the training
                self._note_failure(error)
                if self._is_ending.is_set():
                    break
                self._is_ending.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            else:
                self._note_success()
                return
        self._count_lost(len(records))

    def _note_failure(self, error: Exception) -> None:
        """Logs the first failure of a series, and drops the sink."""
        if not self._is_failing:
            logger.warning(
                "metrics: %s cannot be written (%s)%s. Training continues, the sink is retried from "
                "time to time, and metrics.jsonl has every line",
                self.name,
                redact(f"{type(error).__name__}: {error}"),
                f": {self._advice}" if self._advice else "",
            )
        self._is_failing = True
        sink, self._sink = self._sink, None
        if sink is not None:
            self._close_sink(sink)

    def _note_success(self) -> None:
        self._pause_s = self._first_pause_s
        if self._is_failing:
            logger.warning("metrics: %s works again; it lacks %d lines", self.name, self._lost)
        elif self._lost and not self._was_slow:
            self._was_slow = True
            logger.warning(
                "metrics: %s is slower than the run and lacks %d lines; raise train.log_every",
                self.name,
                self._lost,
            )
        self._is_failing, self._lost = False, 0

    def _close_sink(self, sink: Sink) -> None:
        try:
            sink.close("failed" if self._is_failing else self._state)
        except Exception as error:  # noqa: BLE001 - as above
            level = logging.DEBUG if self._is_failing else logging.WARNING
            logger.log(level, "metrics: %s did not close: %s", self.name, redact(str(error)))

    def _count_lost(self, lines: int) -> None:
        self._lost += lines
        self._lost_in_all += lines


FILE = "metrics.jsonl"
_CLOSE_S = 60.0  # how long a finished run waits for its sinks
_CLOSE_FAILED_S = 5.0  # the same for a failed run, for which other ranks wait


class MetricsLog:
    """Writes the metrics of a run on rank 0; does nothing on any other rank."""

    def __init__(
        self, run_dir: Path, *, active: bool, sinks: Sequence[BackgroundSink] = ()
    ) -> None:
        """Opens metrics.jsonl if `active`; the log owns the sinks."""
        self._file = _JsonLines(run_dir / FILE) if active else None
        self._sinks = tuple(sinks)
        self._numbers: Counter[str] = Counter()
        self._state = "failed"  # until a line reports how the run ended
        self._is_failing = False  # the last line could not be written, which was logged

    def __enter__(self) -> Self:
        """Returns the log itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Closes the log."""
        self.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one line, visible to readers when this returns.

        A line that cannot be written (full disk) is lost; the first such loss is logged.
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
        self._path = path
        self._file = self._open()

    def write_one(self, record: Record) -> None:
        """Writes a line.

        Raises:
            OSError: the line could not be written completely.
        """
        if not self._is_in_place():  # deleted or replaced
            self._file.close()
            self._file = self._open()
        values = {"kind": record.kind, "step": record.step, "time": round(record.time_s, 3)}
        append_line(self._file, json.dumps(finite(values | dict(record.values))))

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        return self._path.open("ab+", buffering=0)

    def _is_in_place(self) -> bool:
        """Returns whether readers of the path see what is written."""
        try:
            return not self._file.closed and os.path.samestat(
                os.fstat(self._file.fileno()), self._path.stat()
            )
        except FileNotFoundError:
            return False


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by strings, because JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return value


def _without_matrices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops values per expert and depth step, which only the file keeps."""
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
