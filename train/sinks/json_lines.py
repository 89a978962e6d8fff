"""metrics.jsonl: the one sink that is always there, since watchers and the supervision read it."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from ..metrics.records import Record


class JsonLines:
    """Appends each record as a line of JSON, at once, for readers follow the file."""

    def __init__(self, path: Path) -> None:
        """Opens the file, which may hold lines already."""
        # without a buffer: what a full disk refused must not come later, in the middle of a line
        self.file = path.open("ab", buffering=0)
        self._is_torn = False  # the last line is there in part

    def write_one(self, record: Record) -> None:
        """Writes a line, after the end of one that was torn.

        Raises:
            OSError: it could not be written, or not whole.
        """
        values = {"kind": record.kind, "step": record.step, "time": round(record.time_s, 3)}
        line = json.dumps(finite(values | dict(record.values))).encode()
        line = b"\n" * self._is_torn + line + b"\n"
        written = self.file.write(line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


def finite(value: Any) -> Any:
    """Makes strings of the numbers that are not finite: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return value
