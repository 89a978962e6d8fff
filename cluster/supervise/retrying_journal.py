"""Writes a supervisor's journal even if the disk is full for a while.

A supervisor must neither end nor forget its decisions because the run folder cannot be written for an hour.
Entries that cannot be written are kept in order and retried with every heartbeat, while the ranks continue.
A late entry has the time of its decision, and says in its details how late it is and why. A new generation
begins only when all is written, because the successor of a killed supervisor would not know of it.

If the supervisor is killed, its unwritten entries are lost. Its successor finds no ranks and starts a new
generation.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...data_pipeline.files import write_atomically
from ...train.record.untrusted import read_text
from ..job import GENERATION, JOURNAL, PAUSE, RESULT, Journal, State, beat, entry_of, line_of
from ..stop import STOP_NOW, stop_requested
from .kept_files import KeptFiles

_SETTLE_S = 0.2

logger = logging.getLogger(__name__)


class RetryingJournal(Journal):
    """Keeps entries that cannot be written until they can, and restores the files in `kept`."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._clock = clock
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque()  # since when, and what
        self._why = ""  # they wait
        self.kept = KeptFiles(run_dir)
        self.kept.keep(JOURNAL, read_text(self.path) or "")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry to the file, and to what the file must hold."""
        super().write(entry)
        self.kept.add(JOURNAL, line_of(entry) + "\n")

    def append(self, state: State, **values: Any) -> None:
        """Appends one state, now or as soon as possible."""
        self._waiting.append((self._clock(), entry_of(state, **values)))
        self.catch_up()

    def catch_up(self) -> bool:
        """Writes waiting entries as far as possible; returns whether none is left."""
        while self._waiting:
            since_s, entry = self._waiting[0]
            if self._why:
                late = {"late_s": round(self._clock() - since_s, 1), "late_because": self._why}
                entry = entry | {"details": entry["details"] | late}
            try:
                self.write(entry)
            except OSError as error:
                self._note(error)
                return False
            self._waiting.popleft()
        self._why = ""
        return True

    def beat(self) -> None:
        """Sends a heartbeat and writes waiting entries."""
        with contextlib.suppress(OSError):  # watchers notice the missing heartbeat
            beat(self._run_dir)
        self.catch_up()

    def settle(self) -> None:
        """Waits until all entries are written, or an immediate end is requested; logs the rest."""
        while not self.catch_up() and self._may_come_back():
            self.beat()
            time.sleep(_SETTLE_S)
        self.kept.restore()
        for _, entry in self._waiting:
            logger.error("not written to %s: %s", self.path, entry)
        self._waiting.clear()

    def _may_come_back(self) -> bool:
        """Returns whether waiting for the run folder makes sense: it exists, and the user waits, too."""
        return self._run_dir.is_dir() and stop_requested(self._run_dir) != STOP_NOW

    def _note(self, error: OSError) -> None:
        if not self._why:
            logger.warning(
                "%s cannot be written (%s): new entries stay in memory until there is space",
                self.path,
                error.strerror,
            )
        self._why = error.strerror or str(error)


def announce(run_dir: Path, generation: int, kept: KeptFiles) -> str:
    """Announces a generation and removes what an earlier one left; returns "" or why it failed."""
    try:
        kept.restore(strictly=True)  # ranks read them
        for left in (RESULT, PAUSE):
            (run_dir / left).unlink(missing_ok=True)
        write_atomically(run_dir / GENERATION, str(generation))
    except OSError as error:
        return waiting_to_write(run_dir, error)
    return ""


def waiting_to_write(run_dir: Path, error: OSError) -> str:
    """Describes a job that waits for its run folder to become writable."""
    if isinstance(error, IsADirectoryError):
        return f"waiting until you remove the folder {error.filename2 or error.filename}: it is a file's"
    return f"waiting until {run_dir} can be written ({error.strerror})"
