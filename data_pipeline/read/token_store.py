"""Reading token shards: how one record batch is fetched, checked and decoded alone.

`TokenStore` reads one split of one segment of one source: batch number in, tokens out. The CRC is
compared *before* decoding, because Arrow over zstd returns wrong tokens without a word for 70 % of
single flipped bits. Every size that a file states is compared with what is known already before
memory is taken for it (see `messages`). `shards` says what the files are and writes them.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from ..arrow_messages import EncodedBuffers, decode_batch
from ..errors import ShardError
from ..manifest import DatasetManifest, ShardEntry, Split, read_manifest, shard_name
from ..shards import (
    ARROW_MAGIC_BYTES,
    INDEX_SCHEMA,
    MAX_DOCUMENT_BYTES,
    crc32,
    shard_schema,
)
from ..tokenizers.interface import token_dtype

_BATCH_SLACK_BYTES = 4096  # validity bitmaps, offsets of no document
_INDEX_ROW_BYTES = 64  # 32 in the file, padded
_OPEN_FILES = 128
_KEPT_OF_INDEX = np.dtype([("offset", "<i8"), ("length", "<u4"), ("crc32", "<u4")])
_RESTORE = "restore the file from a copy, or delete the folder and prepare again"


def verify_shard(directory: Path, entry: ShardEntry) -> None:
    """Reads a shard and its index whole and compares both blake2b-256, at about 1 GB/s.

    Raises:
        ShardError: one of them differs.
    """
    for name, expected in ((entry.name, entry.blake2b), (entry.index_name, entry.index_blake2b)):
        path = directory / name
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(
                    file, lambda: hashlib.blake2b(digest_size=32)
                ).hexdigest()
        except OSError as error:
            raise ShardError(f"{path} cannot be read ({error.strerror}): {_RESTORE}") from error
        if found != expected:
            raise ShardError(
                f"{path} has blake2b {found[:12]}…, the manifest says {expected[:12]}…: {_RESTORE}"
            )


@dataclass(frozen=True)
class TokenBatch:
    """Holds the tokens of one record batch and what is known about each of them."""

    tokens: np.ndarray  # uint16 or uint32 [n], ends of documents included
    document_ends: np.ndarray  # int64 [documents]: where each ends, its last token included
    loss_mask: np.ndarray | None  # bool [n]; None: every token is learned


class TokenStore:
    """Reads the token stream of one split of one segment of one source, by record batch.

    Opening checks that every shard is there in its full size and that every index is intact; tokens
    are checked when they are read. Threads may share a store.
    """

    def __init__(
        self,
        directory: str | Path,
        source: str,
        segment: int,
        split: str,
        manifest: DatasetManifest | None = None,
        *,
        check_sizes: bool = True,
    ):
        """Opens segment number `segment` of a source.

        Args:
            directory: the prepared folder.
            source: the source's name.
            segment: its number among the source's segments.
            split: "train" or "validation".
            manifest: the folder's manifest, if it has been read.
            check_sizes: whether a missing or truncated shard is refused now, and not where its
                batches are read.

        Raises:
            ShardError: there is no such source or segment yet, or its files are damaged.
        """
        self.directory = Path(directory)
        self.manifest = manifest or read_manifest(directory)
        self.source, self.segment, self.split = self.manifest.source(source), segment, split
        segments = self.manifest.segments(source)
        if not 0 <= segment < len(segments):
            raise ShardError(
                f"{self.directory} has {len(segments)} segments of source {source!r}, none of number {segment}"
            )
        self._sealed = segments[segment]
        entries = self.entries
        self._shard_numbers = np.array([entry.number for entry in entries], dtype=np.int64)
        self._schema, self._buffers = _schema_of(
            self.manifest.vocab_size, self.source.has_loss_mask, self.source.has_record_id
        )
        self._opened = lru_cache(_OPEN_FILES)(_Handle)
        for entry in entries if check_sizes else ():
            _check_size(self.directory / entry.name, entry.num_bytes)
        self.token_dtype = token_dtype(self.manifest.vocab_size)
        indices = [self._read_index(entry) for entry in entries]
        whole = {name: _joined([one[name] for one in indices]) for name in INDEX_SCHEMA.names}
        # What is kept of a record batch takes 32 bytes, for as long as the store is open.
        self._index = np.empty(len(whole["offset"]), dtype=_KEPT_OF_INDEX)
        for name in ("offset", "length", "crc32"):
            self._index[name] = whole[name]
        self._first_batches = np.cumsum([0, *(len(one["offset"]) for one in indices)])
        self.batch_starts = np.concatenate([[0], np.cumsum(whole["n_tokens"])])
        """int64 [num_batches + 1]: batch b begins with token batch_starts[b] of the stream."""
        self.document_starts = np.concatenate([[0], np.cumsum(whole["n_docs"])])
        """int64 [num_batches + 1]: batch b begins with document document_starts[b]."""

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        """Returns the shards, in the order of the token stream; made anew at every call."""
        return self._sealed.of(self.split)

    @property
    def num_batches(self) -> int:
        """Returns the number of record batches."""
        return len(self.batch_starts) - 1

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens, ends of documents included."""
        return int(self.batch_starts[-1])

    def read(
        self, batch: int, into: np.ndarray | None = None, *, in_full: bool = True
    ) -> TokenBatch:
        """Returns the tokens of one record batch with their documents' ends and loss mask.

        Args:
            batch: its number.
            into: takes the tokens; None: memory is taken for them.
            in_full: whether ends and mask are wanted; else no ends and no mask are given.

        Raises:
            ShardError: its bytes are not those that were written.
        """
        message = self._fetch(batch)
        num_tokens, num_documents = self._counts(batch)
        tokens = np.empty(num_tokens, dtype=self.token_dtype) if into is None else into
        ends, mask = np.zeros(0, dtype=np.int64), None
        try:
            encoded = EncodedBuffers(message)
            encoded.decode_into(self._buffers["tokens"], tokens)
            _check_tokens(tokens, self.manifest.vocab_size)
            if in_full:
                offsets = encoded.decode(self._buffers["ends"], num_documents + 1, np.dtype("<i4"))
                ends = _document_ends(offsets, num_tokens)
            if in_full and self.source.has_loss_mask:
                bits = encoded.decode(self._buffers["mask"], -(-num_tokens // 8), np.dtype("u1"))
                mask = np.unpackbits(bits, count=num_tokens, bitorder="little").view(bool)
        except ValueError as error:  # intact bytes of another format, or made to do harm
            raise ShardError(
                f"{self._place_of(batch)}: cannot be decoded ({error}); {_RESTORE}"
            ) from error
        return TokenBatch(tokens, ends, mask)

    def document_ends(self, batch: int) -> np.ndarray:
        """Returns where each document of a record batch ends, int64: after its last token."""
        return self.read(batch).document_ends

    def _counts(self, batch: int) -> tuple[int, int]:
        """Returns how many tokens and documents the index says that a batch has."""
        tokens, documents = (
            int(starts[batch + 1] - starts[batch])
            for starts in (self.batch_starts, self.document_starts)
        )
        return tokens, documents

    def close(self) -> None:
        """Closes the shards' files; reading opens them again."""
        self._opened.cache_clear()

    def _fetch(self, batch: int) -> bytes:
        """Returns the bytes of a record batch as they were written."""
        offset, length = int(self._index["offset"][batch]), int(self._index["length"][batch])
        try:
            handle = self._opened(self._path_of(batch))
            message = os.pread(handle.number, length, offset)
        except OSError as error:
            raise ShardError(
                f"{self._place_of(batch)}: cannot be read ({error.strerror}); {_RESTORE}"
            ) from error
        if len(message) != length:
            raise ShardError(
                f"{self._place_of(batch)}: the file ends after {len(message)} of {length} bytes; "
                f"{_RESTORE}"
            )
        expected = int(self._index["crc32"][batch])
        if (found := crc32(message)) != expected:
            raise ShardError(
                f"{self._place_of(batch)}: CRC32 is {found:08x}, the index says {expected:08x}; "
                f"{_RESTORE}"
            )
        return message

    def _place_of_shard(self, batch: int) -> int:
        """Returns which of the segment's shards of this split a record batch lies in."""
        return int(np.searchsorted(self._first_batches, batch, side="right")) - 1

    def _path_of(self, batch: int) -> str:
        number = int(self._shard_numbers[self._place_of_shard(batch)])
        name = shard_name(self.source.name, cast("Split", self.split), number)
        return f"{self.directory}/{name}"

    def _place_of(self, batch: int) -> str:
        """Says where a record batch lies."""
        offset, length = int(self._index["offset"][batch]), int(self._index["length"][batch])
        local_batch = batch - int(self._first_batches[self._place_of_shard(batch)])
        return f"{self._path_of(batch)}, record batch {local_batch} (bytes {offset} to {offset + length})"

    def _read_index(self, entry: ShardEntry) -> dict[str, np.ndarray]:
        path = self.directory / entry.index_name
        most = _INDEX_ROW_BYTES * entry.num_batches + _BATCH_SLACK_BYTES
        data = _read_at_most(path, most)
        if hashlib.blake2b(data, digest_size=32).hexdigest() != entry.index_blake2b:
            raise ShardError(
                f"{path} is damaged (its blake2b differs from the manifest's): {_RESTORE}"
            )
        try:
            index = _decode_index(data, most)
            _check_index(index, entry, self.manifest.batch_tokens + MAX_DOCUMENT_BYTES + 1)
        except (ValueError, OSError) as error:
            raise ShardError(f"{path} does not fit its shard ({error}): {_RESTORE}") from error
        return index


class _Handle:
    """Is an open file that closes when its last reader has let go of it."""

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=16)
def _schema_of(
    vocab_size: int, has_loss_mask: bool, has_record_id: bool
) -> tuple[pa.Schema, dict[str, int]]:
    """Returns the columns of shards, the same objects for all stores, and `_buffer_numbers`."""
    schema = shard_schema(vocab_size, has_loss_mask=has_loss_mask, has_record_id=has_record_id)
    return schema, _buffer_numbers(schema)


def _buffer_numbers(schema: pa.Schema) -> dict[str, int]:
    """Returns which buffers of a record batch hold the tokens, their offsets and their loss mask.

    A list has two buffers (validity, offsets) and those of its elements.
    """
    before, number = {}, 0
    for field in schema:
        before[field.name] = number
        if pa.types.is_list(field.type):
            number += 4
        else:
            number += 3 if pa.types.is_string(field.type) else 2
    numbers = {"ends": before["tokens"] + 1, "tokens": before["tokens"] + 3}
    return numbers | ({"mask": before["loss_mask"] + 3} if "loss_mask" in before else {})


def _document_ends(offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    ends = offsets.astype(np.int64)
    if ends[0] != 0 or ends[-1] != num_tokens or (np.diff(ends) < 0).any():
        raise ValueError("the documents' ends are out of order")
    return ends[1:]


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise ValueError(f"token {largest} of a vocabulary of {vocab_size}")


def read_batches(
    path: Path, index_path: Path, schema: pa.Schema, batches: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Reads some record batches of a shard that no manifest names, such as one of a preparation.

    Raises:
        ShardError: its bytes are not those that were written.
    """
    try:
        data = index_path.read_bytes()
        index = _decode_index(data, _INDEX_ROW_BYTES * len(data))
        with open(path, "rb") as file:
            for batch in batches:
                message = os.pread(
                    file.fileno(), int(index["length"][batch]), int(index["offset"][batch])
                )
                if crc32(message) != int(index["crc32"][batch]):
                    raise ValueError(f"record batch {batch} has another CRC32")
                yield decode_batch(message, schema, max_bytes=2**40)
    except (OSError, ValueError) as error:
        raise ShardError(
            f"{path} is damaged ({error}): delete the folder and prepare again"
        ) from error


def _check_size(path: Path, expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path} is missing ({error.strerror}): {_RESTORE}") from error
    if found != expected:
        raise ShardError(
            f"{path} has {found} bytes, the manifest says {expected}: truncated or replaced; "
            f"{_RESTORE}"
        )


def _read_at_most(path: Path, num_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            # what was asked for is taken at once, and a damaged manifest may ask for anything
            data = file.read(min(num_bytes, os.fstat(file.fileno()).st_size) + 1)
    except OSError as error:
        raise ShardError(f"{path} is missing ({error.strerror}): {_RESTORE}") from error
    if len(data) > num_bytes:
        raise ShardError(f"{path} is damaged (more than {num_bytes} bytes): {_RESTORE}")
    return data


def _decode_index(data: bytes, max_bytes: int) -> dict[str, np.ndarray]:
    """Reads an index without trusting its footer: a schema, which is known, and one batch."""
    stream = pa.BufferReader(data)
    stream.seek(ARROW_MAGIC_BYTES)
    pa.ipc.read_message(stream)
    batch = decode_batch(data[stream.tell() :], INDEX_SCHEMA, max_bytes=max_bytes)
    if any(column.null_count for column in batch.columns):
        raise ValueError("values are missing")
    # (to_numpy would import pandas: half a second)
    columns = {name: np.from_dlpack(batch.column(name)) for name in INDEX_SCHEMA.names}
    if any(int(column.max(initial=0)) >= 2**53 for column in columns.values()):
        raise ValueError("values are impossible")
    return {name: column.astype(np.int64) for name, column in columns.items()}


def _check_index(index: dict[str, np.ndarray], entry: ShardEntry, max_batch_tokens: int) -> None:
    """Checks that an index fits what the manifest says about its shard."""
    if int(index["length"].max(initial=0)) >= 2**32:
        raise ValueError("a batch has 4 GiB or more")
    if int(index["n_tokens"].max(initial=0)) > max_batch_tokens:
        raise ValueError(f"a batch has more than {max_batch_tokens} tokens")
    if (index["n_docs"] > index["n_tokens"]).any():
        raise ValueError("a batch has more documents than tokens")
    totals = tuple(int(index[name].sum()) for name in ("n_tokens", "n_docs"))
    if (len(index["offset"]), *totals) != (
        entry.num_batches,
        entry.num_tokens,
        entry.num_documents,
    ):
        raise ValueError(
            f"{len(index['offset'])} batches, {totals[0]} tokens, {totals[1]} documents"
        )
    ends = index["offset"] + index["length"]
    if (index["offset"][1:] < ends[:-1]).any() or (ends > entry.num_bytes).any():
        raise ValueError("batches overlap or lie outside of the file")


def _joined(columns: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
