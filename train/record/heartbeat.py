"""The page on which a rank says where it is: its phase and step, and since when.

A rank that hangs cannot tell anybody, so it tells beforehand: whenever its phase changes it writes
PAGE_BYTES into a file that it has mapped into memory (no system call; 2 µs, a few times per step, and the medians 10).
Whoever supervises the ranks maps or reads the same file (`read_page`). The file lies in the folder
that $MOEBIUS_HEARTBEATS names, on the same machine and not on its disks; without the variable a
rank keeps the page to itself.

Times are CLOCK_MONOTONIC, which all processes of a machine share: somebody who sets the clock makes
no rank look dead. A reader may come in the middle of a write: the page begins and ends with the
number of the write, which must be equal, and two reads must give the same.

Two more files lie beside it, for the moment when ranks no longer move (cluster/watching/):

* rank3.stacks: SIGUSR1 lets `faulthandler` write the Python stacks of all threads there, from a
  signal handler in C: also while the main thread is inside C++ code or another holds Python's lock.
* rank3.calls: what collectives the rank has issued and which of them have not ended, written by a
  thread when it finds the file rank3.ask. It looks for it twice a second.
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
WINDOW = 20  # steps whose median is told

_PAGE = struct.Struct("<QIIqqdddQ")
PAGE_BYTES = _PAGE.size
_LOOK_S = 0.5


class Phase(IntEnum):
    """Names what a rank is doing; each has its own limit (`job.limits`)."""

    START = 0  # joins the world, builds the model, resumes
    COMPILE = 1  # the first step of the process, in which kernels are compiled
    DATA_WAIT = 2  # waits for the next batch
    STEP = 3
    CKPT = 4  # copies the state for a checkpoint, or waits until one is written
    EVAL = 5
    END = 6  # the run is done; leaves the world


@dataclass(frozen=True)
class Beat:
    """Says where a rank is, as its page tells it."""

    pid: int
    phase: Phase
    step: int  # the one that is being made
    since_s: float  # CLOCK_MONOTONIC when the phase began
    median_step_s: float  # of the last WINDOW steps; 0: none was made yet
    own_step_s: float  # median of what a step takes without waiting for others; 0: not known
    started_ticks: int  # of the process, since the machine's start; 0 where there is no /proc


class Heartbeat:
    """Writes a rank's page; one per process. All of it happens in the main thread."""

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
        self._is_warm = False  # a step was made
        self._write()

    def enter(self, phase: Phase) -> None:
        """Says that another phase begins."""
        self._phase, self._since_s = phase, time.monotonic()
        self._write()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Says that a phase begins, and at its end that the one before goes on."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, step: int) -> None:
        """Says that a step begins; the first of a process compiles."""
        self._step = step
        self.enter(Phase.STEP if self._is_warm else Phase.COMPILE)
        self._step_began_s = self._since_s

    def end_step(self, *, own_s: float | None = None) -> None:
        """Counts the step that has just been made; the phase goes on until another begins.

        Args:
            own_s: how long this rank has worked on it without waiting for others, if that is known.
        """
        if self._is_warm and self._step_began_s is not None:
            self._steps_s.append(time.monotonic() - self._step_began_s)
            if own_s is not None:
                self._own_s.append(own_s)
            own = statistics.median(self._own_s) if len(self._own_s) == WINDOW else 0.0
            self._medians = (statistics.median(self._steps_s), own)
        self._is_warm = True
        self.enter(Phase.STEP)  # the first step's limit is not that of what follows it

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
    """Returns this rank's heartbeat: on a page that others read, where a supervisor asks for it.

    It also prepares the rank for telling where it hangs; see the head of this module.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return Heartbeat()
    rank = int(os.environ.get("RANK", "0"))
    path = page_of(Path(folder), rank)
    # before the page is there: whoever sees the page may send the signal
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
    """Returns where a rank's page lies."""
    return folder / f"rank{rank}.beat"


def read_page(path: Path) -> Beat | None:
    """Returns what a rank's page says; None where there is none yet."""
    try:
        page = path.read_bytes()
        while page != (page := path.read_bytes()):
            pass  # a write came between: it takes microseconds
    except FileNotFoundError:
        return None
    if len(page) < PAGE_BYTES:
        return None
    first, pid, phase, step, ticks, since_s, median_s, own_s, last = _PAGE.unpack_from(page)
    if not first or first != last:
        return None  # its writer was stopped in the middle of the first write
    return Beat(pid, Phase(phase), step, since_s, median_s, own_s, ticks)


def started_ticks(pid: int) -> int:
    """Returns when a process was started, which tells it from a later one with its number; 0 where
    there is no /proc, or no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class PhaseClock:
    """Counts the seconds from one mark to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Forgets all phases and begins anew."""
        self.seconds = {}
        self._last_s = time.monotonic()

    def mark(self, phase: str) -> None:
        """Says that a phase has ended; what belongs to one of the same name is added to it."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last_s
        self._last_s = now

    def rounded(self) -> dict[str, float]:
        """Returns the phases in milliseconds' precision, in the order of their first mark."""
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}


# Where the rank is in its collectives -----------------------------------------------------------


def _answer(page: Path, recorded: Callable[[], list[dict[str, Any]]]) -> None:
    """Waits for somebody who asks, and answers, as long as the process lives."""
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
