"""How a rank asks its node's data server for chunks, and what it does once that is gone.

While the server lives a chunk is mapped, not decoded; its memory is given back when the reader lets
go of it. When the server ends, hangs or does not speak the protocol the rank says so in its log and
decodes for itself from then on: same rows, more work. What is mapped already stays valid.
"""

import contextlib
import logging
import mmap
import os
import socket
import weakref
from collections import deque
from pathlib import Path

from ..data_config import DataConfig
from ..errors import DataError, ShardError
from ..read.chunks import LoadedChunk
from ..read.corruption import SkipList, SkippedBatch
from ..read.rows import ChunkReader
from .protocol import (
    MAX_RELEASED,
    Failed,
    Hello,
    Here,
    NoRoom,
    Progress,
    ProtocolError,
    Refused,
    Reply,
    Request,
    Waiting,
    Want,
    config_sha256,
    receive_reply,
    send,
)
from .shared_memory import map_chunk

logger = logging.getLogger(__name__)

_SILENT_S = 60.0  # a server that says nothing for so long is given up; it speaks twice a second
_ERRORS = {"DataError": DataError, "ShardError": ShardError}


class ServedChunks:
    """Gets chunks from the data server of this node. Not for several threads at once, but `close`.

    Attributes:
        lost: why the server is no longer asked; "": it is.
        doing: what the server says that it is doing, while this rank waits for it.
        chunks_alone: how many chunks this rank has read by itself.
    """

    def __init__(self, address: Path, data: DataConfig, *, rank: int, skipped: SkipList):
        """Connects to the server.

        Args:
            address: its socket.
            data: what is read, as the server was told.
            rank: this one.
            skipped: takes note of record batches that are passed over.
        """
        self.lost = self.doing = ""
        self.chunks_alone = 0
        self._skipped = skipped
        self._released: deque[int] = deque()
        self._closing = False
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_SILENT_S)
        try:
            self._connection.connect(str(address))
            send(self._connection, Hello(rank=rank, data=config_sha256(data)))
        except OSError as error:
            self._lose(error)

    def read(self, source: str, segment: int, chunk: int, *, alone: ChunkReader) -> LoadedChunk:
        """Returns the rows of a chunk; where the server does not have them `alone` decodes them.

        Raises:
            ShardError: they cannot be read, and that is not to be passed over.
            DataError: too much would be passed over.
        """
        try:
            found = None if self.lost else self._get(source, segment, chunk)
        except (OSError, ProtocolError) as error:
            if self._closing:
                raise
            self._lose(error)
            found = None
        if found is not None:
            return found
        self.chunks_alone += 1
        return alone(source, segment, chunk)

    def progress(self, sample: int) -> None:
        """Tells the server that this rank has read all samples before this one."""
        if self.lost:
            return
        try:
            send(self._connection, Progress(sample=sample, released=self._take_released()))
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Hangs up; a thread that waits for the server gets an error. May be called again."""
        self._closing = True
        with contextlib.suppress(OSError):  # not connected, or no longer
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _get(self, source: str, segment: int, chunk: int) -> LoadedChunk | None:
        """Returns a chunk of the server's; None: it has no room for it."""
        want = Want(source=source, segment=segment, chunk=chunk, released=self._take_released())
        reply, file = self._ask(want)
        if isinstance(reply, Here) and file is not None:
            return self._mapped(reply, file, source, segment)
        if isinstance(reply, Failed):
            raise _ERRORS[reply.error](reply.message)
        if isinstance(reply, NoRoom):
            self._say_no_room(reply.reason)
            return None
        if isinstance(reply, Refused):
            raise ProtocolError(f"it refuses: {reply.reason}")
        raise ProtocolError(f"asked for a chunk, it answers {reply.kind!r}")

    def _mapped(self, here: Here, file: int, source: str, segment: int) -> LoadedChunk:
        try:
            chunk, mapping = map_chunk(here, file)
        finally:
            os.close(file)
        self._watch(mapping, here.number)
        for one in here.lost:
            self._skipped.add_batch(SkippedBatch(source, segment, one.batch, one.error))
        return chunk

    def _watch(self, mapping: mmap.mmap, number: int) -> None:
        """Sees to it that the server is told once a chunk is no longer mapped."""
        weakref.finalize(mapping, self._released.append, number).atexit = False

    def _take_released(self) -> tuple[int, ...]:
        count = min(len(self._released), MAX_RELEASED)
        return tuple(self._released.popleft() for _ in range(count))

    def _ask(self, request: Request) -> tuple[Reply, int | None]:
        try:
            send(self._connection, request)
            while (received := receive_reply(self._connection)) is not None:
                if not isinstance(received[0], Waiting):
                    return received
                self.doing = received[0].reason
        finally:
            self.doing = ""
        raise ConnectionResetError("it has hung up")

    def _say_no_room(self, reason: str) -> None:
        if self.chunks_alone & (self.chunks_alone + 1) == 0:  # the 1st, 2nd, 4th, 8th …
            logger.warning(
                "the data server has no room, so this rank decodes by itself (%d chunks so far): %s; "
                "raise data.server_bytes",
                self.chunks_alone + 1,
                reason,
            )

    def _lose(self, error: Exception) -> None:
        self._connection.close()
        if self._closing:
            return
        self.lost = str(error) or type(error).__name__
        logger.warning(
            "the data server is gone (%s): this rank reads and decodes by itself from now on",
            self.lost,
        )
