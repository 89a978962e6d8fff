"""Reads growing files of JSON lines: the journal, the metrics, the progress of a preparation.

Their writers may be killed, disks may fill up, and people edit the files. A torn line, or one whose values
have the wrong types, is skipped, so it cannot end a command that shows a job. Lines of unknown kinds pass: a
later version may have written them. Whoever can write to the folder can write anything, so texts have no
control characters, a line has at most MAX_LINE bytes, and only regular files are read.

A run of a million steps has gigabytes of metrics. `sampled` reads at most 256 MiB of them, in 0.3 s.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
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
_MAX_TIME = 1e11  # seconds since the epoch: the year 5138
_MAX_WHOLE = 2**63


class JsonLinesTail:
    """Reads a growing file of JSON lines piece by piece: whole lines only, each once.

    Lines that are no JSON objects or have values of wrong types are skipped.
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
    """Returns the object in a line, without control characters; None if it is not believed."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not is_believed(entry):
        return None
    return _without_controls(entry) if _MAY_HOLD_CONTROLS.search(line) else entry


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(key): _without_controls(entry) for key, entry in value.items()}
    return [_without_controls(entry) for entry in value] if isinstance(value, list) else value


def is_believed(line: Mapping[str, Any]) -> bool:
    """Returns whether the values of a decoded line have the types that its readers expect."""
    if "state" in line:
        return _fits(line, _JOURNAL)
    kind = line.get("kind")
    if not isinstance(kind, str):
        return kind is None
    return _is_time(line.get("time", 0)) and _fits(line, _KINDS.get(kind, "")) and _loads_fit(line)


def _loads_fit(line: Mapping[str, Any]) -> bool:
    """Returns whether a line's lists about experts have an entry for each depth, none empty."""
    if line.get("kind") != "train" or "expert_load" not in line:
        return True
    loads = line["expert_load"]
    others = [line.get(key, ()) for key in ("max_violation", "effective_experts")]
    return all(len(other) == len(loads) for other in others) and all(loads)


# Types --------------------------------------------------------------------------------------------

# A word is a key and its type: "key!type" must be present, "key?type" may be null.
_ROOT_CAUSE = "summary!text rank?whole node?whole exit_code?whole error?text where?text traceback?text log?text"
_DETAILS = "root_cause?cause step?whole first_step:whole"
_JOURNAL = "state!text reason!text time!time generation!whole details!details"
_SOURCE = "name!text done!whole total!whole tokens!whole eta_s?number segments:whole"
_KINDS = {
    "start": "generation:whole resumed_from_step?whole expert_depths:wholes",
    "train": "step!whole loss!measured tokens_per_s:number "
    "expert_load:loads max_violation:numbers effective_experts:numbers",
    "eval": "step!whole loss!measured seconds:number",
    "checkpoint": "step!whole seconds!number error?text",
    "checkpoint_copy": "step!whole error?text",
    "checkpoint_set_aside": "step!whole resumed_from_step!whole path!text why!text",
    "spike": "step!whole in_a_row!whole "
    "loss!measured grad_norm!measured loss_limit!measured grad_norm_limit!measured",
    "data_wait": "seconds!number reason?text",
    "preparation": "stage!text time!time done:whole total:whole tokens:whole segments:whole "
    "tokens_per_s?number eta_s?number news:text error:text sources:sources",
}


def _fits(value: Any, fields: str) -> bool:
    """Returns whether a value is an object whose keys have the types in `fields`."""
    if not isinstance(value, Mapping):
        return False
    for key, mark, kind in _parsed(fields):
        if key not in value:
            if mark == "!":
                return False
        elif not (mark == "?" and value[key] is None) and not _TYPES[kind](value[key]):
            return False
    return True


@cache
def _parsed(fields: str) -> list[tuple[str, str, str]]:
    return re.findall(r"(\w+)([!?:])(\w+)", fields)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_WHOLE


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and abs(value) < float("inf"))


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _MAX_TIME


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "whole": _is_whole,
    "number": _is_number,
    "time": _is_time,
    # JSON lacks the numbers that are not finite: they are text
    "measured": lambda value: _is_number(value) or value in ("nan", "inf", "-inf"),
    "wholes": _list_of(_is_whole),
    "numbers": _list_of(_is_number),
    "loads": _list_of(_list_of(_is_number)),
    "cause": lambda value: _fits(value, _ROOT_CAUSE),
    "details": lambda value: _fits(value, _DETAILS),
    "sources": _list_of(lambda value: _fits(value, _SOURCE)),
}
