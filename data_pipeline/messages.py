"""Arrow record batch messages from untrusted bytes: what a message says it will become is checked
before Arrow takes memory for it, and what it became before anybody reads it.

A compressed buffer begins with its size after decompression, which Arrow believes: a message of a
few kB can ask for any amount of memory (a "zstd bomb"). Where the buffers lie is said in the
message's head, a flatbuffer that Arrow's Python interface does not show; the few fields that are
needed are read here (format/Message.fbs and Flatbuffers' "internals" of the two projects).
"""

import struct
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import zstandard

_RECORD_BATCH = 3  # MessageHeader of Message.fbs
_HEADER_TYPE, _HEADER = 1, 2  # fields of Message
_BUFFERS, _COMPRESSION = 2, 3  # fields of RecordBatch
_NOT_COMPRESSED = -1  # a buffer that compression would have made longer
_PREFIX_BYTES = 8
_ZSTD = pa.Codec("zstd")
_of_thread = threading.local()
"""A zstd decompressor per thread: it can write into memory that is there already, Arrow's cannot."""


def decode_batch(message: bytes, schema: pa.Schema, *, max_bytes: int) -> pa.RecordBatch:
    """Decodes one record batch message.

    Args:
        message: the encapsulated message, from its continuation marker to the end of its body.
        schema: the columns; nothing of the message can change them.
        max_bytes: what its buffers may take in memory, all together.

    Raises:
        ValueError: it is no such message, states larger buffers, or is not consistent in itself.
    """
    try:
        opened = pa.ipc.read_message(message)
        total = sum(_stated_sizes(memoryview(opened.metadata), memoryview(opened.body)))
        if total > max_bytes:
            raise ValueError(f"its buffers ask for {total} bytes, at most {max_bytes} are possible")
        batch = pa.ipc.read_record_batch(opened, schema)
        batch.validate(full=True)  # offsets inside their columns, text that is UTF-8
    except (struct.error, IndexError, TypeError, OSError, EOFError) as error:
        raise ValueError(f"it is no record batch ({error})") from error
    return batch


def decode_buffers(
    message: bytes, sizes: Mapping[int, int], into: Mapping[int, np.ndarray] | None = None
) -> dict[int, pa.Buffer]:
    """Decodes single buffers of a record batch message, and nothing else of it.

    For a few columns of many it takes half of the time of `decode_batch`.

    Args:
        message: the encapsulated message, from its continuation marker to the end of its body.
        sizes: the number of each buffer that is wanted, and the bytes that it must have.
        into: arrays of just so many bytes, by the numbers of buffers that are decoded into them
            instead of being returned; what they hold after an error is not defined.

    Raises:
        ValueError: it is no such message, or a buffer has another size.
    """
    try:
        opened = pa.ipc.read_message(message)
        record_batch = _record_batch(memoryview(opened.metadata))
        is_compressed = record_batch.table(_COMPRESSION) is not None
        places = list(record_batch.pairs(_BUFFERS))
        found: dict[int, pa.Buffer] = {}
        for number, size in sizes.items():
            data, is_zstd = _located(opened.body, places[number], is_compressed, size)
            if into is not None and number in into:
                _decode_into(into[number], data, is_zstd)
            else:
                found[number] = _ZSTD.decompress(data, size) if is_zstd else data
        return found
    except (struct.error, IndexError, TypeError, OSError, EOFError, zstandard.ZstdError) as error:
        raise ValueError(f"it is no record batch ({error})") from error


def _located(
    body: pa.Buffer, place: tuple[int, int], is_compressed: bool, expected: int
) -> tuple[pa.Buffer, bool]:
    """Returns the bytes of a buffer, and whether they are to be decompressed."""
    offset, length = place
    if not 0 <= offset <= offset + length <= len(body):
        raise ValueError(f"a buffer lies at {offset} to {offset + length} of {len(body)} bytes")
    data = body.slice(offset, length)
    size = _stated_size(memoryview(data), is_compressed)
    if size != expected:
        raise ValueError(f"a buffer states {size} bytes, it must have {expected}")
    if not is_compressed or not length:
        return data, False
    (stated,) = struct.unpack_from("<q", data)
    return data.slice(_PREFIX_BYTES), stated != _NOT_COMPRESSED


