"""Decodes Arrow record batch messages from untrusted bytes.

It checks the sizes that a message states before Arrow allocates memory, and validates the result. A
compressed buffer begins with its decompressed size, which Arrow trusts: a message of a few kB can
request any amount of memory (a "zstd bomb"). The message's head, a flatbuffer, says where the buffers
lie. Arrow's Python interface does not expose it, so this module reads the few fields that it needs
(Arrow's format/Message.fbs and FlatBuffers' "internals").
"""

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import zstandard

_RECORD_BATCH = 3  # MessageHeader of Message.fbs
_HEADER_TYPE, _HEADER = 1, 2  # fields of Message
_BUFFERS, _COMPRESSION = 2, 3  # fields of RecordBatch
_NOT_COMPRESSED = -1  # marks a buffer that compression would lengthen
_PREFIX_BYTES = 8
_ZSTD = pa.Codec("zstd")
_SIZE = struct.Struct("<q")
_SIGNED, _UNSIGNED, _SHORT = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")
_PAIR = struct.Struct("<qq")
_DAMAGES = (
    *(struct.error, LookupError, TypeError, NotImplementedError, OSError, EOFError),
    *(zstandard.ZstdError, pa.ArrowException),
)
_of_thread = threading.local()
"""A zstd decompressor per thread; unlike Arrow's, it writes into existing memory."""


def decode_batch(message: bytes, schema: pa.Schema, *, max_bytes: int) -> pa.RecordBatch:
    """Decodes one record batch message.

    Args:
        message: the encapsulated message, from its continuation marker to the end of its body.
        schema: the columns, which the message cannot change.
        max_bytes: the most memory that its buffers may take together.

    Raises:
        ValueError: it is no record batch, states larger buffers, or is inconsistent.
    """
    with _one_kind_of_error():
        total = EncodedBuffers(message).stated_bytes
        if total > max_bytes:
            raise ValueError(f"its buffers ask for {total} bytes, at most {max_bytes} are allowed")
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
        batch.validate(full=True)  # offsets inside their columns, text that is UTF-8
    return batch


@contextmanager
def _one_kind_of_error() -> Iterator[None]:
    try:
        yield
    except _DAMAGES as error:
        raise ValueError(f"it is no record batch ({error})") from error


