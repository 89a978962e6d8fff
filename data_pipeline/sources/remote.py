"""A remote file whose reads survive failed connections: they continue where they stopped.

The size is known in advance, so a truncated transfer is an error even if the library hides it. A file
on a server without range requests is read once, from the beginning.
"""

import contextlib
import io
from typing import Any

from ..retries import patiently


class NoRangesError(OSError):
    """Says that a server without range requests was asked for an earlier part of a file."""


class RemoteFile(io.RawIOBase):
    """Reads a file of known size through fsspec."""

    def __init__(self, fs: Any, path: str, size: int):
        """Opens nothing; the first read does."""
        self._fs, self._path, self._size = fs, path, size
        self._position = 0
        self._file: Any = None
        self._is_stream = False  # without range requests: only reads forward

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns `size` bytes, fewer only at the end of the file."""
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        data = patiently(lambda: self._read(wanted)) if wanted else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer from the read position and returns the number of bytes read."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Sets the position of the next read, and returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Returns the position of the next read."""
        return self._position

    def readable(self) -> bool:
        """Returns True, because the file can always be read."""
        return True

    def seekable(self) -> bool:
        """Returns True; `seek` only moves the position of the next read."""
        return True

    def close(self) -> None:
        """Closes the connection to the server and marks the file as closed."""
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):  # it has failed already
                self._file.close()
            self._file = None

    def _read(self, size: int) -> bytes:
        try:
            return self._read_once(size)
        except ValueError as error:  # fsspec raises it for a server without range requests
            self._drop()
            if self._is_stream or "range requests" not in str(error):
                raise
            self._is_stream = True
            return self._read_once(size)
        except BaseException:
            self._drop()
            raise

    def _read_once(self, size: int) -> bytes:
        if self._file is None:
            options = {"block_size": 0} if self._is_stream else {}
            self._file = self._fs.open(self._path, "rb", **options)
        self._go_to(self._position)
        return self._take(size)

    def _go_to(self, position: int) -> None:
        found = int(self._file.tell())
        if found == position:
            return
        if not self._is_stream:
            self._file.seek(position)
            return
        if position < found:
            raise NoRangesError(
                "the server supports no range requests: download the file and give its local name"
            )
        while found < position:
            found += len(self._take(min(io.DEFAULT_BUFFER_SIZE * 128, position - found)))

    def _take(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        parts: list[bytes] = []
        left = size
        while left:
            part = self._file.read(left)
            if not part:
                raise ConnectionError(f"it ended {left} bytes too early, of {self._size} bytes")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
