"""Merges the logs of a run's ranks into one stream, across rotations and generations.

The log of a rank in one generation is logs/g001/node0/rank0.log; rotation leaves the older pieces
rank0.log.1, rank0.log.2, … (train/record/process_log.py). The last 100 lines of a rank therefore reach back
into older pieces and generations.

A piece keeps its number. The file without a number is piece n + 1, where n is the highest number; reading
checks that no rotation happened while the file was opened. Older pieces are read again as well: a child of
the rank may still write there.
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

from ...train.record.process_log import older_pieces, piece_of
from ...train.record.redaction import redact, secret_values
from ..job import read_status

POLL_S = 0.4
_BLOCK = 64 << 10

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
class _Piece:
    """A part of a log and how far it was read."""

    path: Path
    offset: int = 0

    def new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the lines since the last call; an incomplete line does not count as read."""
        file.seek(self.offset)
        for line in file:
            self.offset += len(line) if line.endswith(b"\n") else 0
            yield line

    def skip(self) -> None:
        """Moves the read position to the current end of the file."""
        self.offset = self.path.stat().st_size

    def keep_last(self, count: int) -> int:
        """Moves to the last `count` unread lines; returns how many there are."""
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end <= self.offset:
                return 0
            at, found = end - 1, 0  # the last byte ends the last line or belongs to it
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


@dataclass
class _Log:
    """The log of one process in one generation."""

    path: Path  # of the newest piece
    generation: int
    node: int
    rank: int | None
    secrets: list[str]
    pieces: dict[int, _Piece] = field(default_factory=dict)  # by number, including the newest
    torn: bytes = b""  # a line that continues in the next piece
    num_known: int = 0  # the highest number of a piece that was read
    seen: tuple[int, int] | None = None  # inode and size of the newest piece at the last look

    @property
    def process(self) -> tuple[int, int]:
        """Identifies a rank or agent across generations."""
        return (-1, self.node) if self.rank is None else (self.rank, -1)

    def look(self) -> tuple[int, BinaryIO | None]:
        """Updates the pieces; returns the newest one's number, and its open file if it exists."""
        while True:
            older = older_pieces(self.path)
            file = _open(self.path)
            if older_pieces(self.path)[-1:] == older[-1:]:
                break
            if file is not None:  # rotated meanwhile: its number is unknown
                file.close()
        newest = older[-1][0] + 1 if older else 1
        for number, path in [*older, *([(newest, self.path)] if file is not None else [])]:
            self.pieces.setdefault(number, _Piece(path)).path = path
        return newest, file

    def new_lines(self, *, all_of_it: bool) -> Iterator[LogLine]:
        """Yields the whole lines since the last call; `all_of_it` includes an incomplete last one."""
        if self._is_as_before() and not all_of_it:
            return
        newest, newest_file = self.look()
        for number in sorted(self.pieces):
            piece = self.pieces[number]
            is_newest = number == newest
            file = newest_file if is_newest else _open(piece_of(self.path, number))
            if file is None:  # the rotation has removed it
                del self.pieces[number]
                if number == self.num_known:
                    yield self._line(f"[lines may be missing: the end of piece {number}]".encode())
                continue
            with file:
                yield from self._tell_of_gap(number)
                yield from self._lines_of(piece, file, is_over=all_of_it or not is_newest)
        if all_of_it and self.torn:
            yield self._line(self.torn)
            self.torn = b""

    def _is_as_before(self) -> bool:
        """Returns whether nothing was written since the last call, for one `stat`."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        before, self.seen = self.seen, (found.st_ino, found.st_size)
        return self.seen == before

    def _lines_of(self, piece: _Piece, file: BinaryIO, *, is_over: bool) -> Iterator[LogLine]:
        """Yields a piece's whole lines; keeps the start of one that continues in the next piece."""
        torn, self.torn = self.torn, b""
        if torn and piece.offset:  # a late line in a piece whose successor was read already
            yield self._line(torn)
            torn = b""
        for line in piece.new_lines(file):
            if not line.endswith(b"\n"):
                if is_over:
                    piece.offset += len(line)
                    self.torn = torn + line
                    return
                break
            yield self._line(torn + line)
            torn = b""
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
        text = redact(line.decode(errors="replace").rstrip("\n"), secrets=self.secrets)
        return LogLine(self.generation, self.node, self.rank, text)

    def keep_last(self, count: int) -> int:
        """Skips all but the last `count` lines; returns how many there are."""
        left = count
        for _, piece in sorted(self.pieces.items(), reverse=True):
            with contextlib.suppress(FileNotFoundError):
                if left == 0:
                    piece.skip()
                else:
                    left -= piece.keep_last(left)
        return count - left


def _open(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


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
    """Skips all but the last `tail` lines of each process."""
    of_process: dict[tuple[int, int], list[_Log]] = defaultdict(list)
    for log in logs:
        of_process[log.process].append(log)
        _, newest = log.look()
        if newest is not None:
            newest.close()
        log.num_known = max(log.pieces, default=0)  # nobody misses what was removed before
    for its_logs in of_process.values():
        left = tail
        for log in reversed(its_logs):
            left -= log.keep_last(left)


def _no_logs(run_dir: Path, rank: int | None, generation: int | None) -> str:
    which = "" if rank is None else f" of rank {rank}"
    which += "" if generation is None else f" in generation {generation}"
    return f"{run_dir}: there are no logs{which} (they would be in logs/g001/node0/rank0.log …)"


def _find_logs(
    run_dir: Path, rank: int | None, generation: int | None, secrets: list[str]
) -> list[_Log]:
    logs: dict[Path, _Log] = {}
    for path in run_dir.glob("logs/g*/node*/*.log*"):
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
