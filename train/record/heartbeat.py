"""The page on which a rank publishes its phase and step, and since when.

A rank that hangs cannot report, so it reports in advance: at every change of phase it writes
PAGE_BYTES into a memory-mapped file (no system call; 2 µs a few times per step, 10 with the
medians). The supervisor reads the same file (`read_page`). It is in the folder $MOEBIUS_HEARTBEATS,
on the same machine but not on its disks; without the variable a rank keeps the page to itself.

Times are CLOCK_MONOTONIC, shared by all processes of a machine, so setting the clock makes no rank
look dead. A read may overlap a write: the page begins and ends with the write's number, which must
be equal, and two reads must agree.

Two more files beside it help when ranks hang (cluster/watch/):

* rank3.stacks: on SIGUSR1 `faulthandler` writes the Python stacks of all threads there, from a
  signal handler in C, even while the main thread is in C++ code or another holds the GIL.
* rank3.calls: the collectives that the rank has issued and not completed, written by a thread when
  the file rank3.ask appears. It checks twice a second.
"""

import faulthandler
import json
import mmap
import os
import signal
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

FOLDER = "MOEBIUS_HEARTBEATS"  # in the environment of every rank that is watched
WINDOW = 20  # steps of the published median

_PAGE = struct.Struct("<QIIqqdddQ")
PAGE_BYTES = _PAGE.size
_LOOK_S = 0.5


class Phase(IntEnum):
    """Names what a rank is doing; each has its own limit (`job.limits`)."""

    START = 0  # joins the world, builds the model, resumes
    COMPILE = 1  # the process's first step, which compiles kernels
    DATA_WAIT = 2  # waits for the next batch
    STEP = 3
    CKPT = 4  # copies the state for a checkpoint, or waits for a write
    EVAL = 5
    END = 6  # finished; leaves the world


@dataclass(frozen=True)
class Beat:
    """Holds the contents of a rank's page."""

    pid: int
    phase: Phase
    step: int  # the current one
    since_s: float  # CLOCK_MONOTONIC when the phase began
    median_step_s: float  # of the last WINDOW steps; 0: none yet
    own_step_s: float  # median time of a step without waiting for others; 0: unknown
    started_ticks: int  # of the process, since boot; 0 without /proc


class Heartbeat:
    """Writes a rank's page from the main thread; one per process."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page = mmap.mmap(-1, PAGE_BYTES) if page is None else page
        self._pid = os.getpid()
        self._started_ticks = started_ticks(self._pid)
        self._number = 0
        self._phase, self._step = Phase.START, 0
        self._since_s = time.monotonic()
        self._step_began_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._own_s: deque[float] = deque(maxlen=WINDOW)
        self._medians = (0.0, 0.0)
        self._is_warm = False  # a step was completed
        self._write()

    def enter(self, phase: Phase) -> None:
        """Publishes that another phase begins."""
        self._phase, self._since_s = phase, time.monotonic()
        self._write()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Publishes a phase, and the previous one again at its end."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, step: int) -> None:
        """Publishes that a step begins; the first of a process compiles."""
        self._step = step
        self.enter(Phase.STEP if self._is_warm else Phase.COMPILE)
        self._step_began_s = self._since_s

    def end_step(self, *, own_s: float | None = None) -> None:
        """Counts the completed step; its phase lasts until another begins.

        Args:
            own_s: this rank's working time without waiting for others, if known.
        """
        if self._is_warm and self._step_began_s is not None:
            self._steps_s.append(time.monotonic() - self._step_began_s)
            if own_s is not None:
                self._own_s.append(own_s)
            own = statistics.median(self._own_s) if len(self._own_s) == WINDOW else 0.0
            self._medians = (statistics.median(self._steps_s), own)
        self._is_warm = True
        self.enter(Phase.STEP)  # the first step's limit ends with it

    def _write(self) -> None:
        self._number += 1
        _PAGE.pack_into(
            self._page,
            0,
            self._number,
            self._pid,
            self._phase,
            self._step,
            self._started_ticks,
            self._since_s,
            *self._medians,
            self._number,
        )


def open_heartbeat() -> Heartbeat:
    """Opens this rank's heartbeat, on a shared page if a supervisor asks for it.

    It also prepares the rank to report where it hangs; see the module's head.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return Heartbeat()
    rank = int(os.environ.get("RANK", "0"))
    path = page_of(Path(folder), rank)
    # Register before the page exists, because its readers may send the signal.
    stacks = open(path.with_suffix(".stacks"), "wb", buffering=0)  # noqa: SIM115 - until the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.truncate(descriptor, PAGE_BYTES)
        page = mmap.mmap(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)
    threading.Thread(
        target=_answer, args=(path, _recorded_calls), name="heartbeat", daemon=True
    ).start()
    return Heartbeat(page)


def page_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's page."""
    return folder / f"rank{rank}.beat"


def read_page(path: Path) -> Beat | None:
    """Returns the contents of a rank's page; None: there is none yet."""
    try:
        page = path.read_bytes()
        while page != (page := path.read_bytes()):
            pass  # a write happened in between; it takes microseconds
    except FileNotFoundError:
        return None
    if len(page) < PAGE_BYTES:
        return None
    first, pid, phase, step, ticks, since_s, median_s, own_s, last = _PAGE.unpack_from(page)
    if not first or first != last:
        return None  # the writer stopped during its first write
    return Beat(pid, Phase(phase), step, since_s, median_s, own_s, ticks)


def started_ticks(pid: int) -> int:
    """Returns a process's start time, which tells it from a later one with the same id.

    0 without /proc or without such a process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class PhaseClock:
    """Measures the seconds from one mark to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Forgets all phases and starts again."""
        self.seconds = {}
        self._last_s = time.monotonic()

    def mark(self, phase: str) -> None:
        """Ends a phase; repeated phases of one name add up."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last_s
        self._last_s = now

    def rounded(self) -> dict[str, float]:
        """Returns the phases' seconds to the millisecond, in the order of their first marks."""
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}


# Where the rank is in its collectives -----------------------------------------------------------


def _answer(page: Path, recorded: Callable[[], list[dict[str, Any]]]) -> None:
    """Answers requests for the rank's collectives as long as the process lives."""
    asked, partial = page.with_suffix(".ask"), page.with_suffix(".calls.tmp")
    while page.parent.exists():
        if asked.exists():
            partial.write_text(json.dumps(recorded()), encoding="utf-8")
            partial.replace(page.with_suffix(".calls"))
            asked.unlink(missing_ok=True)
        time.sleep(_LOOK_S)


def _recorded_calls() -> list[dict[str, Any]]:
    from ...distributed.process.diagnosis import positions_in_groups

    return positions_in_groups()
