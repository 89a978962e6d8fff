"""Atomic file writes that survive a power failure, and small records that notice damage."""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import PrepareError
from .files import replacing, sync


@contextmanager
def atomic_write(
    path: Path, *, durable: bool = True, name: Callable[[Path, Path], None] | None = None
) -> Iterator[IO[bytes]]:
    """Writes a file with `files.replacing`, and explains errors.

    Without `durable` call `make_durable` later, or detect a torn file and repeat.
    """
    with explained_write_errors(path), replacing(path, durable=durable, name=name) as file:
        yield file


def make_durable(paths: Sequence[Path]) -> None:
    """Fsyncs files and their folders, all files in parallel: it takes hardly longer than for one.

    Raises:
        PrepareError: they cannot be written.
    """
    with ThreadPoolExecutor(max(1, len(paths))) as threads:
        for _ in threads.map(_sync, paths):
            pass
    for folder in {path.parent for path in paths}:
        _sync(folder)


def _sync(path: Path) -> None:
    with explained_write_errors(path):
        sync(path)


@contextmanager
def explained_write_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors about `path` into PrepareErrors with advice."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "free some space there and run the same command again; it continues "
            "where it stopped",
            errno.EDQUOT: "your quota is used up; free some space and run the same command again",
            errno.EACCES: "give yourself write permission there, or choose another folder",
            errno.EPERM: "give yourself write permission there, or choose another folder",
            errno.EROFS: "the file system is read-only; choose another folder",
            errno.ENOTDIR: "a file is in the way; choose another folder",
            errno.EEXIST: "a file is in the way; choose another folder",
        }.get(error.errno or 0, "nothing half-written is left; run the same command again")
        raise PrepareError(f"cannot write {path} ({error.strerror or error}): {advice}") from error


def write_record(path: Path, content: Any, *, durable: bool = True) -> None:
    """Writes a JSON record with its hash, atomically.

    Args:
        path: the file.
        content: the record.
        durable: whether the record must survive a power failure.
    """
    text = json.dumps(content)
    with atomic_write(path, durable=durable) as file:
        file.write(json.dumps({"sha256": _sha256(text), "content": content}).encode())


def read_record(path: Path) -> Any | None:
    """Returns the content of a record; None if it is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
        content = record["content"]
        is_whole = record["sha256"] == _sha256(json.dumps(content))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if is_whole else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
