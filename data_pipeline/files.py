"""Files that are whole or absent, locks that end with their process, and lines that stay whole.

Every room may import this module, which imports none of ours.
"""

import errno
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp-"


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
