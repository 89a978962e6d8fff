"""The log of a process that runs for weeks: bounded, complete, without secrets, and no reason to end.

A rank's standard output and error are one file, logs/g001/node0/rank0.log, which C++ writes too, by
file descriptor. So whoever rotates it must change what descriptors 1 and 2 mean, and only the
process itself can: it opens a new file and lays it over both (dup2, atomic: a write goes whole to
the old file or whole to the new one), and then renames. Nothing is lost or copied, on any file
system, and no other process takes part. What was not chosen:

* a pipe to a process that rotates: a rank must not wait for one that is stopped or dead, and what a
  pipe holds is lost with the machine's agent, with the last words of all its ranks;
* copying and truncating from outside loses what is written in between, and cannot say how much.

The price: a process that is no Python of ours (a command of the user's) does not rotate, and what a
rank has started goes on writing to the file that it was started with.

The file of the stable name is always the newest. Older pieces are rank0.log.1, rank0.log.2, …,
numbered in the order of writing, so that a piece never changes its name; the oldest are removed.
Python's own prints cause a rotation at once when the file is full; for C++ a thread looks twice a
second.

What Python prints is written line by line, so that threads do not tear each other's lines; of a
line without an end the rest comes within half a second. It goes through `redact` (redaction.py),
tracebacks included. A write that fails, on a full disk for example, is dropped and counted, and the
log says how much is missing when there is space again: printing never raises.
"""

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .redaction import redact, secret_values

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOG = "MOEBIUS_LOG"  # in a rank's environment: `LogLimits` and the folder, as JSON
MAX_BYTES = 64 << 20
PIECES = 4  # that are kept beside the newest
LOOK_S = 0.5
_SECRETS_FOR_S = 1.0  # for so long a look at the environment is good
_STANDARD = (1, 2)


@dataclass(frozen=True)
class LogLimits:
    """Says how large a process's logs may become."""

    max_bytes: int = MAX_BYTES  # of a piece
    pieces: int = PIECES  # that are kept beside the newest

    def for_ranks(self, folder: Path) -> str:
        """Returns the value of $MOEBIUS_LOG for the ranks whose logs are in a folder."""
        return json.dumps(asdict(self) | {"folder": str(folder)})


