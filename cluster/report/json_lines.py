"""Files of JSON lines that grow: the journal, the metrics, the progress of a preparation.

They are appended to by processes that may be killed, on disks that may fill up, and people edit
them. A line whose values have other types than its readers count on is skipped, as a torn one is; it
must not end the command that shows how a job stands. Lines of unknown kinds pass: they are a later
version's.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Check = Callable[[Any], bool]

_MAX_TIME = 1e11  # seconds since the epoch: the year 5138
_MAX_WHOLE = 2**63


class JsonLinesTail:
    """Reads a growing file of JSON lines piece by piece: only whole lines, nothing twice.

    Lines that are not JSON objects (torn by a kill, then appended to), or hold what they cannot
    hold, are skipped and counted.
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
    loads = line["expert_load"]
    others = [line.get(key, ()) for key in ("max_violation", "effective_experts")]
    return all(len(other) == len(loads) for other in others) and all(loads)


# Types --------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_WHOLE


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and abs(value) < float("inf"))


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _MAX_TIME


def _is_measured(value: Any) -> bool:
    """Returns whether it is a number, or the text of one that JSON has not."""
    return _is_number(value) or value in ("nan", "inf", "-inf")


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _record(needed: Mapping[str, Check] | None = None, /, **allowed: Check) -> Check:
    """Returns a check of an object: these keys must be there, and those must fit if they are."""
    needed = needed or {}
    checks = {**needed, **allowed}

    def check(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and all(key in value for key in needed)
            and all(fits(value[key]) for key, fits in checks.items() if key in value)
        )

    return check


def _all(check: Check, *names: str) -> dict[str, Check]:
    return dict.fromkeys(names, check)


_SOME_WHOLE, _SOME_TEXT, _SOME_NUMBER = map(_or_none, (_is_whole, _is_text, _is_number))
_NUMBERS = _list_of(_is_number)
_ROOT_CAUSE = _record(
    {"summary": _is_text},
    **_all(_SOME_WHOLE, "rank", "node", "exit_code"),
    **_all(_SOME_TEXT, "error", "where", "traceback", "log"),
)
_DETAILS = _record(root_cause=_or_none(_ROOT_CAUSE), step=_SOME_WHOLE, first_step=_is_whole)
_JOURNAL = _record(
    {
        **_all(_is_text, "state", "reason"),
        "time": _is_time,
        "generation": _is_whole,
        "details": _DETAILS,
    }
)
_SOURCE = _record(
    {"name": _is_text, **_all(_is_whole, "done", "total", "tokens")},
    eta_s=_SOME_NUMBER,
    segments=_is_whole,
)
_STEP_AND_LOSS: dict[str, Check] = {"step": _is_whole, "loss": _is_measured}
_KINDS: dict[str, Check] = {
    "start": _record(
        generation=_is_whole, resumed_from_step=_SOME_WHOLE, expert_depths=_list_of(_is_whole)
    ),
    "train": _record(
        _STEP_AND_LOSS,
        tokens_per_s=_is_number,
        expert_load=_list_of(_NUMBERS),
        max_violation=_NUMBERS,
        effective_experts=_NUMBERS,
    ),
    "eval": _record(_STEP_AND_LOSS, seconds=_is_number),
    "checkpoint": _record({"step": _is_whole, "seconds": _is_number}, error=_SOME_TEXT),
    "checkpoint_copy": _record({"step": _is_whole}, error=_SOME_TEXT),
    "checkpoint_set_aside": _record(
        _all(_is_whole, "step", "resumed_from_step") | _all(_is_text, "path", "why")
    ),
    "spike": _record(
        _all(_is_whole, "step", "in_a_row")
        | _all(_is_measured, "loss", "grad_norm", "loss_limit", "grad_norm_limit")
    ),
    "rollback": _record(
        _all(_is_whole, "step", "to_step", "first_sample", "end_sample", "number", "most")
        | {"why": _is_text, "abandoned": _list_of(_is_text)}
    ),
    "rollback_impossible": _record({"why": _is_text, "at_most": _is_whole}),
    "data_wait": _record({"seconds": _is_number}, reason=_SOME_TEXT),
    "preparation": _record(
        {"stage": _is_text, "time": _is_time},
        **_all(_is_whole, "done", "total", "tokens", "segments"),
        **_all(_SOME_NUMBER, "tokens_per_s", "eta_s"),
        **_all(_is_text, "news", "error"),
        sources=_list_of(_SOURCE),
    ),
}
