"""Lists and opens input through fsspec: local names, and URLs whose package is installed.

Every failure is an `InputError` that names the file and the remedy. Transient network failures are
retried (`retries`, `remote`).
"""

import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import fsspec

from ..errors import InputError
from ..files import MAX_BYTES, open_regular
from ..prepare_config import OWN_TEXTS
from ..retries import explain, is_of_connection, is_passing, patiently
from .compression import check_head, is_compressed
from .remote import RemoteFile

# files beside the data of a data set, by the beginning of their names; none of its text
_DESCRIPTIONS = {"readme", "license", "dataset_info", "dataset_infos", "dataset_dict", "state"}

# what file systems report of a file that changes with its content
_STAMPS = (
    *("mtime", "created", "ETag", "etag", "LastModified", "last_modified", "Last-Modified"),
    *("updated", "md5Hash", "Content-MD5", "blob_id", "date_time", "CRC"),
)


class FoundFile(NamedTuple):
    """Holds the URL of an existing file, its size in bytes, and a stamp that its changes change."""

    url: str
    size: int
    stamp: str = ""  # "": the file system reports nothing


def find_files(
    pattern: str, can_read: Callable[[str], bool]
) -> tuple[list[FoundFile], Counter[str]]:
    """Returns the files of a name, folder, glob or URL, sorted by name, and the number left out.

    Args:
        pattern: the user's input; a folder stands for its readable files.
        can_read: whether a file of a folder can be read, by its name.

    Returns:
        The files, of which a folder may have none; what is left out, by suffix or kind.

    Raises:
        InputError: no file matches, or it cannot be listed.
    """
    fs, path = _filesystem(pattern)
    with _explained(f"input {pattern!r} cannot be listed"):
        return patiently(lambda: _found_files(fs, path, pattern, can_read))


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
        size = patiently(lambda: _found(fs, path, url)).size
        if expected_size is not None and size != expected_size:
            raise InputError(
                f"{url} had {expected_size} bytes when preparation began and has {size} now: "
                "prepare again into an empty folder, from files that nobody writes to"
            )
        file = open_regular(path) if _is_local(fs) else RemoteFile(fs, path, size)
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
        content = file.read(MAX_BYTES + 1)
    check_head(url, content)
    if len(content) > MAX_BYTES:
        raise InputError(f"{url}: has more than {MAX_BYTES >> 20} MiB, the limit of such a file")
    return content


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


def _found_files(
    fs: Any, path: str, pattern: str, can_read: Callable[[str], bool]
) -> tuple[list[FoundFile], Counter[str]]:
    left_out: Counter[str] = Counter()
    if _exists(fs, path):
        paths = [path]
    else:
        matched = sorted(map(str, fs.glob(path)))
        paths = [one for one in matched if fs.isfile(one)]
        if len(matched) == 1:  # a folder, too
            paths = matched
        if "**" not in path:  # which matches what is in them, too
            left_out += Counter(folders=len(matched) - len(paths))
    if not paths:
        raise InputError(_nothing_there(pattern, left_out["folders"]))
    if len(paths) == 1 and fs.isdir(paths[0]):
        paths, left_out = _readable_files(fs, paths[0], can_read)
    urls = [found if _is_local(fs) else str(fs.unstrip_protocol(found)) for found in paths]
    return [_found(fs, one, url) for one, url in zip(paths, urls, strict=True)], left_out


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


def _readable_files(
    fs: Any, folder: str, can_read: Callable[[str], bool]
) -> tuple[list[str], Counter[str]]:
    """Returns the readable files below a folder, sorted, and what the others are."""
    prefix = f"{folder.rstrip('/')}/"
    paths, left_out = [], Counter[str]()
    # otherwise fsspec silently leaves out a local folder that it cannot list
    options = {"on_error": "raise"} if _is_local(fs) else {}
    for path in sorted(map(str, fs.find(folder, **options))):
        parts = path.removeprefix(prefix).split("/")
        if any(part.startswith(".") for part in parts):
            left_out["hidden"] += 1
        elif _is_local(fs) and os.path.isdir(path):
            left_out["links to folders"] += 1
        elif parts[-1].partition(".")[0].lower() in _DESCRIPTIONS:
            left_out[parts[-1]] += 1
        elif can_read(path):
            paths.append(path)
        else:
            left_out[_suffix(parts[-1])] += 1
    return paths, left_out


def _suffix(name: str) -> str:
    """Returns a file's suffix, with the one before it if the file is compressed."""
    _, *parts = name.lower().split(".")
    return f".{'.'.join(parts[-2:] if is_compressed(name) else parts[-1:])}" if parts else "others"


def _filesystem(url: str) -> tuple[Any, str]:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    if "\0" in url:
        raise InputError(f"{url!r} cannot be a file: its name has a null byte")
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


def _found(fs: Any, path: str, url: str) -> FoundFile:
    if _is_local(fs) and os.path.islink(path) and not os.path.exists(path):
        raise InputError(
            f"{url} is a link to a file that does not exist: restore it, or remove the link"
        )
    info = fs.info(path)
    if info["size"] is None:
        raise InputError(
            f"{url}: the server does not report the file's size: download it and give its local name"
        )
    stamp = " ".join(str(info[key]) for key in _STAMPS if info.get(key))
    return FoundFile(url, int(info["size"]), stamp)


def _is_local(fs: Any) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _nothing_there(pattern: str, num_folders: int) -> str:
    if num_folders:
        return f"input {pattern!r} matches {num_folders} folders and no file: write {pattern}/**"
    if any(character in pattern for character in "*?["):
        return (
            f"input {pattern!r} matches no file: check the folder and the suffix (and quote the glob "
            "in a shell)"
        )
    if pattern == OWN_TEXTS:
        return f"no text is named, and there is no folder {pattern}/: {_HOW_TO_NAME_TEXT}"
    return f"input {pattern!r} does not exist: check the name; to train, {_HOW_TO_NAME_TEXT}"


_HOW_TO_NAME_TEXT = (
    "name your text with prepare.input=FILES (`moebius prepare --input`), or data that `moebius "
    "prepare` has made with data.directory=FOLDER; prepare.input=embedded is Python's documentation"
)