def _decode_into(array: np.ndarray, data: pa.Buffer, is_zstd: bool) -> None:
    """Decodes a buffer into an array of its size."""
    out = array.view(np.uint8)
    # A frame that states its size is decoded in one go, without a window in between.
    if is_zstd and zstandard.frame_content_size(data) == len(out):
        if not hasattr(_of_thread, "zstd"):
            _of_thread.zstd = zstandard.ZstdDecompressor()
        size = _of_thread.zstd.stream_reader(data).readinto(out)
        if size != len(out):
            raise ValueError(f"a buffer ends after {size} of {len(out)} bytes")
    else:
        raw = _ZSTD.decompress(data, len(out)) if is_zstd else data
        out[:] = np.frombuffer(raw, dtype=np.uint8)


def _record_batch(head: memoryview) -> "_Table":
    message = _Table(head, _unsigned(head, 0))
    if message.byte(_HEADER_TYPE) != _RECORD_BATCH:
        raise ValueError("it is no record batch")
    record_batch = message.table(_HEADER)
    if record_batch is None:
        raise ValueError("it has no head")
    return record_batch


def _stated_sizes(head: memoryview, body: memoryview) -> Iterator[int]:
    """Yields the size in memory of every buffer of a record batch message."""
    record_batch = _record_batch(head)
    is_compressed = record_batch.table(_COMPRESSION) is not None
    for offset, length in record_batch.pairs(_BUFFERS):
        if not 0 <= offset <= offset + length <= len(body):
            raise ValueError(f"a buffer lies at {offset} to {offset + length} of {len(body)} bytes")
        yield _stated_size(body[offset : offset + length], is_compressed)


def _stated_size(data: memoryview, is_compressed: bool) -> int:
    if not is_compressed or not len(data):
        return len(data)
    (size,) = struct.unpack_from("<q", data)
    if size == _NOT_COMPRESSED:
        return len(data) - _PREFIX_BYTES
    if size < 0:
        raise ValueError(f"a buffer states {size} bytes")
    return size


class _Table:
    """Reads fields of a flatbuffer's table; reading outside of the buffer is a struct.error."""

    def __init__(self, data: memoryview, position: int):
        self._data, self._position = data, position
        (back,) = struct.unpack_from("<i", data, position)
        self._fields = position - back
        if self._fields < 0:
            raise ValueError("a table's fields lie before the message")
        (self._fields_bytes,) = struct.unpack_from("<H", data, self._fields)

    def _field(self, number: int) -> int | None:
        """Returns where a field lies; None: it has its default."""
        slot = 4 + 2 * number
        if slot + 2 > self._fields_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._fields + slot)
        return self._position + offset if offset else None

    def byte(self, number: int) -> int:
        position = self._field(number)
        return 0 if position is None else self._data[position]

    def table(self, number: int) -> "_Table | None":
        position = self._field(number)
        if position is None:
            return None
        return _Table(self._data, position + _unsigned(self._data, position))

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields the elements of a vector of structs of two int64."""
        position = self._field(number)
        if position is None:
            return
        start = position + _unsigned(self._data, position)
        count = _unsigned(self._data, start)
        if count > len(self._data) // 16:
            raise ValueError(f"a list of {count} entries in {len(self._data)} bytes")
        values = struct.unpack_from(f"<{2 * count}q", self._data, start + 4)
        yield from zip(values[::2], values[1::2], strict=True)


def _unsigned(data: memoryview, position: int) -> int:
    return struct.unpack_from("<I", data, position)[0]
