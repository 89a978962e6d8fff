"""Merges the logs of a run's ranks into one stream, across generations.

The log of a rank in one generation is logs/g001/node0/rank0.log. The last 100 lines of a rank reach back into
older generations. A log that shrank is read again from its start: somebody truncated it to bound it.

A log is untrusted: what is not a regular file of the run folder is skipped (`skipped_logs` names it), control
characters are spelled out, and a line of more than MAX_LINE bytes is cut.
"""

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...data_pipeline.files import open_regular
from ...data_pipeline.words import runs_near, some_of
from ...train.record.redaction import redact, secret_values
from ...train.record.untrusted import escaped
from ..job import read_status
from .json_lines import MAX_LINE

POLL_S = 0.4
_BLOCK = 64 << 10

_LOGS = "logs/g*/node*/*.log"
_LOG_NAME = re.compile(r"logs/g(\d+)/node(\d+)/(?:rank(\d+)|agent)\.log$")
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)  # of ranks 0, 1, …, 12 like 0


@dataclass(frozen=True)
class LogLine:
    """Holds one line of a log and who wrote it."""

    generation: int
    node: int
    rank: int | None  # None: the node's agent
    text: str

    @property
    def who(self) -> str:
        """Names the generation and the process: "g1 rank0"."""
        name = f"node{self.node} agent" if self.rank is None else f"rank{self.rank}"
        return f"g{self.generation} {name}"

    def __str__(self) -> str:
        return f"[{self.who}] {self.text}"

    def coloured(self) -> str:
        """Formats the line for a terminal: a colour per rank, agents dim."""
        code = 2 if self.rank is None else _COLOURS[self.rank % len(_COLOURS)]
        return f"\x1b[{code}m[{self.who}]\x1b[0m {self.text}"

    def as_json(self) -> str:
        """Returns the line as one JSON object."""
        return json.dumps(vars(self), ensure_ascii=False)


@dataclass
class _Log:
    """The log of one process in one generation, and how far it was read."""

    path: Path
    generation: int
    node: int
    rank: int | None
    secrets: list[str]
    read: int = 0  # bytes

    def new_lines(self, *, all_of_it: bool) -> Iterator[LogLine]:
        """Yields the whole lines since the last call; `all_of_it` includes an incomplete last one."""
        with contextlib.suppress(OSError):  # not there, or a circle of links
            if self.path.stat().st_size == self.read:
                return
        if (file := _open(self.path)) is None:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.read:
                self.read = 0  # it was truncated
            file.seek(self.read)
            while line := file.readline(MAX_LINE):
                if not (line.endswith(b"\n") or len(line) == MAX_LINE or all_of_it):
                    return  # still being written
                self.read += len(line)
                text = line.decode(errors="replace").rstrip("\r\n")
                text = escaped(redact(text, secrets=self.secrets))
                yield LogLine(self.generation, self.node, self.rank, text)

    def keep_last(self, count: int) -> int:
        """Skips all but the last `count` lines; returns how many there are."""
        if (file := _open(self.path)) is None:
            return 0
        with file:
            self.read, found = _last_lines(file, count)
        return found


def _last_lines(file: BinaryIO, count: int) -> tuple[int, int]:
    """Returns where the last `count` lines of a file begin, and how many there are."""
    end = file.seek(0, os.SEEK_END)
    if end == 0 or count == 0:
        return end, 0
    at, found = end - 1, 0  # the last byte ends the last line or belongs to it
    while at > 0:
        size = min(_BLOCK, at)
        file.seek(at - size)
        block, cut = file.read(size), size
        while (cut := block.rfind(b"\n", 0, cut)) >= 0:
            found += 1
            if found == count:
                return at - size + cut + 1, count
        at -= size
    return 0, found + 1


def _open(path: Path) -> BinaryIO | None:
    """Opens a log, if there is one in the run folder."""
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        return open_regular(path) if _is_own(path) else None
    return None


def _is_own(path: Path) -> bool:
    """Returns whether a log is a regular file of its run folder, and no link out of it."""
    found = Path(os.path.realpath(path))  # unlike `resolve`, ends at a circle of links
    run_dir = path.parents[3]  # RUN/logs/g001/node0/rank0.log
    return found.is_file() and found.is_relative_to(os.path.realpath(run_dir))


def skipped_logs(run_dir: Path) -> str:
    """Names the logs that are skipped because they are not regular files of the run folder, if any."""
    found = [path for path in run_dir.glob(_LOGS) if _LOG_NAME.search(path.as_posix())]
    skipped = [path for path in found if not _is_own(path) and os.path.lexists(path)]
    names = sorted(path.relative_to(run_dir).as_posix() for path in skipped)
    if not names:
        return ""
    words = "log(s) that are not regular files of the run folder"
    return escaped(f"skipped {len(names)} {words}: {some_of(names)}")


def follow_logs(
    run_dir: Path,
    *,
    rank: int | None = None,
    generation: int | None = None,
    tail: int | None = None,
    follow: bool = False,
    poll_s: float = POLL_S,
) -> Iterator[LogLine]:
    """Yields the lines of the ranks' logs, generation by generation.

    Args:
        rank: only this one; None: all ranks and agents.
        generation: only this one.
        tail: only the last lines of each rank and agent, over all its generations.
        follow: continue until the job has ended.

    Raises:
        ValueError: there are no logs, or none of this rank.
    """
    logs: dict[Path, _Log] = {}
    secrets = secret_values(os.environ)
    is_first = True
    while True:
        over = not follow or read_status(run_dir).state.is_final
        found = _find_logs(run_dir, rank, generation, secrets)
        new = [log for log in found if log.path not in logs]
        logs |= {log.path: log for log in new}
        if is_first and tail is not None:
            _keep_last(new, tail)
        is_first = False
        for log in found:
            yield from logs[log.path].new_lines(all_of_it=over)
        if over:
            if not logs:
                raise ValueError(_no_logs(run_dir, rank, generation))
            return
        time.sleep(poll_s)


def _keep_last(logs: list[_Log], tail: int) -> None:
    """Skips all but the last `tail` lines of each rank and agent."""
    left: dict[tuple[int | None, int], int] = defaultdict(lambda: tail)
    for log in reversed(logs):
        process = (log.rank, log.node if log.rank is None else -1)
        left[process] -= log.keep_last(left[process])


def _no_logs(run_dir: Path, rank: int | None, generation: int | None) -> str:
    which = "" if rank is None else f" of rank {rank}"
    which += "" if generation is None else f" in generation {generation}"
    where = "they would be in logs/g001/node0/rank0.log …"
    return f"{run_dir}: there are no logs{which} ({where}){runs_near(run_dir)}"


def _find_logs(
    run_dir: Path, rank: int | None, generation: int | None, secrets: list[str]
) -> list[_Log]:
    logs = []
    for path in run_dir.glob(_LOGS):
        match = _LOG_NAME.search(path.as_posix())
        if match is None:
            continue
        its_rank = None if match[3] is None else int(match[3])
        log = _Log(path, int(match[1]), int(match[2]), its_rank, secrets)
        if rank in (None, its_rank) and generation in (None, log.generation):
            logs.append(log)
    return sorted(
        logs, key=lambda log: (log.generation, log.node, -1 if log.rank is None else log.rank)
    )
