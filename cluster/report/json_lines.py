"""Files of JSON lines that grow: the journal, the metrics, the progress of a preparation."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonLinesTail:
    """Reads a growing file of JSON lines piece by piece: only whole lines, nothing twice.

    Lines that are not JSON objects (torn by a kill, then appended to), or hold what they cannot
    hold (line_checks.py), are skipped and counted.
    """

    def __init__(self, path: Path, *, offset: int = 0):
        self.path = path
        self.offset = offset
        self.num_skipped = 0

    @classmethod
    def near_the_end(cls, path: Path, *, num_bytes: int) -> "JsonLinesTail":
        """Starts at most `num_bytes` before the end: the last lines of a file of any size."""
        size = path.stat().st_size if path.exists() else 0
        return cls(path, offset=max(0, size - num_bytes))

    def read(self) -> list[dict[str, Any]]:
        """Returns the whole lines that came since the last call."""
        return list(self.stream())

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yields what `read` returns one by one, for files that are larger than memory."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the `with` below
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0  # the file was replaced by a shorter one
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.offset += len(line)
                entry = self._decode(line)
                if entry is not None:
                    yield entry

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not is_believed(entry):
            self.num_skipped += bool(line.strip())
            return None
        return entry


Check = Callable[[Any], bool]

_MAX_TIME = 1e11  # seconds since the epoch: the year 5138
_MAX_WHOLE = 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_WHOLE


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and abs(value) < float("inf"))


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _MAX_TIME


def _is_measured(value: Any) -> bool:
    """Tells whether it is a number, or the text of one that JSON has not."""
    return _is_number(value) or value in ("nan", "inf", "-inf")


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _record(needed: Mapping[str, Check], allowed: Mapping[str, Check]) -> Check:
    """Returns a check of an object: these keys must be there, and those must fit if they are."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and all(key in value for key in needed)
            and all(
                fits(value[key])
                for key, fits in (*needed.items(), *allowed.items())
                if key in value
            )
        )

    return check


_ROOT_CAUSE = _record(
    {"summary": _is_text},
    {
        **dict.fromkeys(("rank", "node", "exit_code"), _or_none(_is_whole)),
        **dict.fromkeys(("error", "where", "traceback", "log"), _or_none(_is_text)),
    },
)
_DETAILS = _record(
    {},
    {
        "root_cause": _or_none(_ROOT_CAUSE),
        "step": _or_none(_is_whole),
        "first_step": _is_whole,
    },
)
_JOURNAL = _record(
    {
        "state": _is_text,
        "time": _is_time,
        "generation": _is_whole,
        "reason": _is_text,
        "details": _DETAILS,
    },
    {},
)
_NUMBERS = _list_of(_is_number)
_LOADS = {"max_violation": _NUMBERS, "effective_experts": _NUMBERS}
_KINDS: dict[str, Check] = {
    "start": _record(
        {},
        {
            "generation": _is_whole,
            "resumed_from_step": _or_none(_is_whole),
            "expert_depths": _list_of(_is_whole),
        },
    ),
    "train": _record(
        {"step": _is_whole, "loss": _is_measured},
        _LOADS | {"tokens_per_s": _is_number, "expert_load": _list_of(_NUMBERS)},
    ),
    "eval": _record({"step": _is_whole, "loss": _is_measured}, {"seconds": _is_number}),
    "checkpoint": _record(
        {"step": _is_whole, "seconds": _is_number}, {"error": _or_none(_is_text)}
    ),
    "checkpoint_copy": _record({"step": _is_whole}, {"error": _or_none(_is_text)}),
    "checkpoint_set_aside": _record(
        {"step": _is_whole, "resumed_from_step": _is_whole, "path": _is_text, "why": _is_text},
        {},
    ),
    "spike": _record(
        {
            "step": _is_whole,
            "in_a_row": _is_whole,
            **dict.fromkeys(("loss", "grad_norm", "loss_limit", "grad_norm_limit"), _is_measured),
        },
        {},
    ),
    "rollback": _record(
        {
            **dict.fromkeys(
                ("step", "to_step", "first_sample", "end_sample", "number", "most"), _is_whole
            ),
            "why": _is_text,
            "abandoned": _list_of(_is_text),
        },
        {},
    ),
    "rollback_impossible": _record({"why": _is_text, "at_most": _is_whole}, {}),
    "data_wait": _record({"seconds": _is_number}, {"reason": _or_none(_is_text)}),
    "preparation": _record(
        {"stage": _is_text, "time": _is_time},
        {
            **dict.fromkeys(("done", "total", "tokens", "eras"), _is_whole),
            **dict.fromkeys(("tokens_per_s", "eta_s"), _or_none(_is_number)),
            **dict.fromkeys(("news", "error"), _is_text),
            "sources": _list_of(
                _record(
                    {"name": _is_text, "done": _is_whole, "total": _is_whole, "tokens": _is_whole},
                    {"eta_s": _or_none(_is_number), "eras": _is_whole},
                )
            ),
        },
    ),
}


def is_believed(line: Mapping[str, Any]) -> bool:
    """Returns whether the values of a decoded line have the types that its readers count on."""
    if "state" in line:
        return _JOURNAL(line)
    kind = line.get("kind")
    if not isinstance(kind, str):
        return kind is None
    check = _KINDS.get(kind, lambda _: True)
    return _is_time(line.get("time", 0)) and check(line) and _loads_fit(line)


def _loads_fit(line: Mapping[str, Any]) -> bool:
    """Returns whether a line's lists about experts have an entry for each depth, none empty."""
    if line.get("kind") != "train" or "expert_load" not in line:
        return True
    lists = [line["expert_load"], *(line.get(key, ()) for key in _LOADS)]
    return len(set(map(len, lists))) == 1 and all(line["expert_load"])
