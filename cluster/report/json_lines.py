"""Files of JSON lines that grow: the journal, the metrics, the progress of a preparation."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .line_checks import is_believed


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
