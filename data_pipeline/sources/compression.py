"""Unpacks .gz and .zst while they are read, in memory that no file can make large.

A few kB of either can unpack to any size: 1,000 times as much for gzip, 30,000 times for zstd. So
bytes are unpacked from small pieces and handed on in small pieces; `lines` bounds what is kept of
them. A file that ends too early is an error, which the libraries' own readers hide.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from ..errors import InputError

CHUNK_BYTES = 2**20
"""Bytes that are read, and handed on, at a time."""

_COMPRESSION_RATIO = 4  # of text, about


@dataclass(frozen=True)
class _Codec:
    """Holds what differs between the two."""

    name: str
    part: str  # what a file is a sequence of
    piece_bytes: int  # that are unpacked at a time: to 32 MiB of gzip, 64 MiB of zstd at the most
    start: Callable[[], Any]


_CODECS = {
    ".gz": _Codec("gzip", "member", 2**15, lambda: zlib.decompressobj(wbits=31)),
    ".zst": _Codec("zstd", "frame", 2**11, lambda: zstandard.ZstdDecompressor().decompressobj()),
}


def is_compressed(url: str) -> bool:
    """Returns whether a file's name says that it is compressed."""
    return url.endswith(tuple(_CODECS))


def text_bytes(size: int) -> int:
    """Estimates how much text a compressed file of this size holds."""
    return _COMPRESSION_RATIO * size


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the bytes of a file from where it stands."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def unpacked_chunks(file: IO[bytes], url: str) -> Iterator[bytes]:
    """Yields the bytes of all zstd frames or gzip members of a file, one after the other.

    Raises:
        InputError: it is damaged or truncated.
    """
    codec = next(codec for suffix, codec in _CODECS.items() if url.endswith(suffix))
    stream = codec.start()
    pending = False
    for piece in _pieces(file, codec.piece_bytes):
        while piece:
            try:
                text = stream.decompress(piece)
            except (zstandard.ZstdError, zlib.error) as error:
                raise InputError(
                    f"{url} is not valid {codec.name} ({error}): it is damaged, fetch it again"
                ) from error
            for start in range(0, len(text), CHUNK_BYTES):
                yield text[start : start + CHUNK_BYTES]
            pending, piece = not stream.eof, b""
            if stream.eof:
                piece = stream.unused_data
                stream = codec.start()
    if pending:
        raise InputError(
            f"{url} ends in the middle of a {codec.name} {codec.part}: it is truncated, fetch it "
            "again"
        )


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks(file):
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
