"""Reads growing files of JSON lines: the journal, the metrics, the progress of a preparation.

Their writers may be killed, and disks may fill up. A torn line is skipped, so it cannot end a command that
shows a job. Lines of unknown kinds pass: a later version may have written them. Whoever can write to the
folder can write anything, so texts have no control characters, a line has at most MAX_LINE bytes, and only
regular files are read.

A run of a million steps has gigabytes of metrics. `sampled` reads at most 256 MiB of them, in 0.3 s.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...train.record.untrusted import escaped, open_regular

MAX_LINE = 16 << 20
_WHOLE_BYTES = 4 << 20  # of a file that is read whole rather than sampled
_WINDOWS = 2000
_WINDOW_BYTES = 128 << 10
_RARE = re.compile(rb'\n\{"kind": "(?:eval|start)"')
_RARE_IN_WINDOW = 2  # rare lines that are taken from one window
_MAY_HOLD_CONTROLS = re.compile(rb"\\u|\\[bfr]|[\x7f\xc2\xe2]")


class JsonLinesTail:
    """Reads a growing file of JSON lines piece by piece: whole lines only, each once.

    Lines that are no JSON objects are skipped.
    """

    def __init__(self, path: Path, *, offset: int = 0):
        self.path = path
        self.offset = offset

    @classmethod
    def near_the_end(cls, path: Path, *, num_bytes: int) -> "JsonLinesTail":
        """Starts at most `num_bytes` before the end of the file."""
        return cls(path, offset=max(0, size_of(path) - num_bytes))

    def read(self) -> list[dict[str, Any]]:
        """Returns the whole lines that were added since the last call."""
        return list(self.stream())

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of `read` one by one, for files larger than memory."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0  # the file was replaced by a shorter one
            file.seek(self.offset)
            while line := file.readline(MAX_LINE):
                if not line.endswith(b"\n") and len(line) < MAX_LINE:
                    return  # still being written
                self.offset += len(line)
                if (entry := _decoded(line)) is not None:
                    yield entry


def sampled(path: Path, *, end: int) -> Iterator[dict[str, Any]]:
    """Yields lines of a metrics file before byte `end`: all of a short file, of a long one what curves need.

    That is one line of every window, and the evaluations and starts in it. Windows cover files up to 256 MiB.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        if end <= _WHOLE_BYTES:
            yield from _entries(_window(file, 0, end, most=end).splitlines())
            return
        bounds = [end * number // _WINDOWS for number in range(_WINDOWS + 1)]
        for start, following in itertools.pairwise(bounds):
            start = max(start, file.tell())  # no line twice
            window = _window(file, start, following, most=_WINDOW_BYTES)
            starts = [0, *(match.start() + 1 for match in _RARE.finditer(window))]
            lines = [window[start:].partition(b"\n")[0] for start in starts[: 1 + _RARE_IN_WINDOW]]
            yield from _entries(lines)


def _window(file: BinaryIO, start: int, end: int, *, most: int) -> bytes:
    """Returns whole lines that begin among some bytes of a file: one, or as many as begin in `most` bytes."""
    file.seek(max(0, start - 1))
    if start:
        file.readline(MAX_LINE)
    lines = file.read(max(0, min(end - file.tell(), most)))
    return lines if not lines or lines.endswith(b"\n") else lines + file.readline(MAX_LINE)


def size_of(path: Path) -> int:
    """Returns the size of a file; 0 without one."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (entry for line in lines if (entry := _decoded(line)) is not None)


def _decoded(line: bytes) -> dict[str, Any] | None:
    """Returns the object in a line, without control characters; None if it holds none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    return _without_controls(entry) if _MAY_HOLD_CONTROLS.search(line) else entry


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(key): _without_controls(entry) for key, entry in value.items()}
    return [_without_controls(entry) for entry in value] if isinstance(value, list) else value
