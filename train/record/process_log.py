"""A long-running process's output: whole lines, redacted, and never a reason to crash.

A rank's standard output and error are one file, logs/g001/node0/rank0.log, which its agent opened for
appending; C++ writes there by file descriptor. Nothing here bounds the file (docs/watch.md, "Logs").

Python's output is written by line, so threads do not mix their lines; the rest of an unfinished
line follows within half a second. All of it, tracebacks included, passes through `redact`
(redaction.py). A failed write, for example on a full disk, is dropped and counted, and the log
reports the missing bytes once there is space: printing never raises.
"""

import contextlib
import io
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from .redaction import redact, secret_values

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOOK_S = 0.5
_SECRETS_FOR_S = 1.0  # how long to cache the environment's secrets
_STANDARD = (1, 2)


class ProcessLog:
    """Writes text to descriptors without secrets, and counts what cannot be written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may print during a print
        self._lost, self._why = 0, ""
        self._secrets: list[str] = []
        self._secrets_until_s = float("-inf")
        os.register_at_fork(after_in_child=self._unlock)

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes Python's output, and counts what cannot be written."""
        text = data.decode(errors="surrogateescape")
        with self._lock:
            data = redact(text, secrets=self._known_secrets()).encode(errors="surrogateescape")
            if self.tell_of_loss(descriptor):
                self._put(descriptor, data)
            else:
                self._lost += len(data)

    def tell_of_loss(self, descriptor: int) -> bool:
        """Reports missing bytes, if any; returns whether the log can be written."""
        with self._lock:
            if not self._lost:
                return True
            lost, self._lost = self._lost, 0
            told = f"\n[{lost:,} bytes of this log are missing: {self._why}]\n"
            self._put(descriptor, told.encode())
            if self._lost:
                self._lost = lost
                return False
            return True

    def _put(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            self._lost += len(left)
            self._why = error.strerror

    def _known_secrets(self) -> list[str]:
        now_s = time.monotonic()
        if now_s > self._secrets_until_s:
            self._secrets = secret_values(os.environ)
            self._secrets_until_s = now_s + _SECRETS_FOR_S
        return self._secrets

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


def keep_log() -> None:
    """Sends this process's output through its log, including the rest of unfinished lines."""
    log = print_through_log()
    threading.Thread(target=_look_after, args=(log,), name="log", daemon=True).start()


def _look_after(log: ProcessLog) -> None:
    while True:
        time.sleep(LOOK_S)
        _flush()
        log.tell_of_loss(_STANDARD[-1])
