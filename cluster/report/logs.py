"""Merges the logs of a run's ranks into one stream, across rotations and generations.

The log of a rank in one generation is logs/g001/node0/rank0.log; rotation leaves the older pieces
rank0.log.1, rank0.log.2, … (train/record/process_log.py). The last 100 lines of a rank therefore reach back
into older pieces and generations.

A piece keeps its number. The file without a number is piece n + 1, where n is the highest number; reading
checks that no rotation happened while the file was opened. Older pieces are read again as well: a child of
the rank may still write there.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...plugins import runs_near, some_of
from ...train.record.process_log import older_pieces
from ...train.record.redaction import redact, secret_values
from ...train.record.untrusted import escaped, open_regular
from ..job import read_status
from .json_lines import MAX_LINE

POLL_S = 0.4
_BLOCK = 64 << 10

_LOGS = "logs/g*/node*/*.log*"
_LOG_NAME = re.compile(r"logs/g(\d+)/node(\d+)/(?:rank(\d+)|agent)\.log(?:\.\d+)?$")
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

    path: Path  # of the newest piece
    generation: int
    node: int
    rank: int | None
    secrets: list[str]
    read: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # bytes of each piece
    torn: bytes = b""  # a line that continues in the next piece
    num_known: int = 0  # the highest number of a piece that was read
    seen: tuple[int, int] | None = None  # inode and size of the newest piece at the last look

    @contextlib.contextmanager
    def open_pieces(self) -> Iterator[dict[int, BinaryIO]]:
        """Opens all pieces, by number; none is renamed meanwhile."""
        with contextlib.ExitStack() as files:
            while True:
                older = older_pieces(self.path)
                newest = older[-1][0] + 1 if older else 1
                found = {number: _open(path) for number, path in [*older, (newest, self.path)]}
                pieces = {number: file for number, file in found.items() if file is not None}
                for file in pieces.values():
                    files.enter_context(file)
                if older_pieces(self.path)[-1:] == older[-1:]:
                    break
            yield pieces

    def new_lines(self, *, all_of_it: bool) -> Iterator[LogLine]:
        """Yields the whole lines since the last call; `all_of_it` includes an incomplete last one."""
        if self._is_as_before() and not all_of_it:
            return
        with self.open_pieces() as pieces:
            if pieces and self.num_known and self.num_known not in pieces:
                yield self._line(
                    f"[lines may be missing: the end of piece {self.num_known}]".encode()
                )
            for number, file in pieces.items():
                yield from self._tell_of_gap(number)
                is_over = all_of_it or number != max(pieces)
                yield from self._lines_of(number, file, is_over=is_over)
        if all_of_it and self.torn:
            yield self._line(self.torn)
            self.torn = b""

    def _is_as_before(self) -> bool:
        """Returns whether nothing was written since the last call, for one `stat`."""
        try:
            found = self.path.stat()
        except OSError:  # not there, or a circle of links
            return False
        before, self.seen = self.seen, (found.st_ino, found.st_size)
        return self.seen == before

    def _lines_of(self, number: int, file: BinaryIO, *, is_over: bool) -> Iterator[LogLine]:
        """Yields a piece's whole new lines; keeps the start of one that continues in the next piece."""
        torn, self.torn = self.torn, b""
        file.seek(self.read[number])
        while line := file.readline(MAX_LINE):
            if torn and self.read[number]:  # a late line in a piece whose successor was read
                yield self._line(torn)
                torn = b""
            is_whole = line.endswith(b"\n") or len(torn) + len(line) >= MAX_LINE
            if is_whole or is_over:
                self.read[number] += len(line)
            if is_whole:
                yield self._line(torn + line)
                torn = b""
            elif is_over:
                torn += line
        self.torn = torn

    def _tell_of_gap(self, number: int) -> Iterator[LogLine]:
        """Reports pieces that were removed before they could be read."""
        first, last = self.num_known + 1, number - 1
        if first <= last:
            which = f"piece {last}" if first == last else f"pieces {first} to {last}"
            yield self._line(
                f"[lines are missing here: {which}; only the newest pieces are kept]".encode()
            )
        self.num_known = max(self.num_known, number)

    def _line(self, line: bytes) -> LogLine:
        text = redact(line.decode(errors="replace").rstrip("\r\n"), secrets=self.secrets)
        return LogLine(self.generation, self.node, self.rank, escaped(text))

    def keep_last(self, count: int) -> int:
        """Skips all but the last `count` lines; returns how many there are."""
        left = count
        with self.open_pieces() as pieces:
            self.num_known = max(pieces, default=0)  # nobody misses what was removed before
            for number in reversed(pieces):
                self.read[number], found = _last_lines(pieces[number], left)
                left -= found
        return count - left


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
    return f"skipped {len(names)} {words}: {some_of(names)}"


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
    logs: dict[Path, _Log] = {}
    for path in run_dir.glob(_LOGS):
        match = _LOG_NAME.search(path.as_posix())
        if match is None:
            continue
        # a log that is being rotated may consist of older pieces only
        stable = path.parent / path.name[: path.name.index(".log") + len(".log")]
        its_rank = None if match[3] is None else int(match[3])
        log = _Log(stable, int(match[1]), int(match[2]), its_rank, secrets)
        if rank in (None, its_rank) and generation in (None, log.generation):
            logs[stable] = log
    return sorted(
        logs.values(),
        key=lambda log: (log.generation, log.node, -1 if log.rank is None else log.rank),
    )
