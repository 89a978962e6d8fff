"""A sink on a thread of its own: whatever happens to it, no step waits and no step fails.

    write ─> queue (bounded: the oldest lines give way, and are counted) ─> thread ─> sink

What a sink raises is told once, with what to do about it. Then the sink is opened anew, after 5 s,
10 s, and so on up to 5 minutes; when it works again, the log says how many lines it has missed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..record.redaction import redact
from .records import Record, Sink

logger = logging.getLogger(__name__)

CAPACITY = 1000  # lines that wait, at most
_BATCH = 200
_ATTEMPTS = 3  # at the same lines; then they are given up, for the fault may be theirs
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0

# Opens a sink. The argument is the first step that it will be given, where what an earlier process
# wrote from there on is to be forgotten; None: it was open before.
OpenSink = Callable[[int | None], Sink]


@dataclass(frozen=True)
class _GoBack:
    step: int


@dataclass(frozen=True)
class _Close:
    state: str


class BackgroundSink:
    """Hands lines to a sink from a thread; no method waits for the sink, but for `close`."""

    def __init__(
        self,
        name: str,
        open_sink: OpenSink,
        *,
        first_step: int,
        advice: str = "",
        takes_matrices: bool = False,
        capacity: int = CAPACITY,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Starts the thread, which opens the sink.

        Args:
            name: of the sink, in messages.
            open_sink: called in the thread; again after a failure.
            first_step: the first that will be written.
            advice: what to do where it fails.
            takes_matrices: lines come with what holds a number per expert and depth step.
            capacity: how many lines may wait.
            first_pause_s: after a failure; doubled after each further one.
        """
        self.name = name
        self._open_sink = open_sink
        self._next_step: int | None = first_step
        self._advice = advice
        self._takes_matrices = takes_matrices
        self._capacity = capacity
        self._first_pause_s = self._pause_s = first_pause_s
        self._items: deque[Record | _GoBack | _Close] = deque()
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._sink: Sink | None = None
        self._num_waiting = 0
        self._lost, self._lost_in_all = 0, 0  # lines: since the sink last worked, and ever
        self._is_slow = False  # that was told
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queues a line; where the queue is full, the oldest line is lost."""
        with self._changed:
            if self._num_waiting >= self._capacity:
                self._drop_oldest()
            self._items.append(record if self._takes_matrices else record.without_matrices())
            self._num_waiting += 1
            self._changed.notify()

    def go_back_to(self, step: int) -> None:
        """Lets the sink forget what is beyond a step, once the lines before have been written."""
        with self._changed:
            self._items.append(_GoBack(step))
            self._changed.notify()

    def begin_to_close(self, state: str) -> None:
        """Lets the thread write what waits, and end the sink; does not wait for it."""
        with self._changed:
            self._items.append(_Close(state))
            self._changed.notify()
        self._is_ending.set()

    def close(self, state: str, *, limit_s: float) -> None:
        """Writes what waits, ends the sink, and says what was lost; gives up after `limit_s`."""
        if not self._is_ending.is_set():
            self.begin_to_close(state)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.warning(
                "metrics: %s did not end within %g s, and is left behind; up to %d lines did not "
                "reach it (metrics.jsonl has them all)",
                self.name,
                limit_s,
                self._num_waiting + self._lost,
            )

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            item = self._take()
            if isinstance(item, _Close):
                self._end(item.state)
                return
            self._deliver(item)

    def _take(self) -> list[Record] | _GoBack | _Close:
        """Waits for something to do: some lines, or one of the other two."""
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            records: list[Record] = []
            while self._items and len(records) < _BATCH:
                item = self._items[0]
                if not isinstance(item, Record):
                    if records:
                        break
                    self._items.popleft()
                    return item
                self._items.popleft()
                self._num_waiting -= 1
                records.append(item)
            return records

    def _deliver(self, item: list[Record] | _GoBack) -> None:
        """Gives the sink what was taken, some times if need be."""
        for _ in range(_ATTEMPTS):
            try:
                self._hand_over(item)
            except Exception as error:  # noqa: BLE001 - whatever a library raises ends no training
                self._note_failure(error)
                if self._is_ending.is_set():
                    break
                self._is_ending.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            else:
                self._note_success()
                return
        self._count_lost(len(item) if isinstance(item, list) else 0)

    def _hand_over(self, item: list[Record] | _GoBack) -> None:
        if self._sink is None:
            self._sink = self._open_sink(self._next_step)
            self._next_step = None
        if isinstance(item, _GoBack):
            self._sink.go_back_to(item.step)
        else:
            self._sink.write(item)

    def _note_failure(self, error: Exception) -> None:
        """Says what has failed, once, and lets go of the sink."""
        if not self._is_failing:
            logger.warning(
                "metrics: %s cannot be written (%s)%s. The training goes on; the sink is tried "
                "again from time to time, and metrics.jsonl has every line",
                self.name,
                redact(f"{type(error).__name__}: {error}"),
                f": {self._advice}" if self._advice else "",
            )
        self._is_failing = True
        sink, self._sink = self._sink, None
        if sink is not None:
            self._close_quietly(sink, "failed")

    def _note_success(self) -> None:
        self._pause_s = self._first_pause_s
        if self._is_failing:
            logger.warning("metrics: %s is written again; it lacks %d lines", self.name, self._lost)
        elif self._lost and not self._is_slow:
            self._is_slow = True
            logger.warning(
                "metrics: %s takes lines more slowly than they come, and lacks %d; a larger "
                "train.log_every makes fewer",
                self.name,
                self._lost,
            )
        self._is_failing, self._lost = False, 0

    def _end(self, state: str) -> None:
        sink = self._sink
        if sink is not None:
            try:
                sink.close(state)
            except Exception as error:  # noqa: BLE001 - as above
                self._note_failure(error)
        if self._lost_in_all:
            logger.warning(
                "metrics: %s lacks %d lines in all, of these the last %d",
                self.name,
                self._lost_in_all,
                self._lost,
            )

    def _close_quietly(self, sink: Sink, state: str) -> None:
        try:
            sink.close(state)
        except Exception as error:  # noqa: BLE001 - it has failed already, and that was told
            logger.debug("metrics: closing %s after its failure: %s", self.name, error)

    def _drop_oldest(self) -> None:
        for index, item in enumerate(self._items):
            if isinstance(item, Record):
                del self._items[index]
                self._num_waiting -= 1
                self._count_lost(1)
                return

    def _count_lost(self, lines: int) -> None:
        self._lost += lines
        self._lost_in_all += lines
