"""Small JSON files of unfinished work, each under a checksum.

What an earlier run has written decides what the next one does, so a record that was damaged since
counts as one that was never written: its work is done again, and the result is the same.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..atomic import atomic_write


def write_record(path: Path, content: Any, *, durable: bool = True) -> None:
    """Writes a record, whole or not at all.

    Args:
        path: the file.
        content: what it says.
        durable: whether it must survive a power failure; else it may then count as never written.

    Raises:
        PrepareError: the folder cannot be written.
    """
    text = json.dumps(content)
    with atomic_write(path, durable=durable) as file:
        file.write(json.dumps({"sha256": _sha256(text), "content": content}).encode())


def read_record(path: Path) -> Any | None:
    """Returns the content of a record; None: there is none, or it is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        record = json.loads(path.read_bytes())
        content = record["content"]
        is_whole = record["sha256"] == _sha256(json.dumps(content))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if is_whole else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
