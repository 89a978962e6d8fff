"""Reads the pages in which the ranks of this machine report where they are (train/record/heartbeat.py).

The pages are in memory (/dev/shm), in a folder that only this user can enter. Reading those of eight ranks
takes a millisecond, and a hanging file system cannot keep a rank from writing. Ages use CLOCK_MONOTONIC of
one machine.

A rank without a CPU is slow, not stuck. Linux counts how long a thread was ready but had no CPU
(/proc/PID/schedstat); the main thread's share in its current phase is reported beside the age. Where the
kernel does not count it, it is 0.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...train.record.heartbeat import Beat, page_of, read_page, started_ticks
from ..nodes import processes

GONE = "gone"  # in place of a process's state
STOPPED = ("T", "t")  # by SIGSTOP, or by a debugger

_FOLDER = re.compile(r"[0-9a-f]{16}-node\d+-g\d+")
_IN_MEMORY = "/dev/shm"  # where it exists


@dataclass(frozen=True)
class RankState:
    """Holds where one rank is as plain values, since they travel between machines."""

    rank: int
    phase: str  # a member of train/record/heartbeat.py's `Phase`, in lower case
    step: int  # in progress
    age_s: float  # of the phase
    median_step_s: float = 0.0  # of the last steps; 0: none yet
    own_step_s: float = 0.0  # the same without waiting for other ranks; 0: unknown
    starved_s: float = 0.0  # part of `age_s` in which it was ready but had no CPU


class WatchedRanks:
    """Reads the pages of one node's ranks in one generation."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self.folder = folder
        self.ranks = list(ranks)
        self._ready_ns: dict[int, int] = {}  # by process, as of the last look
        self._began_ns: dict[tuple[int, float], int] = {}  # at the look before a phase was seen
        self._run_dir = ""
        self._before_start_ns: dict[int, int] = {}  # by process that is older than this generation

    def open(self, run_dir: str = "") -> None:
        """Makes the folder and removes those of this node's earlier generations."""
        self._run_dir = run_dir
        self._before_start_ns = {pid: _ready_without_cpu_ns(pid) for pid in processes.find(run_dir)}
        node = self.folder.name.partition("-g")[0]
        for older in self.folder.parent.glob(f"{node}-g*"):
            shutil.rmtree(older, ignore_errors=True)
        sweep(self.folder.parent)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        processes.write_owner(self.folder, os.getpid())

    def close(self) -> None:
        """Removes the folder, if it exists."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def look(self) -> list[RankState]:
        """Returns where the ranks are; a rank that has not begun to train is absent."""
        beats = self.beats()
        ready_ns = {beat.pid: _ready_without_cpu_ns(beat.pid) for beat in beats.values()}
        # Starvation between the last look and the start of the phase counts for the phase: the
        # error is less than the time between two looks.
        self._began_ns = {
            key: self._began_ns.get(key, self._ready_ns.get(key[0], ready_ns[key[0]]))
            for key in map(_key, beats.values())
        }
        self._ready_ns = ready_ns
        return [self._state_of(rank, beat) for rank, beat in beats.items()]

    def starved_at_start_s(self) -> float:
        """Returns how long this start's processes were ready but had no CPU.

        Template, agent and ranks do their work one after another, so their times add up; those of ranks do not.
        """
        waited: dict[bool, list[int]] = {True: [0], False: []}
        for pid, marks in processes.find(self._run_dir).items():
            ready_ns = _ready_without_cpu_ns(pid) - self._before_start_ns.get(pid, 0)
            is_rank = processes.RANK in marks
            if not is_rank or int(marks[processes.RANK]) in self.ranks:
                waited[is_rank].append(ready_ns)
        return (sum(waited[False]) + max(waited[True])) / 1e9

    def beats(self) -> dict[int, Beat]:
        """Returns the contents of the pages, by rank."""
        found = {rank: read_page(page_of(self.folder, rank)) for rank in self.ranks}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def _state_of(self, rank: int, beat: Beat) -> RankState:
        age_s = max(0.0, time.monotonic() - beat.since_s)
        starved_s = (self._ready_ns[beat.pid] - self._began_ns[_key(beat)]) / 1e9
        return RankState(
            rank=rank,
            phase=beat.phase.name.lower(),
            step=beat.step,
            age_s=age_s,
            median_step_s=beat.median_step_s,
            own_step_s=beat.own_step_s,
            starved_s=min(max(0.0, starved_s), age_s),
        )


def sweep(base: Path) -> None:
    """Removes the folders of nodes that were killed together with their ranks."""
    for folder in base.iterdir() if base.is_dir() else ():
        if _FOLDER.fullmatch(folder.name) and processes.was_left(folder):
            pages = (read_page(path) for path in folder.glob("rank*.beat"))
            ranks = [(beat.pid, beat.started_ticks) for beat in pages if beat is not None]
            if all(started_ticks(pid) != ticks for pid, ticks in ranks):
                shutil.rmtree(folder, ignore_errors=True)


def folder_of(run_dir: str, generation: int, node_rank: int) -> Path:
    """Returns the folder of a node's pages, the same in every process of this user."""
    run = hashlib.sha256(run_dir.encode()).hexdigest()[:16]
    return _private_folder(run_dir) / f"{run}-node{node_rank}-g{generation:03d}"


def process_state(beat: Beat) -> str:
    """Returns the state of a rank's process; GONE if it has ended, "" if unknown."""
    if beat.started_ticks == 0:
        return ""
    if started_ticks(beat.pid) != beat.started_ticks:
        return GONE
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{beat.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return GONE


def _private_folder(run_dir: str) -> Path:
    """Returns a folder that only this user can enter: in memory, or in the temporary folder.

    If somebody else owns its name, the folder is in the run folder.
    """
    name = f"moebius-{os.getuid()}"
    for base in (_IN_MEMORY, tempfile.gettempdir()):
        folder = Path(base, name)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
            private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            if private and found.st_uid == os.getuid():
                return folder
    return Path(run_dir) / "logs" / "heartbeats"


def _key(beat: Beat) -> tuple[int, float]:
    return beat.pid, beat.since_s


def _ready_without_cpu_ns(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
