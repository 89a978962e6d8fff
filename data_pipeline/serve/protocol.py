"""What a rank and the data server tell each other over a Unix socket: JSON of checked sizes.

    rank → server   hello (who, which data), want (a chunk), progress (how far, what was let go)
    server → rank   here (a chunk, with its file), waiting (why), no_room, failed, refused

A message is its length (4 bytes) and a JSON text, which pydantic checks field by field; tokens never
go through the socket. The one file descriptor of a `here` travels beside its first byte. Anything
else than this ends the connection: nothing is unpickled, and nothing is taken whose size was not
checked before.
"""

import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..data_config import SOURCE_NAME, DataConfig

VERSION = 4
MAX_REQUEST_BYTES = 16 * 2**10
MAX_REPLY_BYTES = 2**20
MAX_RELEASED = 500
"""Chunks that one request may say were let go; more are said with the next."""

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_MAX_TEXT = 4000  # of an error or a reason
_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Large = Annotated[int, Field(ge=0, lt=2**53)]
_Released = Annotated[tuple[_Large, ...], Field(max_length=MAX_RELEASED)]


class ServerJob(BaseModel):
    """Says for which ranks of which run a data server is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: DataConfig
    global_batch: int = Field(ge=1)
    num_ranks: int = Field(ge=1)  # of the run
    first_rank: int = Field(ge=0)  # of the node
    ranks_here: int = Field(ge=1)
    start_sample: int = Field(ge=0)

    @property
    def data_sha256(self) -> str:
        """Returns the hash of the data's configuration, which server and rank must share."""
        return config_sha256(self.data)


def config_sha256(data: DataConfig) -> str:
    """Returns a hash of all of a configuration."""
    return hashlib.sha256(data.model_dump_json().encode()).hexdigest()


class ProtocolError(ValueError):
    """Says that what came through the socket is no message, or not the one that may come now."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Hello(_Message):
    """Says which rank this is, and for which data it is configured."""

    kind: Literal["hello"] = "hello"
    version: _Index = VERSION
    rank: _Index
    data: str = Field(max_length=64)  # sha256 of its configuration


class Want(_Message):
    """Asks the server for one chunk of a source, and lists chunks no longer in use."""

    kind: Literal["want"] = "want"
    source: str = Field(pattern=SOURCE_NAME)
    segment: _Index
    chunk: _Index
    released: _Released = ()  # numbers of chunks that are no longer mapped


class Progress(_Message):
    """Says how far the rank has read; there is no answer."""

    kind: Literal["progress"] = "progress"
    sample: _Large
    released: _Released = ()


class Part(_Message):
    """Says where one array of a chunk lies in its file."""

    name: str = Field(max_length=20)
    dtype: str = Field(max_length=20)
    offset: _Large
    count: _Large


class LostBatch(_Message):
    """Names a record batch of a chunk that was passed over, and why."""

    batch: _Index
    error: str = Field(max_length=_MAX_TEXT)


class Here(_Message):
    """Hands over a chunk; its file comes with it."""

    kind: Literal["here"] = "here"
    number: _Large  # what it is called when it is let go
    num_bytes: _Large
    width: int = Field(ge=2, lt=2**31)
    parts: tuple[Part, ...] = Field(min_length=1, max_length=8)
    lost: tuple[LostBatch, ...] = ()


class Waiting(_Message):
    """Says why there is no answer yet; another message follows."""

    kind: Literal["waiting"] = "waiting"
    reason: str = Field(max_length=_MAX_TEXT)


class NoRoom(_Message):
    """Says that the chunk does not fit beside what ranks hold: the rank reads it by itself."""

    kind: Literal["no_room"] = "no_room"
    reason: str = Field(max_length=_MAX_TEXT)


class Failed(_Message):
    """Says that the chunk cannot be read, as the rank itself would have found."""

    kind: Literal["failed"] = "failed"
    error: Literal["DataError", "ShardError"]
    message: str = Field(max_length=_MAX_TEXT)


class Refused(_Message):
    """Says why the server does not serve this rank; it hangs up."""

    kind: Literal["refused"] = "refused"
    reason: str = Field(max_length=_MAX_TEXT)


Request = Annotated[Hello | Want | Progress, Field(discriminator="kind")]
Reply = Annotated[Here | Waiting | NoRoom | Failed | Refused, Field(discriminator="kind")]
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Request)
_REPLIES: TypeAdapter[Reply] = TypeAdapter(Reply)


def cut(text: str) -> str:
    """Returns a text that fits into a message."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def send(connection: socket.socket, message: BaseModel, files: Sequence[int] = ()) -> None:
    """Sends a message, and beside it copies of open files."""
    text = message.model_dump_json().encode()
    data = _LENGTH.pack(len(text)) + text
    sent = socket.send_fds(connection, [data], list(files)) if files else 0
    connection.sendall(data[sent:])


def receive_request(connection: socket.socket) -> Request | None:
    """Waits for a rank's message; None: it has hung up.

    Raises:
        ProtocolError: it is none.
    """
    header = _receive(connection, _LENGTH.size)
    if header is None:
        return None
    text = _receive(connection, _checked_length(header, MAX_REQUEST_BYTES))
    return None if text is None else _parsed(_REQUESTS, text)


def receive_reply(connection: socket.socket) -> tuple[Reply, int | None] | None:
    """Waits for the server's message, and the file that comes with it; None: it has hung up.

    Raises:
        ProtocolError: it is none, or has a file where none belongs.
    """
    header, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    file = files[0] if files else None
    try:
        rest = _receive(connection, _LENGTH.size - len(header)) if header else None
        if rest is None:
            return None
        text = _receive(connection, _checked_length(header + rest, MAX_REPLY_BYTES))
        if text is None:
            return None
        reply = _parsed(_REPLIES, text)
        if isinstance(reply, Here) != (file is not None):
            raise ProtocolError(f"a message {reply.kind!r} with {len(files)} files")
        kept, file = file, None
        return reply, kept
    finally:
        if file is not None:
            os.close(file)


def _receive(connection: socket.socket, count: int) -> bytes | None:
    """Returns so many bytes; None: the other side hung up before."""
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _checked_length(header: bytes, most: int) -> int:
    length = _LENGTH.unpack(header)[0]
    if not 2 <= length <= most:
        raise ProtocolError(f"a message of {length} bytes was announced; 2 to {most} are taken")
    return length


def _parsed(adapter: TypeAdapter[T], text: bytes) -> T:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in found["loc"])
        raise ProtocolError(f"no message of this protocol ({where}: {found['msg']})") from None
