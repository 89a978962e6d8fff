"""Lists and opens input through fsspec: local names, and URLs whose package is installed.

Every failure is an `InputError` that names the file and the remedy. Transient network failures are
retried (`retries`, `remote`).
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import fsspec

from ..errors import InputError
from ..retries import explain, is_of_connection, is_passing, patiently
from .remote import RemoteFile


class FoundFile(NamedTuple):
    """Holds the URL of an existing file, and its size in bytes."""

    url: str
    size: int


def find_files(pattern: str, suffixes: Sequence[str]) -> Iterator[FoundFile]:
    """Yields the files of a name, folder, glob or URL, sorted by name.

    Args:
        pattern: the user's input; a folder stands for its files with one of `suffixes`.
        suffixes: the suffixes that can be read.

    Raises:
        InputError: no file matches, or it cannot be listed.
    """
    fs, path = _filesystem(pattern)
    with _explained(f"input {pattern!r} cannot be listed"):
        yield from patiently(lambda: _found_files(fs, path, pattern, suffixes))


@contextmanager
def opened(url: str, expected_size: int | None = None) -> Iterator[IO[bytes]]:
    """Opens a file to read its bytes.

    Args:
        url: a local name, or a URL.
        expected_size: its size when the preparation began.

    Raises:
        InputError: it cannot be read, or its size has changed.
    """
    fs, path = _filesystem(url)
    with _explained(f"{url} cannot be read"):
        fs.invalidate_cache()  # an old listing would hide changes
        size = patiently(lambda: _size(fs, path, url))
        if expected_size is not None and size != expected_size:
            raise InputError(
                f"{url} had {expected_size} bytes when preparation began and has {size} now: "
                "prepare again into an empty folder, from files that nobody writes to"
            )
        file = fs.open(path, "rb") if _is_local(fs) else RemoteFile(fs, path, size)
        with cast("IO[bytes]", file):
            yield cast("IO[bytes]", file)


def content_of(url: str) -> bytes | None:
    """Returns the bytes of a small file; None if it does not exist.

    Raises:
        InputError: it cannot be read.
    """
    fs, path = _filesystem(url)
    with _explained(f"{url} cannot be read"):
        is_there = patiently(lambda: _exists(fs, path))
    if not is_there:
        return None
    with opened(url) as file:
        return file.read()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns the errors of a file system into an InputError."""
    try:
        yield
    except Exception as error:
        if not is_of_connection(error):
            raise
        raise InputError(
            f"{what} ({explain(error)}): check the name, and that you may read it"
        ) from error


def _found_files(fs: Any, path: str, pattern: str, suffixes: Sequence[str]) -> list[FoundFile]:
    paths = [path] if _exists(fs, path) else sorted(str(p) for p in fs.glob(path) if fs.isfile(p))
    if not paths:
        raise InputError(_nothing_there(pattern))
    if len(paths) == 1 and fs.isdir(paths[0]):
        paths = _readable_files(fs, paths[0], pattern, suffixes)
    urls = [found if _is_local(fs) else str(fs.unstrip_protocol(found)) for found in paths]
    return [FoundFile(url, _size(fs, found, url)) for found, url in zip(paths, urls, strict=True)]


def _exists(fs: Any, path: str) -> bool:
    """Returns whether a file or folder exists.

    Unlike the file systems' own `exists`, it raises if a server does not answer.
    """
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_passing(error):
            raise
        return False
    return True


def _readable_files(fs: Any, folder: str, pattern: str, suffixes: Sequence[str]) -> list[str]:
    """Returns the readable files below a folder, sorted, without hidden ones."""
    prefix = f"{folder.rstrip('/')}/"
    inside = {str(path): str(path).removeprefix(prefix).split("/") for path in fs.find(folder)}
    paths = [
        path
        for path, parts in inside.items()
        if path.endswith(tuple(suffixes)) and not any(part.startswith(".") for part in parts)
    ]
    if not paths:
        raise InputError(
            f"input {pattern!r} is a folder without readable files: none of its {len(inside)} files "
            f"ends in {', '.join(suffixes)}"
        )
    return sorted(paths)


def _filesystem(url: str) -> tuple[Any, str]:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise InputError(
            f"input {url!r} needs another package ({error}): install it with pip"
        ) from error
    except OSError as error:  # zip://member::archive opens the archive here
        raise InputError(
            f"input {url!r} cannot be opened ({explain(error)}): check the name and your access"
        ) from error
    except zipfile.BadZipFile as error:
        raise InputError(f"input {url!r} cannot be opened: {error}") from error
    except ValueError as error:
        raise InputError(
            f"input {url!r} cannot be opened: {error}; for a local file leave out {protocol}://"
        ) from error


def _size(fs: Any, path: str, url: str) -> int:
    size = fs.info(path)["size"]
    if size is None:
        raise InputError(
            f"{url}: the server does not report the file's size: download it and give its local name"
        )
    return int(size)


def _is_local(fs: Any) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _nothing_there(pattern: str) -> str:
    if any(character in pattern for character in "*?["):
        return (
            f"input {pattern!r} matches no file: check the folder and the suffix (and quote the glob "
            "in a shell)"
        )
    return (
        f"input {pattern!r} does not exist: check the name, or give input=embedded for the built-in "
        "corpus"
    )
