"""Writes files atomically, and reads them back."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file atomically: a concurrent reader sees the old content or the new."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(data)
    partial.replace(path)


def write_json(path: Path, values: object) -> None:
    """Replaces a file by values as JSON."""
    write_whole(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Returns a file's JSON object; an empty one if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
