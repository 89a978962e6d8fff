"""Decompresses .gz and .zst streams in bounded memory.

A few kB can expand by a factor of 1,000 (gzip) or 30,000 (zstd), so this decompresses small pieces and
yields small pieces; `lines` bounds how much of them is kept. A truncated file is an error, which the
libraries' own readers hide.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from ..errors import InputError

CHUNK_BYTES = 2**20
"""Bytes read, and yielded, at a time."""

_COMPRESSION_RATIO = 4  # of text, approximately


@dataclass(frozen=True)
class _Codec:
    """Holds what differs between gzip and zstd."""

    name: str
    part: str  # a file is a sequence of these
    piece_bytes: int  # input per step: it expands to at most 32 MiB (gzip) or 64 MiB (zstd)
    start: Callable[[], Any]


_CODECS = {
    ".gz": _Codec("gzip", "member", 2**15, lambda: zlib.decompressobj(wbits=31)),
    ".zst": _Codec("zstd", "frame", 2**11, lambda: zstandard.ZstdDecompressor().decompressobj()),
}


def is_compressed(url: str) -> bool:
    """Returns whether a file's name has a compression suffix."""
    return url.endswith(tuple(_CODECS))


def text_bytes(size: int) -> int:
    """Estimates how much text a compressed file of this size holds."""
    return _COMPRESSION_RATIO * size


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the bytes of a file from its current position."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def unpacked_chunks(file: IO[bytes], url: str) -> Iterator[bytes]:
    """Yields the decompressed bytes of all zstd frames or gzip members of a file.

    Raises:
        InputError: the file is damaged or truncated.
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
                    f"{url} is not valid {codec.name} ({error}): it is damaged; fetch it again"
                ) from error
            for start in range(0, len(text), CHUNK_BYTES):
                yield text[start : start + CHUNK_BYTES]
            pending, piece = not stream.eof, b""
            if stream.eof:
                piece = stream.unused_data
                stream = codec.start()
    if pending:
        raise InputError(
            f"{url} ends in the middle of a {codec.name} {codec.part}: it is truncated; fetch it again"
        )


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks(file):
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
