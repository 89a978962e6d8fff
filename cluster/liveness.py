"""Judges whether a run's supervisor is alive by its heartbeat file, touched about twice a second.

* A watcher (`LivenessWatch`) checks whether the file changes between two looks, by its own monotonic clock.
  Clocks that jump or differ between machines cannot mislead it.
* A single look (`silence_s`) compares two times of the run folder's file system: that of the heartbeat and
  that of a file made now. If the result looks bad, it looks again for a second, because a clock may have
  jumped.

A job is not given up before `GIVEN_UP_AFTER_S`: a supervisor that stood still (swapping, a debugger, a
hanging file system) may continue.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT = "heartbeat"
JOURNAL = "journal.jsonl"  # its lines count as heartbeats, too
LOST_AFTER_S = 20.0  # longer than Ray needs to restart a supervisor (5-10 s on a busy machine)
GIVEN_UP_AFTER_S = 120.0
LOOK_AGAIN_S = 1.2
# A longer silence is no jump of a clock. Without this limit, listing a hundred old runs would take minutes.
_LOOK_AGAIN_BELOW_S = 3600.0


def beat(run_dir: Path) -> None:
    """Sends a heartbeat: touches the file in the run folder."""
    (run_dir / HEARTBEAT).touch()


def silence_s(run_dir: Path) -> float:
    """Returns the seconds since the last heartbeat, from a single look."""
    marks = _marks(run_dir)
    silent_s = _now(run_dir, marks) - max(marks) / 1e9
    if LOST_AFTER_S < silent_s < _LOOK_AGAIN_BELOW_S:
        deadline = time.monotonic() + LOOK_AGAIN_S
        while time.monotonic() < deadline:
            if _marks(run_dir) != marks:
                return 0.0
            time.sleep(0.05)
    return max(0.0, silent_s)


class LivenessWatch:
    """Measures a supervisor's silence between repeated looks."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        self._run_dir = run_dir
        self._clock = clock
        self._marks = _marks(run_dir)
        self._heard_at = clock() - silence_s(run_dir)

    def silent_s(self) -> float:
        """Returns the seconds since the last heartbeat, by this look."""
        marks = _marks(self._run_dir)
        if marks != self._marks:
            self._marks, self._heard_at = marks, self._clock()
        return self._clock() - self._heard_at

    def is_given_up(self) -> bool:
        """Returns whether the silence is so long that the supervisor is not expected back."""
        return self.silent_s() > GIVEN_UP_AFTER_S


def _marks(run_dir: Path) -> tuple[int, ...]:
    """Returns the modification times of heartbeat and journal, in nanoseconds."""
    times = []
    for name in (HEARTBEAT, JOURNAL):
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except FileNotFoundError:
            times.append(0)
    return tuple(times)


def _now(run_dir: Path, marks: tuple[int, ...]) -> float:
    """Returns the time of the folder's file system, which may belong to another machine.

    Returns this machine's time if that looks plausible, or if the folder cannot be written.
    """
    now = time.time()
    if 0 <= now - max(marks) / 1e9 <= LOST_AFTER_S:
        return now
    try:
        with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".clock-") as file:
            return Path(file.name).stat().st_mtime
    except OSError:
        return now
