"""Whether a folder that is not complete will still grow: what its preparation leaves when it gives up.

Who trains on a folder that grows waits for the next segment, for hours if need be. When the preparation
has failed for good nobody will make it, and the file `unfinished/given-up.json` says so and why.
The next preparation of the folder removes it.
"""

import json
from contextlib import suppress
from pathlib import Path

from .atomic import atomic_write

UNFINISHED = "unfinished"
"""The folder, in a prepared one, of what is not finished yet."""

_GIVEN_UP = "given-up.json"


def give_up(directory: Path, reason: str) -> None:
    """Tells whoever reads a folder that it will not grow any more.

    Raises:
        PrepareError: the folder cannot be written.
    """
    folder = directory / UNFINISHED
    with suppress(OSError):  # told by what follows
        folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / _GIVEN_UP) as file:
        file.write(json.dumps({"reason": reason}).encode())


def given_up(directory: Path) -> str | None:
    """Returns why a folder will not grow any more; None: it may, or cannot be looked at just now.

    A network file system may fail for a moment; who waits asks again.
    """
    try:
        return str(json.loads((directory / UNFINISHED / _GIVEN_UP).read_bytes())["reason"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        return "the file that says why cannot be read"


def go_on(directory: Path) -> None:
    """Takes back that a folder was given up."""
    (directory / UNFINISHED / _GIVEN_UP).unlink(missing_ok=True)
