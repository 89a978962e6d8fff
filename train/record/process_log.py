"""A long-running process's log: bounded, complete, redacted, and never a reason to crash.

A rank's standard output and error are one file, logs/g001/node0/rank0.log, to which C++ also writes
by file descriptor. Rotation must therefore change descriptors 1 and 2, which only the process
itself can: it opens a new file, puts it on both (dup2 is atomic, so every write goes entirely to
one file), and then renames. Nothing is lost or copied on any file system, and no other process
takes part. Rejected alternatives:

* A pipe to a rotating process: a rank must not wait for a stopped or dead process, and a pipe's
  contents, the ranks' last words, are lost with the machine's agent.
* Copying and truncating from outside loses what is written in between, by an unknown amount.

The price: a process that is not our Python (a user's command) does not rotate, and a rank's
children keep writing to the file that they started with.

The file with the stable name is the newest. Older pieces are rank0.log.1, rank0.log.2, …, numbered
in order of writing so that no piece is ever renamed; the oldest are deleted. Python's prints rotate
a full file at once; for C++ a thread checks twice a second.

Python's output is written by line, so threads do not mix their lines; the rest of an unfinished
line follows within half a second. All of it, tracebacks included, passes through `redact`
(redaction.py). A failed write, for example on a full disk, is dropped and counted, and the log
reports the missing bytes once there is space: printing never raises.
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
PIECES = 4  # kept beside the newest
LOOK_S = 0.5
_SECRETS_FOR_S = 1.0  # how long to cache the environment's secrets
_STANDARD = (1, 2)


@dataclass(frozen=True)
class LogLimits:
    """Limits the size of a process's logs."""

    max_bytes: int = MAX_BYTES  # of a piece
    pieces: int = PIECES  # kept beside the newest

    def for_ranks(self, folder: Path) -> str:
        """Returns $MOEBIUS_LOG for the ranks whose logs are in a folder."""
        return json.dumps(asdict(self) | {"folder": str(folder)})


class ProcessLog:
    """Writes to descriptors, and moves them to a new file when the current one is full."""

    def __init__(self, descriptors: Sequence[int] = _STANDARD) -> None:
        """Writes without rotating until `keep` is called."""
        self._descriptors = descriptors
        self._lock = threading.RLock()  # a signal handler may print during a print
        self._path: Path | None = None
        self._limits = LogLimits()
        self._owner = 0  # the process that may rotate; forks must not
        self._size = 0
        self._next: Path | None = None  # on the descriptors, but not yet renamed
        self._lost, self._why = 0, ""
        self._secrets: list[str] = []
        self._secrets_until_s = float("-inf")
        os.register_at_fork(after_in_child=self._unlock)

    def keep(self, path: Path, limits: LogLimits) -> None:
        """Moves the descriptors to a log, which stays within limits from now on."""
        with self._lock:
            self._path, self._limits, self._owner = path, limits, os.getpid()
            self._next = None
            self._lay_over(path)

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes Python's output, and counts what cannot be written."""
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
        """Starts the next piece if this one is full; never raises."""
        with self._lock, contextlib.suppress(OSError):
            if self._path is None or self._owner != os.getpid():
                return
            if self._next is not None:
                self._rename(self._path, self._next)  # after a failed attempt
            descriptor = self._descriptors[0]
            self._size = os.fstat(descriptor).st_size
            if self._size < self._limits.max_bytes:
                return
            if self._size < 2 * self._limits.max_bytes and not _ends_with_newline(self._path):
                return  # cut a line only if it is far too long
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
        """Names the pieces.

        Only after writing to the full one ends: a reader takes a renamed piece as complete.
        """
        numbers = [number for number, _ in older_pieces(path)]
        number = max(numbers, default=0) + 1
        if fresh.exists():  # otherwise only the deletion is left to do
            with contextlib.suppress(FileNotFoundError):  # it was deleted
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
        """Reports missing bytes, if any; returns whether the log can be written."""
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
        """Checks C++'s output, and whether there is space again."""
        self.rotate_if_full()
        with self._lock:
            self._tell_of_loss(self._descriptors[-1])

    def _unlock(self) -> None:
        self._lock = threading.RLock()  # its holder does not exist in the fork


class _Stream(io.RawIOBase):
    """Wraps a descriptor as the raw stream below sys.stdout or sys.stderr."""

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


_own: ProcessLog | None = None  # of this process and its forks


def print_through_log() -> ProcessLog:
    """Redirects sys.stdout and sys.stderr to this process's log, and returns it.

    A template process does so before imports that keep a reference to sys.stderr; its forks inherit
    it.
    """
    global _own
    if _own is None:
        sys.stdout.flush()
        sys.stderr.flush()
        _own = ProcessLog()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                # has all that a text stream needs of a buffered one
                _Stream(_own, descriptor),  # pyright: ignore[reportArgumentType]
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            for descriptor in _STANDARD
        )
        os.register_at_fork(before=_flush)
    return _own


def print_in_any_encoding() -> None:
    """Lets this process and its children print "?" for signs that the output's encoding lacks.

    A crash over an arrow would end a run that succeeded, under cron or in an ISO-8859-1 locale.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:replace"


def _flush() -> None:
    """Writes unfinished lines, so that a fork does not repeat them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed at the process's end
            stream.flush()


def keep_log(path: Path, limits: LogLimits) -> None:
    """Makes a file this process's log and rotates it from now on."""
    log = print_through_log()
    log.keep(path, limits)
    threading.Thread(target=_look_after, args=(log,), name="log", daemon=True).start()


def _look_after(log: ProcessLog) -> None:
    while True:
        time.sleep(LOOK_S)
        _flush()
        log.look_after()


def keep_log_of_rank(environment: Mapping[str, str]) -> None:
    """Keeps a rank's log as its agent configured it (LOG); otherwise does nothing."""
    if LOG in environment:
        told = json.loads(environment[LOG])
        path = Path(told["folder"]) / f"rank{environment['RANK']}.log"
        keep_log(path, LogLimits(told["max_bytes"], told["pieces"]))


def older_pieces(log: Path) -> list[tuple[int, Path]]:
    """Returns number and path of a log's older pieces, oldest first."""
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
    """Returns the path of an older piece of a log."""
    return log.with_name(f"{log.name}.{number}")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
