"""Reads growing files of JSON lines: the journal, the metrics, the progress of a preparation.

Their writers may be killed, and disks may fill up. A line that is torn, or that somebody edited into
what no writer writes, is skipped, so it can end neither a job nor a command that shows one. Lines of
unknown kinds pass: a later version may have written them. Whoever can write to the folder can write
anything, so texts have no control characters, a line has at most MAX_LINE bytes, and only regular files
are read.

A run of a million steps has gigabytes of metrics. `sampled` reads at most 256 MiB of them, in 0.3 s.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...data_pipeline.files import open_regular
from ...train.record.untrusted import escaped

MAX_LINE = 16 << 20
_WHOLE_BYTES = 4 << 20  # of a file that is read whole rather than sampled
_WINDOWS = 2000
_WINDOW_BYTES = 128 << 10
_RARE = re.compile(rb'\n\{"kind": "(?:eval|scores|start)"')
_RARE_IN_WINDOW = 2  # rare lines that are taken from one window
_MAY_HOLD_CONTROLS = re.compile(rb"\\u|\\[bfr]|[\x7f\xc2\xe2]")


class JsonLinesTail:
    """Reads a growing file of JSON lines piece by piece: whole lines only, each once.

    Lines that no writer writes are skipped.
    """

    def __init__(self, path: Path, *, offset: int = 0):
        self.path = path
        self.offset = offset
        self._file: tuple[int, int] | None = None  # that has been read

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
            found = os.fstat(file.fileno())
            which, before = (found.st_dev, found.st_ino), self._file
            if found.st_size < self.offset or before not in (None, which):
                self.offset = 0  # the file was replaced or rewritten
            self._file = which
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
    if not isinstance(entry, dict) or not _is_believed(entry):
        return None
    return _without_controls(entry) if _MAY_HOLD_CONTROLS.search(line) else entry


def _is_believed(line: Mapping[str, Any]) -> bool:
    """Returns whether a line has what every line of its kind has, in the types that readers expect."""
    kind = line.get("kind")
    if not isinstance(kind, str | None) or not line.keys() >= _WANTED.get(kind, set()):
        return False
    return all(_TYPES[name](value) for name, value in line.items() if name in _TYPES)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_measured(value: Any) -> bool:
    """JSON lacks the numbers that are not finite, so they are text."""
    return _is_number(value) or value in ("nan", "inf", "-inf")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_source(value: Any) -> bool:
    """Returns whether a value is one source of a preparation's progress."""
    wanted = {"name", "done", "total", "tokens", "segments"}
    return isinstance(value, dict) and value.keys() >= wanted and _is_believed(value)


# By the name of a value, which means the same in lines of every kind.
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("step", "in_a_row", "lost", "generation", "done", "total", "segments"), _is_whole
    ),
    **dict.fromkeys(("grad_norm", "loss_limit", "grad_norm_limit"), _is_measured),
    "loss": _or_none(_is_measured),  # of a step without counted targets
    **dict.fromkeys(("path", "why", "of", "stage", "news", "name", "prompt", "text"), _is_text),
    **dict.fromkeys(("error", "reason"), _or_none(_is_text)),
    **dict.fromkeys(("tokens_per_s", "eta_s"), _or_none(_is_number)),
    **dict.fromkeys(("max_violation", "effective_experts"), _list_of(_is_number)),
    "time": lambda value: _is_number(value) and 0 <= value < 2**35,  # a year that dates have
    **dict.fromkeys(("seconds", "passes", "step_s", "data_wait_s", "left_s", "mfu"), _is_number),
    "tokens": _is_whole,
    "resumed_from_step": _or_none(_is_whole),
    "expert_depths": _list_of(_is_whole),
    "expert_load": _list_of(_list_of(_is_number)),
    "sources": _list_of(_is_source),
}
_WANTED: Mapping[str | None, set[str]] = {
    "train": {"step", "loss"},
    "eval": {"step", "loss"},
    "scores": {"step"},
    "samples": {"step", "prompt", "text"},
    "checkpoint": {"step", "seconds"},
    "checkpoint_copy": {"step"},
    "checkpoint_set_aside": {"step", "resumed_from_step", "path", "why"},
    "spike": {"step", "in_a_row", "loss", "grad_norm", "loss_limit", "grad_norm_limit"},
    "data_wait": {"seconds"},
    "gap": {"step", "of", "why", "lost"},
    "preparation": {"stage"},
}


KINDS = {"start", "expert_placement", "end", *filter(None, _WANTED)} - {"preparation"}  # of metrics


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(key): _without_controls(entry) for key, entry in value.items()}
    return [_without_controls(entry) for entry in value] if isinstance(value, list) else value
