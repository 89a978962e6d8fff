"""Reads token shards, Arrow IPC files of whole documents, by record batch.

    tokens      list<uint16>, or uint32 above 65536 ids; the last token ends the document
    doc_id      blake2b-128 of the normalised text
    n_bytes     UTF-8 bytes of the text, for bits per byte
    source      the document's origin
    source_row  its record in the input split
    loss_mask   list<bool>, if the source has prompts: which tokens are learned
    record_id   string, if the source has an id_field: the record's own id

Format, token width and source fix the schema, so a batch can be read from any copy by its (offset,
length) alone; the footer serves other tools. Files are 2.9 times smaller than uint16 in memory, and are
read at about 300-400 M tokens/s/core.

`TokenStore` compares the CRC *before* it decodes, because Arrow over zstd silently returns wrong tokens
for 70 % of single flipped bits.
"""

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..data_config import MAX_DOCUMENT_BYTES
from ..errors import ShardError
from ..files import read_regular
from ..manifest import DatasetManifest, ShardEntry, read_manifest

try:  # 25 GB/s on one core, where Python's own zlib makes 1 to 4; both give the same number
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

ARROW_MAGIC_BYTES = 8
"""The magic "ARROW1" and its padding, before the schema message."""

INDEX_SCHEMA = pa.schema(
    [
        ("offset", pa.uint64()),
        ("length", pa.uint64()),
        ("n_tokens", pa.uint64()),
        ("n_docs", pa.uint32()),
        ("crc32", pa.uint32()),
    ]
)
_INDEX_ROW_BYTES = 64  # 32 in the file, padded
_INDEX_SLACK_BYTES = 4096
_RESTORE = "restore the file from a copy, or delete the folder and prepare again"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of token ids: uint16 if it suffices, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def shard_schema(
    vocab_size: int,
    metadata: dict[str, str] | None = None,
    *,
    has_loss_mask: bool = False,
    has_record_id: bool = False,
) -> pa.Schema:
    """Returns the schema of a shard; decoding a batch does not need `metadata`."""
    columns: list[tuple[str, pa.DataType]] = [
        ("tokens", pa.list_(pa.from_numpy_dtype(token_dtype(vocab_size)))),
        ("doc_id", pa.binary(16)),
        ("n_bytes", pa.uint32()),
        ("source", pa.string()),
        ("source_row", pa.uint64()),
    ]
    if has_loss_mask:
        columns.append(("loss_mask", pa.list_(pa.bool_())))
    if has_record_id:
        columns.append(("record_id", pa.string()))
    return pa.schema(columns, metadata=metadata)


