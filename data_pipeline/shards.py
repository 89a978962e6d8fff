"""Writes token shards and their indices.

`ShardWriter` collects documents into record batches of about `batch_tokens` tokens. It writes
`*.tok.arrow` (zstd level 3, at about 150 M tokens/s/core) and `*.idx.arrow`, which holds offset,
length, counts and CRC32 of every compressed batch message. `read.token_store` describes and reads them.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from .data_config import FORMAT_VERSION
from .manifest import ShardEntry, Split
from .prepare_config import MAX_LABEL_BYTES
from .read.token_store import ARROW_MAGIC_BYTES, INDEX_SCHEMA, crc32
from .tokenizers.interface import Tokenizer


def shard_metadata(tokenizer: Tokenizer, label: str) -> dict[str, str]:
    """Returns a shard's metadata, without path or time, so that the same documents give the same bytes."""
    return {
        "moebius.format_version": str(FORMAT_VERSION),
        "moebius.tokenizer_sha256": tokenizer.sha256,
        "moebius.vocab_size": str(tokenizer.vocab_size),
        "moebius.end_of_document": f"id {tokenizer.end_of_document_id} after every document",
        "moebius.source": label,
    }


@dataclass(frozen=True)
class TokenDocument:
    """Holds one document for a shard."""

    tokens: np.ndarray  # with the end of document
    doc_id: bytes
    num_text_bytes: int
    source: str
    source_row: int
    num_prompt_tokens: int = 0  # leading tokens that are not learned
    record_id: str = ""


class ShardWriter:
    """Writes documents into one shard file.

    A record batch ends with the document that fills it to `batch_tokens`, however long that is. The
    caller owns the file, so that a shard appears atomically (`atomic.atomic_write`).
    """

    def __init__(self, file: IO[bytes], *, schema: pa.Schema, batch_tokens: int):
        self._file, self._schema, self._batch_tokens = file, schema, batch_tokens
        self._pending: list[TokenDocument] = []
        self._pending_tokens = self._num_text_bytes = 0
        self._index: list[tuple[int, ...]] = []
        self._num_bytes = 0
        self._blake2b = hashlib.blake2b(digest_size=32)
        self._captured = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 3), use_threads=False)
        self._arrow = pa.ipc.new_file(
            pa.PythonFile(self._captured, mode="w"), schema, options=options
        )

    def add(self, document: TokenDocument) -> None:
        """Adds a document; writes a record batch once it has `batch_tokens` tokens."""
        self._pending.append(document)
        self._pending_tokens += len(document.tokens)
        self._num_text_bytes += document.num_text_bytes
        if self._pending_tokens >= self._batch_tokens:
            self._write_batch()

    @property
    def num_batches(self) -> int:
        """Returns the number of record batches written."""
        return len(self._index)

    def end_batch(self) -> None:
        """Writes the pending documents as a record batch of any size."""
        if self._pending:
            self._write_batch()

    def close_index(self, index_file: IO[bytes]) -> str:
        """Writes pending documents, the footer and the index; returns the index's blake2b."""
        self.end_batch()
        self._arrow.close()
        self._write(self._taken())
        return _write_index(index_file, self._index)

    def close(
        self, *, name: str, split: Split, source: str, label: str, index_file: IO[bytes]
    ) -> ShardEntry:
        """Writes pending documents, the footer and the index.

        Args:
            name: the shard's file name.
            split: "train" or "validation".
            source: the source's name.
            label: the input split's URL and range.
            index_file: the file for the index.

        Returns:
            The manifest's entry for this shard.
        """
        index_blake2b = self.close_index(index_file)
        return ShardEntry(
            name=name,
            split=split,
            source=source,
            input=label,
            num_documents=sum(n_docs for *_, n_docs, _ in self._index),
            num_tokens=sum(n_tokens for _, _, n_tokens, _, _ in self._index),
            num_text_bytes=self._num_text_bytes,
            num_batches=len(self._index),
            num_bytes=self._num_bytes,
            blake2b=self._blake2b.hexdigest(),
            index_blake2b=index_blake2b,
        )

    def _write_batch(self) -> None:
        batch = _record_batch(self._pending, self._schema)
        self._arrow.write_batch(batch)
        message = self._taken()
        if not self._index:  # Arrow writes magic and schema together with the first batch
            prefix = ARROW_MAGIC_BYTES + self._schema.serialize().size
            self._write(message[:prefix])
            message = message[prefix:]
        self._index.append(
            (
                self._num_bytes,
                len(message),
                self._pending_tokens,
                len(self._pending),
                crc32(message),
            )
        )
        self._write(message)
        self._pending, self._pending_tokens = [], 0

    def _taken(self) -> bytes:
        """Returns the bytes that Arrow has written since the last call."""
        taken = self._captured.getvalue()
        self._captured.seek(0)
        self._captured.truncate()
        return taken

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._blake2b.update(data)
        self._num_bytes += len(data)


def _record_batch(documents: list[TokenDocument], schema: pa.Schema) -> pa.RecordBatch:
    columns: dict[str, Callable[[], Any]] = {
        "tokens": lambda: np.concatenate([one.tokens for one in documents]),
        "doc_id": lambda: [one.doc_id for one in documents],
        "n_bytes": lambda: [one.num_text_bytes for one in documents],
        "source": lambda: [_label(one.source) for one in documents],
        "source_row": lambda: [one.source_row for one in documents],
        "loss_mask": lambda: _learned(documents),
        "record_id": lambda: [_label(one.record_id) for one in documents],
    }
    ends = pa.array(np.cumsum([0, *(len(one.tokens) for one in documents)]), type=pa.int32())
    arrays = []
    for field in schema:
        values, is_list = columns[field.name](), pa.types.is_list(field.type)
        array = pa.array(values, type=field.type.value_type if is_list else field.type)
        arrays.append(pa.ListArray.from_arrays(ends, array) if is_list else array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _learned(documents: list[TokenDocument]) -> np.ndarray:
    """Returns which tokens of the concatenated documents are learned."""
    return np.concatenate(
        [np.arange(len(one.tokens)) >= one.num_prompt_tokens for one in documents]
    )


def _label(text: str) -> bytes:
    """Returns a name in UTF-8, cut between two characters if it is too long."""
    data = text.encode()
    if len(data) <= MAX_LABEL_BYTES:
        return data
    return data[:MAX_LABEL_BYTES].decode(errors="ignore").encode()


def _write_index(file: IO[bytes], rows: list[tuple[int, ...]]) -> str:
    columns = zip(*rows, strict=True) if rows else ((),) * len(INDEX_SCHEMA)
    arrays = [
        pa.array(column, type=field.type)
        for column, field in zip(columns, INDEX_SCHEMA, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=INDEX_SCHEMA))
    data = sink.getvalue().to_pybytes()
    file.write(data)
    return hashlib.blake2b(data, digest_size=32).hexdigest()
