"""Collects evidence about ranks that hang, on their own machine, within seconds.

For every rank: the state of its process and where it waits in the kernel; the Python stacks of all its
threads, which faulthandler writes on SIGUSR1 (train/record/heartbeat.py); and its progress in the
collectives. All ranks are asked at once. A stopped process cannot answer; for it there is only /proc.

The evidence goes to one file per rank, logs/g001/stall/rank3.txt. Cost: about half a second if all answer,
WAIT_S if one does not.
"""

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...train.record.heartbeat import Beat, page_of
from .heartbeats import GONE, STOPPED, process_state

WAIT_S = 2.5
_LOOK_S = 0.1
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)')


@dataclass(frozen=True)
class Evidence:
    """Holds what is known of one rank as plain values, since they travel between machines."""

    rank: int
    process: str  # state in /proc (R, S, D, T, Z), or GONE; empty: unknown
    where: str = ""  # the main thread's innermost frame of ours: loop.py:12 in step
    # progress in each of its groups (diagnosis.positions_in_groups); None: no answer
    positions: list[dict[str, Any]] | None = None


def gather(folder: Path, beats: dict[int, Beat], into: Path) -> list[Evidence]:
    """Asks all ranks of this machine where they are, and writes a file about each.

    Args:
        folder: holds the ranks' pages.
        beats: contents of the pages, by rank.
        into: the folder of the files.
    """
    asked = {rank: _Asked(page_of(folder, rank), beat) for rank, beat in beats.items()}
    deadline = time.monotonic() + WAIT_S
    waiting = list(asked.values())
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        waiting = [each for each in waiting if not each.has_answered()]
    found = []
    for rank, each in sorted(asked.items()):
        stacks, positions = each.stacks(), each.positions()
        with contextlib.suppress(OSError):  # a full disk must not hide the cause
            into.mkdir(parents=True, exist_ok=True)
            text = _describe(rank, each, stacks, positions)
            (into / f"rank{rank}.txt").write_text(text, encoding="utf-8")
        found.append(Evidence(rank, each.process, innermost_frame(stacks), positions))
    return found


def innermost_frame(stacks: str) -> str:
    """Returns the main thread's innermost frame of ours, otherwise its innermost frame.

    faulthandler lists the main thread last, and the innermost frame first.
    """
    main = re.split(r"^(?:Current )?[Tt]hread ", stacks, flags=re.MULTILINE)[-1]
    frames = [match for line in main.splitlines() if (match := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if "/moebius/" in frame["file"]]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"


class _Asked:
    """Asks one rank; a process that is stopped or gone is not signalled."""

    def __init__(self, page: Path, beat: Beat) -> None:
        self.beat = beat
        self.process = process_state(beat)
        self._stacks, self._calls = page.with_suffix(".stacks"), page.with_suffix(".calls")
        self._size = self._before = _size(self._stacks)
        self._can_answer = self.process not in (GONE, *STOPPED)
        if self._can_answer:
            try:
                self._calls.unlink(missing_ok=True)
                page.with_suffix(".ask").touch()
                os.kill(beat.pid, signal.SIGUSR1)
            except ProcessLookupError:
                self.process, self._can_answer = GONE, False
            except OSError:  # no room for the question
                self._can_answer = False

    def has_answered(self) -> bool:
        """Returns whether the answers are complete: the stacks no longer grow."""
        before, self._size = self._size, _size(self._stacks)
        has_stacks = self._size > self._before and self._size == before
        return not self._can_answer or (has_stacks and self._calls.exists())

    def stacks(self) -> str:
        """Returns what faulthandler wrote after the signal."""
        try:
            return self._stacks.read_bytes()[self._before :].decode(errors="replace")
        except OSError:
            return ""

    def positions(self) -> list[dict[str, Any]] | None:
        """Returns the rank's progress in its groups; None without an answer."""
        if not self._can_answer or not self._calls.exists():
            return None
        try:
            return json.loads(self._calls.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _describe(rank: int, asked: _Asked, stacks: str, positions: list[dict[str, Any]] | None) -> str:
    age_s = time.monotonic() - asked.beat.since_s
    lines = [
        f"rank {rank}, process {asked.beat.pid}: phase {asked.beat.phase.name.lower()} of step "
        f"{asked.beat.step} for {age_s:.1f} s",
        f"state: {asked.process or 'not known'}; in the kernel: {_in_kernel(asked.beat.pid)}",
        "",
        "collectives:" if positions is not None else "collectives: no answer",
    ]
    for position in positions or []:
        pending = position["pending"]
        waits = f"waits in no. {pending[0]}: {pending[1]} of {pending[2]}" if pending else "in none"
        lines.append(f"  group {position['description']!r}: issued {position['issued']}, {waits}")
    return "\n".join([*lines, "", stacks or "no Python stacks: it did not answer SIGUSR1", ""])


def _in_kernel(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii") or "not known"
    except OSError:
        return "not known"
