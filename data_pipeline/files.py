"""Files that are whole or absent, locks that end with their process, and lines that stay whole.

Files that others write (a downloaded folder, another user's run) are read here, too: without waiting,
within bounds, and only if they are regular files.

Every room may import this module, which imports none of ours.
"""

import errno
import fcntl
import io
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

TEMPORARY = ".tmp-"
MAX_BYTES = 64 << 20
"""The largest configuration, tokenizer or index that is read; the largest published one has 35 MB."""


def open_regular(path: Path | str) -> BinaryIO:
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


def read_regular(path: Path | str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the bytes of a regular file.

    Raises:
        FileNotFoundError: there is no regular file of this name.
        OSError: it cannot be read or is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        # no more than it has: Python asks for the memory of what it may read
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"Larger than {max_bytes:,} bytes", str(path))
    return data


def json_object(
    data: bytes | str, name: str, *, hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """Parses a JSON object that somebody else wrote.

    Raises:
        ValueError: it is not JSON, nested too deeply, or not an object; the message begins with `name`.
    """
    try:
        values = json.loads(data, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {fault(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name}: is a {type(values).__name__}, not a JSON object")
    return values


def fault(error: Exception) -> str:
    """Returns what a parser says about a text, in words about the text instead of Python."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    digits = f"a number has more than {sys.get_int_max_str_digits():,} digits"
    return digits if "int_max_str_digits" in str(error) else str(error)


@contextmanager
def replacing(
    path: Path, *, durable: bool, name: Callable[[Path, Path], None] | None = None
) -> Iterator[IO[bytes]]:
    """Yields a new file that takes the place of `path` once it is complete; an exception removes it.

    Args:
        path: the file.
        durable: whether to fsync the file and its folder. Without, a power failure may leave the file
            empty or torn.
        name: gives the temporary file its name; by default `os.replace`.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        (name or os.replace)(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a file that readers see whole or not at all; `durable` as in `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Syncs a file's bytes, or the names in a folder, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(file: io.FileIO, line: str) -> None:
    """Appends a line to a file opened with "ab+", unbuffered: a refused line must not appear later.

    A line that a killed writer or a full disk left incomplete is ended first.

    Raises:
        OSError: the line could not be written completely.
    """
    end = file.seek(0, os.SEEK_END)
    is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
    data = b"\n" * is_torn + line.encode() + b"\n"
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def append_to(path: Path) -> io.FileIO:
    """Opens a regular file for `append_line`; a folder, link or pipe in its place is renamed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.rename(path.with_name(f"{path.name}.replaced-{secrets.token_hex(4)}"))
    return path.open("ab+", buffering=0)


def lock_file(path: Path, mode: str, *, wait: bool = False) -> io.FileIO:
    """Opens a file, and locks it until it is closed or the process ends.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        FileNotFoundError: the file was deleted or replaced meanwhile.
        OSError: it cannot be opened, or its file system has no locks.
    """
    file = io.FileIO(path, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "its lock was replaced", str(path))
    except OSError:
        file.close()
        raise
    return file
