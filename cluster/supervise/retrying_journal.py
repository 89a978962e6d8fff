"""Writes a supervisor's journal even if the disk is full for a while.

A supervisor must neither end nor forget its decisions because the run folder cannot be written for an hour.
Entries that cannot be written are kept in order and retried with every heartbeat, while the ranks continue.
The first late entry says how late it is and why; every late one has `late_s` in its details, and the time of
the decision. A new generation begins only when all is written, because the successor of a killed supervisor
would not know of it.

If the supervisor is killed, its unwritten entries are lost. Its successor finds no ranks and starts a new
generation.
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
    """Keeps entries that cannot be written until they can."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._clock = clock
        self._waiting: deque[tuple[float, dict[str, Any]]] = (
            deque()
        )  # with the time since they wait
        self._why = ""
        self._is_told = False  # the first late entry has said that it is late

    def append(self, state: State, **values: Any) -> None:
        """Appends one state, now or as soon as possible."""
        self._waiting.append((self._clock(), entry_of(state, **values)))
        self.catch_up()

    def catch_up(self) -> bool:
        """Writes waiting entries as far as possible; returns whether none is left."""
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
        """Sends a heartbeat and writes waiting entries."""
        with contextlib.suppress(OSError):  # watchers notice the missing heartbeat
            beat(self._run_dir)
        self.catch_up()

    def settle(self) -> None:
        """Waits until all entries are written, or an immediate end is requested; logs the rest."""
        while not self.catch_up() and stop_requested(self._run_dir) != STOP_NOW:
            self.beat()
            time.sleep(_SETTLE_S)
        self.give_up()

    def give_up(self) -> None:
        """Logs the entries that will never be written."""
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
    """Announces a generation and removes what an earlier one left; returns "" or why it failed."""
    try:
        write_atomically(run_dir / GENERATION, str(generation))
        for left in (RESULT, PAUSE):
            (run_dir / left).unlink(missing_ok=True)
    except OSError as error:
        return waiting_to_write(run_dir, error)
    return ""


def waiting_to_write(run_dir: Path, error: OSError) -> str:
    """Describes a job that waits for its run folder to become writable."""
    return f"waiting until {run_dir} can be written ({error.strerror})"
