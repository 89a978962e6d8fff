"""The journal of a supervisor, which outlives a disk that is full.

A supervisor must neither end nor forget what it has decided because the run folder cannot be written
for an hour. What cannot be written is kept, in order, and tried again with every sign of life; the
ranks go on meanwhile. The first line that is written late says so, with how long and why, and each
late one has `late_s` among its details: their times are those of the decisions. A new generation
begins only when all is written (generations.py), because a supervisor that was killed meanwhile
could not know of it.

What is lost all the same: what a supervisor has not written when it is killed. Its successor sees
ranks that are gone and starts a new generation.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..job import GENERATION, PAUSE, RESULT, Journal, State, beat, entry_of, write_atomically
from ..stop import STOP_NOW, stop_requested

_SETTLE_S = 0.2

logger = logging.getLogger(__name__)


class RetryingJournal(Journal):
    """Keeps what cannot be written until it can."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._clock = clock
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque()  # and since when
        self._why = ""
        self._is_told = False  # the first late line has said that it is late

    def append(self, state: State, **values: Any) -> None:
        """Appends one state, now or when that can be done."""
        self._waiting.append((self._clock(), entry_of(state, **values)))
        self.catch_up()

    def catch_up(self) -> bool:
        """Writes what waits, as far as it can be written; returns whether nothing waits any more."""
        while self._waiting:
            since_s, entry = self._waiting[0]
            if self._why:
                entry = self._as_late(entry, self._clock() - since_s)
            try:
                self.write(entry)
            except OSError as error:
                self._note(error)
                return False
            self._waiting.popleft()
            self._is_told = True
        self._why, self._is_told = "", False
        return True

    def beat(self) -> None:
        """Gives a sign of life, and writes what could not be written before."""
        with contextlib.suppress(OSError):  # who watches sees that it is missing
            beat(self._run_dir)
        self.catch_up()

    def settle(self) -> None:
        """Waits until all is written, for how a job has ended must not be lost; or until an end at
        once is asked for. Then what waits is said elsewhere.
        """
        while not self.catch_up() and stop_requested(self._run_dir) != STOP_NOW:
            self.beat()
            time.sleep(_SETTLE_S)
        self.give_up()

    def give_up(self) -> None:
        """Says elsewhere what will never be written."""
        for _, entry in self._waiting:
            logger.error("not written to %s: %s", self.path, entry)
        self._waiting.clear()

    def _as_late(self, entry: dict[str, Any], late_s: float) -> dict[str, Any]:
        details = entry["details"] | {"late_s": round(late_s, 1)}
        if self._is_told:
            return entry | {"details": details}
        words = f"written {late_s:.0f} s late: the journal could not be written ({self._why})"
        return entry | {"reason": f"{entry['reason']} ({words})", "details": details}

    def _note(self, error: OSError) -> None:
        if not self._why:
            self._is_told = False
            logger.warning(
                "%s cannot be written (%s): new entries stay in memory until there is space",
                self.path,
                error.strerror,
            )
        self._why = error.strerror or str(error)


def announce(run_dir: Path, generation: int) -> str:
    """Announces a generation, and removes what an earlier one has left.

    Returns "", or what keeps the folder from being written.
    """
    try:
        write_atomically(run_dir / GENERATION, str(generation))
        for left in (RESULT, PAUSE):
            (run_dir / left).unlink(missing_ok=True)
    except OSError as error:
        return waiting_to_write(run_dir, error)
    return ""


def waiting_to_write(run_dir: Path, error: OSError) -> str:
    """Returns what a job waits for whose run folder cannot be written any more."""
    return f"waiting until {run_dir} can be written ({error.strerror})"
