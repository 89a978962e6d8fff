"""The metrics log: each line goes to metrics.jsonl at once, and to other sinks from background
threads. No sink can delay or fail a step.

    write ─> bounded queue (when full, the oldest line is dropped and counted) ─> thread ─> sink

A sink's first failure is logged with advice. It is then reopened after 5 s, 10 s, and so on up to 5
minutes; once it works again, the log says how many lines it missed.
"""

import json
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from ...data_pipeline.files import append_line, append_to
from ..record.redaction import redact, redact_values

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
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
        self.tell: Callable[[str, int], None] = lambda _why, _lost: None  # also the run's readers
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
            lost = len(self._queue) + self._lost
            self._tell(
                f"did not close within {limit_s:g} s and was abandoned; it lacks up to {lost} lines"
            )

    def _tell(self, why: str, lost: int = 1) -> None:
        """Logs a change, and tells the run's readers of it; `lost=0`: nothing is missing."""
        logger.warning("metrics: %s %s", self.name, why)
        self.tell(why, lost)

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while records := self._take():
            self._deliver(records)
        if self._sink is not None:
            self._close_sink(self._sink)
        if self._lost_in_all:
            self._tell(f"lacks {self._lost_in_all} lines in all, which {FILE} has")

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
            self._is_failing = True
            what = redact(f"{type(error).__name__}: {error}")
            advice = f": {self._advice}" if self._advice else ""
            self._tell(
                f"cannot be written ({what}){advice}. It is retried, and {FILE} has every line"
            )
        sink, self._sink = self._sink, None
        if sink is not None:
            self._close_sink(sink)

    def _note_success(self) -> None:
        self._pause_s = self._first_pause_s
        was_failing, self._is_failing = self._is_failing, False
        if was_failing:
            self._tell(f"works again; it lacks {self._lost} lines", self._lost_in_all)
        elif self._lost and not self._was_slow:
            self._was_slow = True
            words = f"is slower than the run and lacks {self._lost} lines; raise train.log_every"
            self._tell(words)
        self._lost = 0

    def _close_sink(self, sink: Sink) -> None:
        try:
            sink.close("failed" if self._is_failing else self._state)
        except Exception as error:  # noqa: BLE001 - as above
            if not self._is_failing:
                self._tell(f"did not close ({redact(str(error))})")

    def _count_lost(self, lines: int) -> None:
        self._lost += lines
        self._lost_in_all += lines


_CLOSE_S = 60.0  # how long a finished run waits for its sinks
_CLOSE_FAILED_S = 5.0  # the same for a failed run, for which other ranks wait


class MetricsLog:
    """Writes the metrics of a run on rank 0; does nothing on any other rank."""

    def __init__(
        self,
        run_dir: Path,
        *,
        active: bool,
        sinks: Sequence[BackgroundSink] = (),
        lacks_to: int = 0,
    ) -> None:
        """Opens metrics.jsonl if `active`, which lacks the steps up to `lacks_to` if it is empty.

        The log owns the sinks.
        """
        self._file = _JsonLines(run_dir / FILE, lacks_to) if active else None
        self._lock = threading.Lock()  # of the file, which sinks' threads write to as well
        self._sinks = tuple(sinks)
        for sink in self._sinks:
            sink.tell = partial(self._note_gap, sink.name)
        self._numbers: Counter[str] = Counter()
        self._step = 0  # of the newest line
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
        self._step = step
        if kind == "end":
            self._state = str(values.get("state"))
        self._write_to_file(record)
        slim = replace(record, values=_without_matrices(record.values))
        for sink in self._sinks:
            sink.write(slim)

    def _write_to_file(self, record: Record) -> None:
        with self._lock:
            if self._file is None:  # a sink that was abandoned works again
                return
            try:
                self._file.write_one(record)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    step = record.step
                    logger.warning("step %d: the metrics could not be written: %s", step, error)
                self._is_failing = True

    def _note_gap(self, name: str, why: str, lost: int) -> None:
        """Writes a line about a sink that lacks lines, for the journal."""
        self._write_to_file(gap_of(name, why, self._step, lost))

    def close(self) -> None:
        """Closes the sinks and the file; a second call does nothing."""
        if self._file is None:
            return
        for sink in self._sinks:
            sink.begin_to_close(self._state)
        limit_s = _CLOSE_FAILED_S if self._state == "failed" else _CLOSE_S
        end_s = time.monotonic() + limit_s
        for sink in self._sinks:
            sink.close(self._state, limit_s=max(0.0, end_s - time.monotonic()))
        with self._lock:
            self._file.close()
            self._file = None


def gap_of(name: str, why: str, step: int, lost: int = 1) -> Record:
    """Returns the line that says what a file or a sink lacks; `lost=0`: nothing any more."""
    return Record("gap", step, time.time(), {"of": name, "why": why, "lost": lost})


_CHANGED = "was deleted, cut or replaced: it lacks"


class _JsonLines:
    """Appends each record to a file as one line of JSON.

    If somebody deletes, empties or replaces the file, a new one begins, and its first line says so.
    """

    def __init__(self, path: Path, lacks_to: int) -> None:
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self._why = ""  # lines are missing, which is not written yet
        if lacks_to and not self._size:
            self._why = f"{_CHANGED} the steps up to {lacks_to}"

    def write_one(self, record: Record) -> None:
        """Writes a line.

        Raises:
            OSError: the line could not be written completely.
        """
        if self._has_changed():
            self._why = f"{_CHANGED} the steps before {record.step}"
            file = append_to(self._path)
            self._file.close()
            self._file = file
        try:
            if self._why:
                self._append(gap_of(FILE, self._why, record.step))
            self._append(record)
            self._why = ""
        except OSError as error:
            self._why = self._why or f"lacks lines from step {record.step} on: {error.strerror}"
            raise

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Record) -> None:
        values = {"kind": record.kind, "step": record.step, "time": round(record.time_s, 3)}
        try:
            append_line(self._file, json.dumps(finite(values | dict(record.values))))
        finally:
            self._size = os.fstat(self._file.fileno()).st_size

    def _has_changed(self) -> bool:
        own = os.fstat(self._file.fileno())
        try:
            return own.st_size < self._size or not os.path.samestat(own, self._path.stat())
        except FileNotFoundError:
            return True


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
