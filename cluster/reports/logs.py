"""The logs of a run's ranks, complete across its restarts: one order, generation by generation.

A rank's log of one generation is one file, logs/g001/node0/rank0.log; the rank of the next
generation begins another. Here they are one stream: the last 100 lines of rank 3 reach back into
earlier generations where the newest one has said less. Lines of ranks carry a time where Python's
logging wrote them; a line without one belongs to the line before it.
"""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..job import read_status

POLL_S = 0.4
_BLOCK = 64 << 10

_LOG_NAME = re.compile(r"logs/g(\d+)/node(\d+)/(?:rank(\d+)|agent)\.log$")
_TIME = re.compile(rb"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)  # of ranks 0, 1, …, 12 like 0


@dataclass(frozen=True)
class LogLine:
    """Holds one line of a log, and whose it is."""

    generation: int
    node: int
    rank: int | None  # None: the node's agent
    text: str

    @property
    def who(self) -> str:
        """Returns generation and process: "g1 rank0"."""
        name = f"node{self.node} agent" if self.rank is None else f"rank{self.rank}"
        return f"g{self.generation} {name}"

    def __str__(self) -> str:
        return f"[{self.who}] {self.text}"

    def coloured(self) -> str:
        """Returns the line for a terminal: a colour per rank, agents dim."""
        code = 2 if self.rank is None else _COLOURS[self.rank % len(_COLOURS)]
        return f"\x1b[{code}m[{self.who}]\x1b[0m {self.text}"

    def as_json(self) -> str:
        """Returns the line as one JSON object."""
        return json.dumps(vars(self), ensure_ascii=False)


@dataclass
class _LogFile:
    path: Path
    generation: int
    node: int
    rank: int | None
    offset: int = 0

    @property
    def process(self) -> tuple[int, int]:
        """What tells the ranks and agents of a run from each other, across generations."""
        return (-1, self.node) if self.rank is None else (self.rank, -1)

    def new_lines(self, *, all_of_it: bool) -> Iterator[LogLine]:
        """Whole lines since the last call; with `all_of_it` also a last one without an end."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n") and not all_of_it:
                    return
                self.offset += len(line)
                text = line.decode(errors="replace").rstrip("\n")
                yield LogLine(self.generation, self.node, self.rank, text)

    def skip_until(self, since: float) -> None:
        """Goes to the first line that was written at `since` or later, as far as lines tell."""
        if self.path.stat().st_mtime < since:
            self.offset = self.path.stat().st_size
            return
        first = datetime.fromtimestamp(since).isoformat(" ", "seconds").encode()
        offset, begin, told = 0, None, False
        with open(self.path, "rb") as file:
            for line in file:
                if stamp := _TIME.match(line):
                    told = True
                    if stamp[1].replace(b"T", b" ") >= first:
                        begin = offset
                        break
                offset += len(line)
        if told:  # a log without any times is kept whole: it was written to since then
            self.offset = offset if begin is None else begin

    def keep_last(self, count: int) -> int:
        """Goes to the last `count` lines after where it stands; returns how many there are."""
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end <= self.offset:
                return 0
            at, found = end - 1, 0  # the last byte ends the last line, or lies in it
            while at > self.offset:
                size = min(_BLOCK, at - self.offset)
                file.seek(at - size)
                block, cut = file.read(size), size
                while (cut := block.rfind(b"\n", 0, cut)) >= 0:
                    found += 1
                    if found == count:
                        self.offset = at - size + cut + 1
                        return count
                at -= size
        return found + 1


def follow_logs(
    run_dir: Path,
    *,
    rank: int | None = None,
    generation: int | None = None,
    since: float | None = None,
    tail: int | None = None,
    follow: bool = False,
    poll_s: float = POLL_S,
) -> Iterator[LogLine]:
    """Yields the lines of the ranks' logs, generation by generation.

    Args:
        rank: only this one; None: all ranks and the agents.
        generation: only this one.
        since: leaves out what was written earlier, seconds since the epoch.
        tail: of each rank and agent only the last lines, over all its generations together.
        follow: go on until the job has ended.

    Raises:
        ValueError: there are no logs, or none of this rank, and nothing to wait for.
    """
    files: dict[Path, _LogFile] = {}
    is_first = True
    while True:
        over = not follow or read_status(run_dir).state.is_final
        found = _log_files(run_dir, rank, generation)
        new = [file for file in found if file.path not in files]
        files |= {file.path: file for file in new}
        if is_first:
            _leave_out(new, since, tail)
            is_first = False
        for file in found:
            yield from files[file.path].new_lines(all_of_it=over)
        if over:
            if not files:
                raise ValueError(_no_logs(run_dir, rank, generation))
            return
        time.sleep(poll_s)


def parse_since(text: str) -> float:
    """Returns the time that "10m", "2h" (ago) or "2026-11-22 03:00" (local time) names.

    Raises:
        ValueError: it is neither.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return time.time() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"--since {text!r}: write how long ago (90s, 10m, 2h, 1d) or when (2026-11-22 03:00)"
        ) from None


def _leave_out(files: list[_LogFile], since: float | None, tail: int | None) -> None:
    """Lets old logs begin later, as asked."""
    if since is not None:
        for file in files:
            file.skip_until(since)
    if tail is None:
        return
    of_process: dict[tuple[int, int], list[_LogFile]] = defaultdict(list)
    for file in files:
        of_process[file.process].append(file)
    for its_files in of_process.values():
        left = tail
        for file in reversed(its_files):
            if left == 0:
                file.offset = file.path.stat().st_size
            else:
                left -= file.keep_last(left)


def _no_logs(run_dir: Path, rank: int | None, generation: int | None) -> str:
    which = "" if rank is None else f" of rank {rank}"
    which += "" if generation is None else f" in generation {generation}"
    return f"{run_dir}: there are no logs{which} (they would be in logs/g001/node0/rank0.log …)"


def _log_files(run_dir: Path, rank: int | None, generation: int | None) -> list[_LogFile]:
    files = []
    for path in run_dir.glob("logs/g*/node*/*.log"):
        match = _LOG_NAME.search(path.as_posix())
        if match is None:
            continue
        its_rank = None if match[3] is None else int(match[3])
        file = _LogFile(path, int(match[1]), int(match[2]), its_rank)
        if rank in (None, its_rank) and generation in (None, file.generation):
            files.append(file)
    return sorted(
        files, key=lambda file: (file.generation, file.node, -1 if file.rank is None else file.rank)
    )
