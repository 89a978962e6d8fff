"""Atomic file writes that survive a power failure, and small records that notice damage."""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import PrepareError

TEMPORARY = ".tmp-"


@contextmanager
def atomic_write(
    path: Path, *, durable: bool = True, name: Callable[[Path, Path], None] | None = None
) -> Iterator[IO[bytes]]:
    """Writes a file atomically: temporary name, fsync, rename. An exception removes it.

    Args:
        path: the file.
        durable: whether to fsync. Without, a power failure may leave the file empty or torn, so call
            `make_durable` later, or detect and repeat.
        name: gives the temporary file its name; by default `os.replace`.
    """
    temporary = _temporary_name(path)
    with explained_write_errors(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            (name or os.replace)(temporary, path)
            if durable:
                _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_durable(paths: Sequence[Path]) -> None:
    """Fsyncs files and their folders, all files in parallel: it takes hardly longer than for one.

    Raises:
        PrepareError: they cannot be written.
    """
    with ThreadPoolExecutor(max(1, len(paths))) as threads:
        for _ in threads.map(_sync, paths):
            pass
    for folder in {path.parent for path in paths}:
        with explained_write_errors(folder):
            _sync_folder(folder)


def _sync(path: Path) -> None:
    with explained_write_errors(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")


def _sync_folder(folder: Path) -> None:
    """Fsyncs a folder, without which a rename does not survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
