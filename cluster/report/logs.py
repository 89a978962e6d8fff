"""The logs of a run's ranks, complete across its restarts: one order, generation by generation.

A rank's log of one generation is logs/g001/node0/rank0.log and the older pieces of it that a
rotation has left, rank0.log.1, rank0.log.2, … (train/record/process_log.py); the rank of the next
generation begins another. Here they are one stream: the last 100 lines of rank 3 reach back into
earlier pieces and generations where the newest one has said less. Lines of ranks carry a time where
Python's logging wrote them; a line without one belongs to the line before it.

A piece keeps its number, and is complete when it has one: the file of the stable name is piece
n + 1 where n is the newest number, unless that has changed while the file was opened. Each piece is
read from where the last look at it has ended, the older ones too: what a rank has started may still
write there.
"""

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from ...train.record.process_log import older_pieces, piece_of
from ...train.record.redaction import redact, secret_values
from ..job import read_status

POLL_S = 0.4
_BLOCK = 64 << 10

_LOG_NAME = re.compile(r"logs/g(\d+)/node(\d+)/(?:rank(\d+)|agent)\.log(?:\.\d+)?$")
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
class _Piece:
    """A part of a log, and how far it was read."""

    path: Path
    offset: int = 0

    def new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the lines since the last call; one without an end does not count as read."""
        file.seek(self.offset)
        for line in file:
            self.offset += len(line) if line.endswith(b"\n") else 0
            yield line

    def skip(self) -> None:
        """Moves the read position to the current end of the file."""
        self.offset = self.path.stat().st_size

    def skip_until(self, since: float) -> None:
        """Goes to the first line that was written at `since` or later, as far as lines tell."""
        if self.path.stat().st_mtime < since:
            return self.skip()
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
        return None

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


@dataclass
class _Log:
    """The log of one process in one generation."""

    path: Path  # of the newest piece
    generation: int
    node: int
    rank: int | None
    secrets: list[str]
    pieces: dict[int, _Piece] = field(default_factory=dict)  # by number, the newest included
    torn: bytes = b""  # a line whose end is in the next piece
    num_known: int = 0  # the number of the newest piece that was begun
    seen: tuple[int, int] | None = None  # the newest piece, at the last look

    @property
    def process(self) -> tuple[int, int]:
        """What tells the ranks and agents of a run from each other, across generations."""
        return (-1, self.node) if self.rank is None else (self.rank, -1)

    def look(self) -> tuple[int, BinaryIO | None]:
        """Takes note of the pieces; returns the newest one, open, if it has its name now, and its
        number.
        """
        while True:
            older = older_pieces(self.path)
            file = _open(self.path)
            if older_pieces(self.path)[-1:] == older[-1:]:
                break
            if file is not None:  # it was rotated meanwhile: which piece is this?
                file.close()
        newest = older[-1][0] + 1 if older else 1
        for number, path in [*older, *([(newest, self.path)] if file is not None else [])]:
            self.pieces.setdefault(number, _Piece(path)).path = path
        return newest, file

    def new_lines(self, *, all_of_it: bool) -> Iterator[LogLine]:
        """Whole lines since the last call; with `all_of_it` also a last one without an end."""
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
        """Whether nothing was written since the last call, at the cost of one look at one file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        before, self.seen = self.seen, (found.st_ino, found.st_size)
        return self.seen == before

    def _lines_of(self, piece: _Piece, file: BinaryIO, *, is_over: bool) -> Iterator[LogLine]:
        """Yields a piece's whole lines; one that goes on in the next piece is kept for that."""
        torn, self.torn = self.torn, b""
        if torn and piece.offset:  # written late into a piece whose next was read already
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
        """Says which pieces were removed before they could be read."""
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

    def skip_until(self, since: float) -> None:
        """Leaves out what was written before, as far as lines tell."""
        for piece in self.pieces.values():
            with contextlib.suppress(FileNotFoundError):
                piece.skip_until(since)

    def keep_last(self, count: int) -> int:
        """Leaves out all but the last lines; returns how many there are."""
        left = count
        for _, piece in sorted(self.pieces.items(), reverse=True):
            with contextlib.suppress(FileNotFoundError):
                if left == 0:
                    piece.skip()
                else:
                    left -= piece.keep_last(left)
        return count - left

    def begin_here(self) -> None:
        """Takes what was removed until now for nothing that anybody misses."""
        self.num_known = max(self.pieces, default=0)


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
    logs: dict[Path, _Log] = {}
    secrets = secret_values(os.environ)
    is_first = True
    while True:
        over = not follow or read_status(run_dir).state.is_final
        found = _find_logs(run_dir, rank, generation, secrets)
        new = [log for log in found if log.path not in logs]
        logs |= {log.path: log for log in new}
        if is_first:
            _leave_out(new, since, tail)
            is_first = False
        for log in found:
            yield from logs[log.path].new_lines(all_of_it=over)
        if over:
            if not logs:
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
            f"--since {text!r}: must be an age (90s, 10m, 2h, 1d) or a time (2026-11-22 03:00)"
        ) from None


def _leave_out(logs: list[_Log], since: float | None, tail: int | None) -> None:
    """Lets old logs begin later, as asked."""
    if since is None and tail is None:
        return
    of_process: dict[tuple[int, int], list[_Log]] = defaultdict(list)
    for log in logs:
        of_process[log.process].append(log)
        _, newest = log.look()
        if newest is not None:
            newest.close()
        log.begin_here()
        if since is not None:
            log.skip_until(since)
    for its_logs in of_process.values() if tail is not None else ():
        left = tail or 0
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
        # of a log that is being rotated there may be nothing but older pieces
        stable = path.parent / path.name[: path.name.index(".log") + len(".log")]
        its_rank = None if match[3] is None else int(match[3])
        log = _Log(stable, int(match[1]), int(match[2]), its_rank, secrets)
        if rank in (None, its_rank) and generation in (None, log.generation):
            logs[stable] = log
    return sorted(
        logs.values(),
        key=lambda log: (log.generation, log.node, -1 if log.rank is None else log.rank),
    )
