"""Marks a growing folder whose preparation has failed for good.

A run on a growing folder waits for the next segment, for hours if necessary. If the preparation gives
up, it writes the reason to `unfinished/given-up.json`. The next preparation of the folder removes it.
"""

import json
from contextlib import suppress
from pathlib import Path

from .atomic import atomic_write

UNFINISHED = "unfinished"
"""The subfolder of a prepared folder for unfinished work."""

_GIVEN_UP = "given-up.json"


def give_up(directory: Path, reason: str) -> None:
    """Tells readers of a folder that it will not grow any more.

    Raises:
        PrepareError: the folder cannot be written.
    """
    folder = directory / UNFINISHED
    with suppress(OSError):  # the write below reports it
        folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / _GIVEN_UP) as file:
        file.write(json.dumps({"reason": reason}).encode())


def given_up(directory: Path) -> str | None:
    """Returns why a folder will not grow any more; None if it may, or cannot be read now."""
    try:
        return str(json.loads((directory / UNFINISHED / _GIVEN_UP).read_bytes())["reason"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        return "the file with the reason is damaged"


def go_on(directory: Path) -> None:
    """Takes back what `give_up` has declared."""
    (directory / UNFINISHED / _GIVEN_UP).unlink(missing_ok=True)
