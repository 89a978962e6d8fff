"""Where the ranks of this machine are, read from the pages that they write (train/record/heartbeat.py).

The pages lie in memory (/dev/shm), in a folder that only this user can enter: reading those of
eight ranks takes a millisecond, and no file system or network that hangs can keep a rank from
writing. Ages are differences of CLOCK_MONOTONIC on one machine.

A rank that gets no CPU is slow, not stuck. Linux counts how long a thread was ready to run and had
to wait for a CPU (/proc/PID/schedstat); what the main thread has waited in its phase comes with
the age, so that whoever judges can leave it out. Where the kernel does not tell, it is 0.
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
    """Says where one rank is; plain values, as they come from another machine."""

    rank: int
    phase: str  # a name of train/record/heartbeat.py's `Phase`, in small letters
    step: int  # that is being made
    age_s: float  # of the phase
    median_step_s: float = 0.0  # of the last steps; 0: none was made yet
    own_step_s: float = 0.0  # of these, without waiting for other ranks; 0: not known
    starved_s: float = 0.0  # of the phase's age, ready to run without a CPU
    process: str = ""  # its state as /proc says it (R, S, D, T, Z), or GONE; empty: not known
    pid: int = 0


class WatchedRanks:
    """Reads the pages of one node's ranks in one generation."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self.folder = folder
        self.ranks = list(ranks)
        self._ready_ns: dict[int, int] = {}  # by process, as of the last look
        self._began_ns: dict[tuple[int, float], int] = {}  # at the look before a phase was seen

    def open(self) -> None:
        """Makes the folder, and removes those of this node's earlier generations."""
        node = self.folder.name.partition("-g")[0]
        for older in self.folder.parent.glob(f"{node}-g*"):
            shutil.rmtree(older, ignore_errors=True)
        sweep(self.folder.parent)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        processes.write_owner(self.folder, os.getpid())

    def close(self) -> None:
        """Removes the folder; harmless if it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def look(self) -> list[RankState]:
        """Returns where the ranks are; one that has not begun to train has no state yet."""
        beats = self.beats()
        ready_ns = {beat.pid: _ready_without_cpu_ns(beat.pid) for beat in beats.values()}
        # What was waited between the last look and the beginning of the phase is counted for the
        # phase: too much, by less than the time between two looks.
        self._began_ns = {
            key: self._began_ns.get(key, self._ready_ns.get(key[0], ready_ns[key[0]]))
            for key in map(_key, beats.values())
        }
        self._ready_ns = ready_ns
        return [self._state_of(rank, beat) for rank, beat in beats.items()]

    def beats(self) -> dict[int, Beat]:
        """Returns what the pages say, by rank."""
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
            process=process_state(beat),
            pid=beat.pid,
        )


def sweep(base: Path) -> None:
    """Removes the folders of nodes that were killed with their ranks."""
    for folder in base.iterdir() if base.is_dir() else ():
        if _FOLDER.fullmatch(folder.name) and processes.was_left(folder):
            pages = (read_page(path) for path in folder.glob("rank*.beat"))
            ranks = [(beat.pid, beat.started_ticks) for beat in pages if beat is not None]
            if all(started_ticks(pid) != ticks for pid, ticks in ranks):
                shutil.rmtree(folder, ignore_errors=True)


def folder_of(run_dir: str, generation: int, node_rank: int) -> Path:
    """Returns where the pages of one node's ranks lie, the same in every process of this user."""
    run = hashlib.sha256(run_dir.encode()).hexdigest()[:16]
    return _private_folder(run_dir) / f"{run}-node{node_rank}-g{generation:03d}"


def process_state(beat: Beat) -> str:
    """Returns the state of a rank's process; GONE if it has ended, "" if that cannot be seen."""
    if beat.started_ticks == 0:
        return ""
    if started_ticks(beat.pid) != beat.started_ticks:
        return GONE
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{beat.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return GONE


def _private_folder(run_dir: str) -> Path:
    """Returns a folder of this user's alone: in memory, or where temporary files are.

    Where somebody else holds its name, it is in the run folder.
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
