"""Reads files of a folder that others can write to, and shows what they say.

Such a file may be missing, a directory, a pipe that nobody writes to, a device without an end, or text that
would move a terminal's cursor. Reading never waits, is bounded, and accepts regular files alone.
"""

import re
from pathlib import Path

from ...data_pipeline.files import MAX_BYTES, read_regular

# Everything but tabs and ends of lines that a terminal obeys instead of showing it; the last two ranges
# reorder a line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str | None:
    """Returns the text of a file; None if it is missing, not regular, too long, or not UTF-8."""
    try:
        return read_regular(path, max_bytes=max_bytes).decode()
    except (OSError, UnicodeDecodeError):
        return None


def escaped(text: str) -> str:
    """Returns a text with its control characters spelled out, as `\\x1b`."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