class ProcessLog:
    """Writes to descriptors, and lets them mean another file when the one is full."""

    def __init__(self, descriptors: Sequence[int] = _STANDARD) -> None:
        """Writes without rotating until `keep` is called."""
        self._descriptors = descriptors
        self._lock = threading.RLock()  # a signal's handler may print in the middle of a print
        self._path: Path | None = None
        self._limits = LogLimits()
        self._owner = 0  # the process that may rotate: a fork may not
        self._size = 0
        self._next: Path | None = None  # lies over the descriptors, and has not got its name
        self._lost, self._why = 0, ""
        self._secrets: list[str] = []
        self._secrets_until_s = float("-inf")
        os.register_at_fork(after_in_child=self._unlock)

    def keep(self, path: Path, limits: LogLimits) -> None:
        """Lays a log over the descriptors, which are kept within limits from now on."""
        with self._lock:
            self._path, self._limits, self._owner = path, limits, os.getpid()
            self._next = None
            self._lay_over(path)

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes what Python prints; what cannot be written is counted."""
        text = data.decode(errors="surrogateescape")
        with self._lock:
            data = redact(text, secrets=self._known_secrets()).encode(errors="surrogateescape")
            if not self._tell_of_loss(descriptor):
                self._lost += len(data)
                return
            self._put(descriptor, data)
            if self._size >= self._limits.max_bytes and data.endswith(b"\n"):
                self.rotate_if_full()

    def rotate_if_full(self) -> None:
        """Begins the next piece if this one is full; never raises."""
        with self._lock, contextlib.suppress(OSError):
            if self._path is None or self._owner != os.getpid():
                return
            if self._next is not None:
                self._rename(self._path, self._next)  # what failed the last time
            descriptor = self._descriptors[0]
            self._size = os.fstat(descriptor).st_size
            if self._size < self._limits.max_bytes:
                return
            if self._size < 2 * self._limits.max_bytes and not _ends_with_newline(self._path):
                return  # a line is cut only where it does not end
            self._next = self._path.with_name(f"{self._path.name}.next")
            self._lay_over(self._next)
            self._rename(self._path, self._next)

    def _lay_over(self, path: Path) -> None:
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._size = os.fstat(new).st_size
            for descriptor in self._descriptors:
                os.dup2(new, descriptor)
        finally:
            os.close(new)

    def _rename(self, path: Path, fresh: Path) -> None:
        """Gives the pieces their names.

        Only when nobody writes to the full one any more: a reader that sees its new name may take
        it for complete.
        """
        numbers = [number for number, _ in older_pieces(path)]
        number = max(numbers, default=0) + 1
        if fresh.exists():  # else only the oldest are left to be removed
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                path.rename(piece_of(path, number))
            fresh.rename(path)
        self._next = None
        for old in numbers:
            if old <= number - self._limits.pieces:
                piece_of(path, old).unlink(missing_ok=True)

    def _put(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.write(descriptor, left)
                left = left[written:]
                self._size += written
        except OSError as error:
            self._lost += len(left)
            self._why = error.strerror

    def _tell_of_loss(self, descriptor: int) -> bool:
        """Writes what is missing, if something is; returns whether the log can be written."""
        if not self._lost:
            return True
        lost, self._lost = self._lost, 0
        self._put(descriptor, f"\n[{lost:,} bytes of this log are missing: {self._why}]\n".encode())
        if self._lost:
            self._lost = lost
            return False
        return True

    def _known_secrets(self) -> list[str]:
        now_s = time.monotonic()
        if now_s > self._secrets_until_s:
            self._secrets = secret_values(os.environ)
            self._secrets_until_s = now_s + _SECRETS_FOR_S
        return self._secrets

    def look_after(self) -> None:
        """Looks what C++ has written, and whether there is space again."""
        self.rotate_if_full()
        with self._lock:
            self._tell_of_loss(self._descriptors[-1])

    def _unlock(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not in the fork


class _Stream(io.RawIOBase):
    """One of the descriptors, as the bytes below sys.stdout or sys.stderr."""

    def __init__(self, log: ProcessLog, descriptor: int) -> None:
        self._log = log
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: "ReadableBuffer", /) -> int:
        written = bytes(data)
        self._log.write(self._descriptor, written)
        return len(written)


_own: ProcessLog | None = None  # of this process, and of what it is forked into


def print_through_log() -> ProcessLog:
    """Lets sys.stdout and sys.stderr write through this process's log, and returns it.

    A template does so before it imports what keeps sys.stderr for itself; its forks inherit it.
    """
    global _own
    if _own is None:
        sys.stdout.flush()
        sys.stderr.flush()
        _own = ProcessLog()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                # all that a text stream uses of a buffered one
                _Stream(_own, descriptor),  # pyright: ignore[reportArgumentType]
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            for descriptor in _STANDARD
        )
        os.register_at_fork(before=_flush)
    return _own


def _flush() -> None:
    """Writes the beginnings of lines; nothing is said twice by a fork."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed at the process's end
            stream.flush()


def keep_log(path: Path, limits: LogLimits) -> None:
    """Makes a file this process's log, from now on, and rotates it."""
    log = print_through_log()
    log.keep(path, limits)
    threading.Thread(target=_look_after, args=(log,), name="log", daemon=True).start()


def _look_after(log: ProcessLog) -> None:
    while True:
        time.sleep(LOOK_S)
        _flush()
        log.look_after()


def keep_log_of_rank(environment: Mapping[str, str]) -> None:
    """Does so for a rank, where its agent has said how (LOG); does nothing elsewhere."""
    if LOG in environment:
        told = json.loads(environment[LOG])
        path = Path(told["folder"]) / f"rank{environment['RANK']}.log"
        keep_log(path, LogLimits(told["max_bytes"], told["pieces"]))


def older_pieces(log: Path) -> list[tuple[int, Path]]:
    """Returns the number and path of the older pieces of a log, the oldest first."""
    form = re.compile(re.escape(log.name) + r"\.(\d{1,9})")
    try:
        names = os.listdir(log.parent)
    except OSError:
        return []
    found = [
        (int(match[1]), log.parent / match[0]) for match in map(form.fullmatch, names) if match
    ]
    return sorted(found)


def piece_of(log: Path, number: int) -> Path:
    """Returns where an older piece of a log is."""
    return log.with_name(f"{log.name}.{number}")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
