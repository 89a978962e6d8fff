"""A file behind a network: a read whose connection fails is tried again from where it stood.

The size is known before, so a file that ends too early is noticed too, whatever the server and its
library make of it. A server that gives no parts of files is read from the beginning, once through.
"""

import contextlib
import io
from typing import Any

from ..retries import patiently


class NoRangesError(OSError):
    """Says that a server gives whole files only, where a part in front is asked for."""


class RemoteFile(io.RawIOBase):
    """Reads a file of known size through fsspec."""

    def __init__(self, fs: Any, path: str, size: int):
        """Opens nothing yet: the first read does."""
        self._fs, self._path, self._size = fs, path, size
        self._position = 0
        self._file: Any = None
        self._is_stream = False  # the server gives no parts: read in order, nothing twice

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns so many bytes, fewer only at the end of the file."""
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
        """Says where the next read begins."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Returns where the next read begins."""
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
            with contextlib.suppress(Exception):  # it is given up because something is wrong
                self._file.close()
            self._file = None

    def _read(self, size: int) -> bytes:
        try:
            return self._read_once(size)
        except ValueError as error:  # fsspec's word for a server without range requests
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
            raise NoRangesError("the server gives no parts of files: download it and give its name")
        while found < position:
            found += len(self._take(min(io.DEFAULT_BUFFER_SIZE * 128, position - found)))

    def _take(self, size: int) -> bytes:
        """Reads exactly so many bytes."""
        parts: list[bytes] = []
        left = size
        while left:
            part = self._file.read(left)
            if not part:
                raise ConnectionError(
                    f"it ended {left} bytes too early, of {self._size} that it should have"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
