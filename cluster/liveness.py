"""Signs of life: does the supervisor of a run still breathe?

It touches the file `heartbeat` about twice a second. Two ways to judge:

* Who watches (`LivenessWatch`) sees whether the file changes between two looks, by its own monotonic
  clock. No clock that jumps or differs between machines can deceive it.
* Who looks once (`silence_s`) compares times, both of the run folder's file system: the heartbeat's
  and that of a file made now. If that looks bad it looks again for a second, for the clock may have
  jumped since the last beat.

Nobody is declared lost for good before `GIVEN_UP_AFTER_S`: a supervisor that stood still (a machine
that swaps, a debugger, a file system that hangs) goes on when it can.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT = "heartbeat"
JOURNAL = "journal.jsonl"  # its lines are signs of life too
LOST_AFTER_S = 20.0  # longer than Ray needs to restart a supervisor (5-10 s on a busy machine)
GIVEN_UP_AFTER_S = 120.0
LOOK_AGAIN_S = 1.2
# A silence that is longer is no jump of a clock; a list of a hundred old runs should not take
# minutes.
_LOOK_AGAIN_BELOW_S = 3600.0


def beat(run_dir: Path) -> None:
    """Gives a sign of life: touches the run folder's heartbeat."""
    (run_dir / HEARTBEAT).touch()


def silence_s(run_dir: Path) -> float:
    """Returns the seconds since the last sign of life, as one look can tell."""
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
    """Measures a supervisor's silence between the looks of one who watches."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        self._run_dir = run_dir
        self._clock = clock
        self._marks = _marks(run_dir)
        self._heard_at = clock() - silence_s(run_dir)

    def silent_s(self) -> float:
        """Looks, and returns the seconds since the last sign of life."""
        marks = _marks(self._run_dir)
        if marks != self._marks:
            self._marks, self._heard_at = marks, self._clock()
        return self._clock() - self._heard_at

    def is_given_up(self) -> bool:
        """Returns whether the silence is so long that nobody is expected back."""
        return self.silent_s() > GIVEN_UP_AFTER_S


def _marks(run_dir: Path) -> tuple[int, ...]:
    """Returns when the heartbeat and the journal were last touched, in nanoseconds."""
    times = []
    for name in (HEARTBEAT, JOURNAL):
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except FileNotFoundError:
            times.append(0)
    return tuple(times)


def _now(run_dir: Path, marks: tuple[int, ...]) -> float:
    """Returns the time of the folder's file system, which may be another machine's; of this
    machine's clock where all is well by it, or nothing can be written there.
    """
    now = time.time()
    if 0 <= now - max(marks) / 1e9 <= LOST_AFTER_S:
        return now
    try:
        with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".clock-") as file:
            return Path(file.name).stat().st_mtime
    except OSError:
        return now
