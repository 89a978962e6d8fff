"""Finds the relevant Python traceback in a log and summarises it in one line."""

import os
import re
from pathlib import Path

from ...data_pipeline.files import open_regular

_HEAD = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# what Python prints for exceptions in destructors, while a program ends anyway
_IGNORED = "Exception ignored"
# torch's prefix for the tracebacks of a distributed program
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")


def last_traceback(text: str) -> str:
    """Returns the last traceback of a log with those chained to it; without one, the last five lines."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.rstrip().splitlines()]
    starts = [
        number
        for number, line in enumerate(lines)
        if line.strip() == _HEAD and not (number and lines[number - 1].startswith(_IGNORED))
    ]
    if not starts:
        return "\n".join(lines[-5:])
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(marker in line for line in lines[start:first] for marker in _CHAINED):
            break
        first = start
    end = next(
        (number for number in range(starts[-1], len(lines)) if lines[number].startswith(_IGNORED)),
        len(lines),
    )
    return "\n".join(lines[first : min(end, first + 200)])


def summarise(traceback: str) -> tuple[str | None, str | None]:
    """Returns the exception line and the innermost file:line of the last chained traceback.

    Without a traceback, returns the last line and None.
    """
    if _HEAD not in traceback:
        return next(
            (line.strip() for line in reversed(traceback.splitlines()) if line.strip()), None
        ), None
    error = where = None
    for line in traceback.splitlines():
        frame = re.match(r'\s+File "(.+)", line (\d+)', line)
        if line.startswith(_HEAD):
            error = where = None
        elif frame and error is None:
            where = f"{frame[1]}:{frame[2]}"
        elif line.strip() and not line.startswith(" ") and error is None:
            error = line.strip()
    return error, where


def read_tail(path: Path, num_bytes: int) -> str:
    """Returns the last `num_bytes` of a log; "" if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
    except OSError:
        return ""
