"""Decompresses .gz, .zst, .bz2 and .xz files in bounded memory.

A few kB can expand by a factor of 1,000 (gzip) or 30,000 (zstd), so this decompresses small pieces and
yields small pieces; `lines` bounds how much of them is kept. A truncated file is an error, which the
libraries' own readers hide.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

import zstandard

from ..errors import InputError

CHUNK_BYTES = 2**20
"""Bytes read, and yielded, at a time."""

_COMPRESSION_RATIO = 4  # of text, approximately
_MAX_WINDOW_BYTES = 2**31  # `zstd --long=31`, its maximum


@dataclass(frozen=True)
class _Codec:
    """Holds what differs between the kinds of compression."""

    name: str
    part: str  # a file is a sequence of these
    magic: bytes  # matches the beginning of a file, but of no text
    piece_bytes: int  # input per step: it expands to at most 32 MiB (gzip) or 64 MiB (zstd)
    start: Callable[[], Any]


_ZSTD = _Codec(
    *("zstd", "frame", rb"\x28\xb5\x2f\xfd", 2**11),
    lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(),
)
_CODECS = {
    ".gz": _Codec("gzip", "member", rb"\x1f\x8b\x08", 2**15, lambda: zlib.decompressobj(wbits=31)),
    ".zst": _ZSTD,
    ".zstd": _ZSTD,
    # imported on use, since a Python may lack them
    ".bz2": _Codec(
        "bzip2", "stream", rb"BZh[1-9]1AY&SY", 2**10, lambda: import_module("bz2").BZ2Decompressor()
    ),
    ".xz": _Codec(
        *("xz", "stream", rb"\xfd7zXZ\0", 2**12),
        # 1 is FORMAT_XZ: the default also takes zeros for a file
        lambda: import_module("lzma").LZMADecompressor(format=1, memlimit=_MAX_WINDOW_BYTES),
    ),
}
PACKED = tuple(_CODECS)
"""The suffixes of compressed files."""

_WRONG_NAME = "its name is wrong, or it is damaged: look at it with `file`"
# what the libraries' errors mean, by words in them
_MEANINGS = {
    "too much memory": "its window exceeds 2 GiB: compress it again without --long",
    "Memory usage limit": "it needs more than 2 GiB of memory: compress it again with a lower level",
    "Dictionary mismatch": "unpack it with the dictionary that it needs: zstd -d -D DICTIONARY",
    "llocation error": "there is too little free memory: use fewer workers",
    "nsupported": "this version of the library cannot read it: unpack it first",
    "nknown frame descriptor": _WRONG_NAME,
    "incorrect header check": _WRONG_NAME,
    "Invalid data": _WRONG_NAME,
    "not supported": _WRONG_NAME,
    "corruption detected": "it is damaged; fetch it again (if it is whole, it was compressed with a "
    "dictionary: zstd -d -D DICTIONARY)",
}


def is_compressed(name: str) -> bool:
    """Returns whether the name of a file or of a format has a compression suffix."""
    return name.lower().endswith(PACKED)


def check_head(url: str, head: bytes, *, expected: str = "", is_unpacked: bool = False) -> None:
    """Raises an InputError if a file begins as a Git LFS pointer, or as unexpected packed data."""
    if head.startswith(b"version https://git-lfs.github.com/spec/v1"):
        raise InputError(
            f"{url} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
        )
    for suffix, codec in _CODECS.items():
        if codec.name != expected and re.match(codec.magic, head):
            plain = url.removesuffix(next(filter(url.lower().endswith, PACKED), ""))
            remedy = "unpack it" if is_unpacked else f"name it {plain}{suffix} (or decompress it)"
            raise InputError(f"{url} holds {codec.name} data{' inside' * is_unpacked}: {remedy}")


def text_bytes(size: int) -> int:
    """Estimates how much text a compressed file of this size holds."""
    return _COMPRESSION_RATIO * size


def chunks(file: IO[bytes], url: str = "", kind: str = "") -> Iterator[bytes]:
    """Yields the bytes of a file from its current position, unpacked if its kind or URL says so."""
    if is_compressed(kind or url):
        yield from unpacked_chunks(file, url, kind)
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def unpacked_chunks(file: IO[bytes], url: str, kind: str = "") -> Iterator[bytes]:
    """Yields the decompressed bytes of all members, frames or streams of a file.

    Zeros after one of them are padding. `kind` or else `url` ends with the compression's suffix.

    Raises:
        InputError: the file is damaged or truncated, or needs a dictionary or more memory.
    """
    name = (kind or url).lower()
    codec = next(codec for suffix, codec in _CODECS.items() if name.endswith(suffix))
    stream, is_first, pending = codec.start(), True, False
    for piece in _pieces(file, codec.piece_bytes):
        while piece := piece if pending or is_first else piece.lstrip(b"\0"):
            try:
                text = stream.decompress(piece)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                if is_first:
                    check_head(url, piece, expected=codec.name)
                meanings = (text for words, text in _MEANINGS.items() if words in str(error))
                advice = next(meanings, "it is damaged; fetch it again")
                raise InputError(f"{url} is not valid {codec.name} ({error}): {advice}") from error
            for start in range(0, len(text), CHUNK_BYTES):
                yield text[start : start + CHUNK_BYTES]
            pending, piece = not stream.eof, b""
            if stream.eof:
                piece, is_first = stream.unused_data, False
                stream = codec.start()
    if pending:
        raise InputError(
            f"{url} ends in the middle of a {codec.name} {codec.part}: it is truncated; fetch it again"
        )


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks(file):
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
