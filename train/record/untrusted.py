"""Reads files of a folder that others can write to, and shows what they say.

Such a file may be missing, a directory, a pipe that nobody writes to, a device without an end, or text that
would move a terminal's cursor. Reading never waits, is bounded, and accepts regular files alone.
"""

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 64 << 20

# Everything but tabs and ends of lines that a terminal obeys instead of showing it; the last two ranges
# reorder a line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading, without waiting for a pipe's writer.

    Raises:
        FileNotFoundError: there is no regular file of this name.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str | None:
    """Returns the text of a file; None if it is missing, not regular, too long, or not UTF-8."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
        return data.decode() if len(data) <= max_bytes else None
    except (OSError, UnicodeDecodeError):
        return None


def escaped(text: str) -> str:
    """Returns a text with its control characters spelled out, as `\\x1b`."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