class EncodedBuffers:
    """Decodes single buffers of a record batch message on demand.

    For a few of many columns it takes half of the time of `decode_batch`.
    """

    def __init__(self, message: bytes):
        """Takes the encapsulated message, from its continuation marker to the end of its body.

        Raises:
            ValueError: it is no record batch message.
        """
        with _one_kind_of_error():
            opened = pa.ipc.read_message(message)
            self._head = _record_batch(memoryview(opened.metadata))
            self._is_compressed = self._head.table(_COMPRESSION) is not None
            self._body = memoryview(opened.body)

    @property
    def stated_bytes(self) -> int:
        """Returns the decoded size of all buffers in bytes, as the message states it.

        Raises:
            ValueError: a buffer lies outside the message.
        """
        with _one_kind_of_error():
            return sum(self._stated_size(self._at(*place)) for place in self._head.pairs(_BUFFERS))

    def decode(self, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns the values of a buffer.

        Raises:
            ValueError: it does not have `count` values.
        """
        values = np.empty(count, dtype=dtype)
        self.decode_into(number, values)
        return values

    def decode_into(self, number: int, array: np.ndarray) -> None:
        """Decodes a buffer into an array.

        Raises:
            ValueError: it does not have the array's size.
        """
        out = array.view(np.uint8)
        with _one_kind_of_error():
            data = self._at(*self._head.pair(_BUFFERS, number))
            size = self._stated_size(data)
            if size != len(out):
                raise ValueError(f"a buffer states {size} bytes, it must have {len(out)}")
            is_prefixed = self._is_compressed and len(data) > 0
            is_zstd = is_prefixed and _SIZE.unpack_from(data)[0] != _NOT_COMPRESSED
            content = data[_PREFIX_BYTES:] if is_prefixed else data
            # a frame that states its size is decoded directly, without a window in between
            if is_zstd and zstandard.frame_content_size(content) == len(out):
                size = _decompressor().stream_reader(content).readinto(out)
                if size != len(out):
                    raise ValueError(f"a buffer ends after {size} of {len(out)} bytes")
            else:
                raw = _ZSTD.decompress(content, len(out)) if is_zstd else content
                out[:] = np.frombuffer(raw, dtype=np.uint8)

    def _at(self, offset: int, length: int) -> memoryview:
        most = len(self._body)
        if not 0 <= offset <= offset + length <= most:
            raise ValueError(f"a buffer lies at {offset} to {offset + length} of {most} bytes")
        return self._body[offset : offset + length]

    def _stated_size(self, data: memoryview) -> int:
        if not self._is_compressed or not len(data):
            return len(data)
        (size,) = _SIZE.unpack_from(data)
        if size == _NOT_COMPRESSED:
            return len(data) - _PREFIX_BYTES
        if size < 0:
            raise ValueError(f"a buffer states {size} bytes")
        return size


def _decompressor() -> zstandard.ZstdDecompressor:
    """Returns this thread's decompressor, which must not be shared."""
    if not hasattr(_of_thread, "zstd"):
        _of_thread.zstd = zstandard.ZstdDecompressor()
    return _of_thread.zstd


def _record_batch(head: memoryview) -> "_Table":
    message = _Table(head, _unsigned(head, 0))
    if message.byte(_HEADER_TYPE) != _RECORD_BATCH:
        raise ValueError("it is no record batch")
    record_batch = message.table(_HEADER)
    if record_batch is None:
        raise ValueError("it has no head")
    return record_batch


class _Table:
    """Reads fields of a flatbuffer's table; reading outside the buffer raises struct.error."""

    def __init__(self, data: memoryview, position: int):
        self._data, self._position = data, position
        (back,) = _SIGNED.unpack_from(data, position)
        self._fields = position - back
        if self._fields < 0:
            raise ValueError("a table's fields lie before the message")
        (self._fields_bytes,) = _SHORT.unpack_from(data, self._fields)

    def _field(self, number: int) -> int | None:
        """Returns a field's position; None if it has its default."""
        slot = 4 + 2 * number
        if slot + 2 > self._fields_bytes:
            return None
        (offset,) = _SHORT.unpack_from(self._data, self._fields + slot)
        return self._position + offset if offset else None

    def byte(self, number: int) -> int:
        position = self._field(number)
        return 0 if position is None else self._data[position]

    def table(self, number: int) -> "_Table | None":
        position = self._field(number)
        if position is None:
            return None
        return _Table(self._data, position + _unsigned(self._data, position))

    def pair(self, number: int, index: int) -> tuple[int, int]:
        """Returns one element of a vector of (int64, int64) structs."""
        start, count = self._vector(number)
        if not 0 <= index < count:
            raise IndexError(f"element {index} of {count}")
        return _PAIR.unpack_from(self._data, start + _PAIR.size * index)

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields the elements of a vector of (int64, int64) structs."""
        start, count = self._vector(number)
        for index in range(count):
            yield _PAIR.unpack_from(self._data, start + _PAIR.size * index)

    def _vector(self, number: int) -> tuple[int, int]:
        """Returns the position of a vector's first element, and the number of elements."""
        position = self._field(number)
        if position is None:
            return 0, 0
        start = position + _unsigned(self._data, position)
        count = _unsigned(self._data, start)
        if count > len(self._data) // _PAIR.size:
            raise ValueError(f"a list of {count} entries in {len(self._data)} bytes")
        return start + 4, count


def _unsigned(data: memoryview, position: int) -> int:
    return _UNSIGNED.unpack_from(data, position)[0]