def verify_shard(directory: Path, entry: ShardEntry) -> None:
    """Checks the blake2b-256 of a whole shard and its index, at about 1 GB/s.

    Raises:
        ShardError: a hash differs, or a file cannot be read.
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
    """Holds the tokens of one record batch, their documents and their loss mask."""

    tokens: np.ndarray  # uint16 or uint32 [n], ends of documents included
    document_ends: np.ndarray  # int64 [documents]: exclusive ends
    loss_mask: np.ndarray | None  # bool [n]; None: every token is learned


class TokenStore:
    """Reads the token stream of one split of one segment of one source, by record batch.

    Opening checks the size of every shard and the hash of every index; reading checks tokens. Threads
    may share a store.
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
            manifest: the folder's manifest, if already read.
            check_sizes: whether to refuse missing or truncated shards now instead of in `read`.

        Raises:
            ShardError: the source or segment does not exist yet, or its files are damaged.
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
        self._schema = shard_schema(
            self.manifest.header.tokenizer.vocab_size,
            has_loss_mask=self.source.has_loss_mask,
            has_record_id=self.source.has_record_id,
        )
        self._columns = ["tokens", *["loss_mask"] * self.source.has_loss_mask]
        for entry in entries if check_sizes else ():
            self._check_size(entry)
        indices = [self._read_index(entry) for entry in entries]
        none = np.zeros(0, dtype=np.int64)  # of a split without shards
        whole = {
            name: np.concatenate([none, *(one[name] for one in indices)])
            for name in INDEX_SCHEMA.names
        }
        self._index = {name: whole[name] for name in ("offset", "length", "crc32")}
        self._paths = [self.directory / entry.name for entry in entries]
        self._first_batches = np.cumsum([0, *(len(one["offset"]) for one in indices)])
        self.batch_starts = np.concatenate([[0], np.cumsum(whole["n_tokens"])])
        """int64 [num_batches + 1]: batch b begins with token batch_starts[b] of the stream."""
        self.document_starts = np.concatenate([[0], np.cumsum(whole["n_docs"])])
        """int64 [num_batches + 1]: batch b begins with document document_starts[b]."""

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        """Returns the shards, in the order of the token stream; unpacks them at every call."""
        return self._sealed.of(self.split)

    @property
    def num_batches(self) -> int:
        """Returns the number of record batches."""
        return len(self.batch_starts) - 1

    def read(self, batch: int) -> TokenBatch:
        """Returns the tokens of one record batch with their documents' ends and loss mask.

        Raises:
            ShardError: its bytes are damaged.
        """
        message = self._fetch(batch)
        try:
            lists = decode_batch(message, self._schema, self._columns).columns
            return self._checked(batch, *lists)
        except ValueError as error:  # intact bytes of another format, or crafted ones
            raise self._damaged(batch, f"cannot be decoded ({error})") from error

    def _checked(self, batch: int, lists: Any, masks: Any = None) -> TokenBatch:
        """Returns a decoded batch; raises ValueError if it contradicts the index or the header."""
        num_tokens, num_documents = (
            int(starts[batch + 1] - starts[batch])
            for starts in (self.batch_starts, self.document_starts)
        )
        found = [one for one in (lists, masks) if one is not None]
        if any(one.null_count or one.values.null_count for one in found):
            raise ValueError("values are missing")
        if (len(lists), *(len(one.values) for one in found)) != (
            num_documents,
            *[num_tokens] * len(found),
        ):
            raise ValueError(f"not {num_documents} documents of {num_tokens} tokens")
        ends = np.from_dlpack(lists.offsets).astype(np.int64)
        if ends[0] != 0 or ends[-1] != num_tokens:
            raise ValueError("the documents' ends are out of order")
        tokens = np.from_dlpack(lists.values)
        vocab_size = self.manifest.header.tokenizer.vocab_size
        if (largest := int(tokens.max(initial=0))) >= vocab_size:
            raise ValueError(f"token {largest} of a vocabulary of {vocab_size}")
        return TokenBatch(tokens, ends[1:], None if masks is None else bools_of(masks.values))

    def _fetch(self, batch: int) -> bytes:
        """Returns the bytes of a record batch after checking their CRC."""
        offset, length = int(self._index["offset"][batch]), int(self._index["length"][batch])
        try:
            with open(self._paths[self._shard_of(batch)], "rb") as file:
                message = os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise self._damaged(batch, f"cannot be read ({error.strerror})") from error
        if len(message) != length:
            raise self._damaged(batch, f"the file ends after {len(message)} of {length} bytes")
        expected = int(self._index["crc32"][batch])
        if (found := crc32(message)) != expected:
            words = f"CRC32 is {found:08x}, the index says {expected:08x}"
            raise self._damaged(batch, words)
        return message

    def _shard_of(self, batch: int) -> int:
        """Returns the number, among this split's shards, of a record batch's shard."""
        return int(np.searchsorted(self._first_batches, batch, side="right")) - 1

    def _damaged(self, batch: int, words: str) -> ShardError:
        """Returns an error about a record batch that names its file, number and bytes."""
        shard = self._shard_of(batch)
        offset, length = int(self._index["offset"][batch]), int(self._index["length"][batch])
        local_batch = batch - int(self._first_batches[shard])
        return ShardError(
            f"{self._paths[shard]}, record batch {local_batch} (bytes {offset} to {offset + length}): "
            f"{words}; {_RESTORE}"
        )

    def _check_size(self, entry: ShardEntry) -> None:
        path = self.directory / entry.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ShardError(f"{path} is missing ({error.strerror}): {_RESTORE}") from error
        if found != entry.num_bytes:
            raise ShardError(
                f"{path} has {found} bytes, the manifest says {entry.num_bytes}: truncated or "
                f"replaced; {_RESTORE}"
            )

    def _read_index(self, entry: ShardEntry) -> dict[str, np.ndarray]:
        path = self.directory / entry.index_name
        most = _INDEX_ROW_BYTES * entry.num_batches + _INDEX_SLACK_BYTES
        try:
            data = read_regular(path, max_bytes=most)
        except OSError as error:
            fault = "is missing" if error.errno == errno.ENOENT else "is damaged"
            raise ShardError(f"{path} {fault} ({error.strerror}): {_RESTORE}") from error
        if hashlib.blake2b(data, digest_size=32).hexdigest() != entry.index_blake2b:
            raise ShardError(
                f"{path} is damaged (its blake2b differs from the manifest's): {_RESTORE}"
            )
        try:
            index = decode_index(data)
            _check_index(index, entry, self.manifest.header.batch_tokens + MAX_DOCUMENT_BYTES + 1)
        except ValueError as error:
            raise ShardError(f"{path} does not fit its shard ({error}): {_RESTORE}") from error
        return index


def decode_batch(
    message: bytes, schema: pa.Schema, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Decodes chosen columns, or all, of a record batch message whose checksum is right.

    Raises:
        ValueError: it is no record batch of this schema.
    """
    fields = [schema.get_field_index(name) for name in columns or ()]
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields or None)
    try:
        stream = pa.ipc.open_stream(schema.serialize().to_pybytes() + message, options=options)
        batch = stream.read_next_batch()
        batch.validate(full=True)  # offsets inside their columns, text that is UTF-8
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ValueError(f"it is no record batch ({error})") from error
    return batch


def bools_of(column: pa.BooleanArray) -> np.ndarray:
    """Returns the booleans of a column, without pandas, which `to_numpy` would import."""
    return np.from_dlpack(column.cast(pa.uint8())).view(bool)


def decode_index(data: bytes) -> dict[str, np.ndarray]:
    """Decodes the bytes of an index.

    Raises:
        ValueError: they are no index.
    """
    try:
        table = pa.ipc.open_file(data).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"it is no index ({error})") from error
    if table.schema != INDEX_SCHEMA or any(column.null_count for column in table.columns):
        raise ValueError("columns or values are missing")
    # `to_numpy` would import pandas, which takes half a second
    columns = {name: np.from_dlpack(table[name].combine_chunks()) for name in table.column_names}
    if any(int(column.max(initial=0)) >= 2**53 for column in columns.values()):
        raise ValueError("values are impossible")
    return {name: column.astype(np.int64) for name, column in columns.items()}


def _check_index(index: dict[str, np.ndarray], entry: ShardEntry, max_batch_tokens: int) -> None:
    """Raises ValueError if an index contradicts the manifest's entry of its shard."""
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
        raise ValueError("batches overlap or lie outside the file")
