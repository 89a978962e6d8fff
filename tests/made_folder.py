"""Prepared folders of given documents, segment by segment, and growing as long as a test wants.

They are as `prepare` would write them, without its inputs.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.commit import ManifestWriter
from moebius.data_pipeline.manifest import (
    Completion,
    Header,
    Segment,
    ShardEntry,
    SourceEntry,
    Split,
    TokenizerEntry,
    index_name,
    shard_name,
)
from moebius.data_pipeline.read.token_store import TokenStore, shard_schema
from moebius.data_pipeline.shards import ShardWriter, TokenDocument

END = 256  # of a document, among 257 ids
HASH = "0" * 64


@dataclass(frozen=True)
class Document:
    """Holds tokens with the end, of which the first ones are a prompt."""

    tokens: tuple[int, ...]
    prompt: int = 0


def documents(seed: int, count: int, *, longest: int = 60, prompts: bool = False) -> list[Document]:
    """Returns documents of one to `longest` random tokens and their end."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(1, longest + 1, count).tolist():
        tokens = (*rng.integers(0, END, length).tolist(), END)
        found.append(Document(tokens, prompt=int(rng.integers(0, length)) if prompts else 0))
    return found


def source_entry(name: str, **changes: Any) -> SourceEntry:
    """Returns a source as in the header."""
    values = {"licence": "", "num_splits": 4, "has_loss_mask": False, "has_record_id": False}
    return SourceEntry(name=name, **(values | changes))


def header_of(sources: Sequence[SourceEntry], **changes: Any) -> Header:
    """Returns the first manifest of a folder of raw bytes."""
    ids = {"vocab_size": 257, "end_of_document_id": END}
    tokenizer = TokenizerEntry(kind="bytes", file="tokenizer.json", sha256=HASH, **ids)
    values: dict[str, Any] = {"spec_hash": HASH, "spec": {"tokenizer": "bytes"}}
    return Header(tokenizer=tokenizer, sources=tuple(sources), **(values | changes))


def shard_entry(source: str, number: int, split: Split = "train", **changes: Any) -> ShardEntry:
    """Returns a shard as in a segment; its file need not exist."""
    values: dict[str, Any] = {
        "name": shard_name(source, split, number),
        "input": f"{source}.txt[{number}:{number + 1}]",
        "num_documents": 1,
        "num_tokens": 100 + number,
        "num_text_bytes": 90,
        "num_batches": 1,
        "num_bytes": 500,
        "blake2b": HASH,
        "index_blake2b": HASH,
    }
    return ShardEntry(source=source, split=split, **(values | changes))


@dataclass
class MadeFolder:
    """Builds a folder; `documents[source][segment]` are its train documents."""

    folder: Path
    sources: tuple[str, ...] = ("text",)
    with_prompts: frozenset[str] = frozenset()
    batch_tokens: int = 100
    documents: dict[str, list[list[Document]]] = field(default_factory=dict)
    validation: dict[str, list[list[Document]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.documents = {name: [] for name in self.sources}
        self.validation = {name: [] for name in self.sources}
        self._shards = dict.fromkeys(self.sources, 0)
        self._writer = ManifestWriter(self.folder)
        sources = [
            source_entry(name, has_loss_mask=name in self.with_prompts) for name in self.sources
        ]
        self._writer.append(header_of(sources, batch_tokens=self.batch_tokens, segment_tokens=1))

    def seal(
        self,
        source: str,
        train: Sequence[Document],
        validation: Sequence[Document] = (),
        *,
        shards: int = 1,
    ) -> "MadeFolder":
        """Adds a segment to a source."""
        entries, in_order = [], list[Document]()
        for part in range(shards):
            own = train[part::shards]
            in_order += own
            entries.append(self._shard(source, "train", own))
            if part == 0 and validation:
                entries.append(self._shard(source, "validation", validation))
            self._shards[source] += 1
        number = len(self.documents[source])
        self._writer.append(Segment(source=source, number=number, shards=tuple(entries)))
        self.documents[source].append(in_order)
        self.validation[source].append(list(validation))
        return self

    def complete(self) -> "MadeFolder":
        """Ends the folder's growth."""
        self._writer.append(
            Completion(num_documents={}, num_tokens={}, dropped={}, quarantined=(), inputs={})
        )
        return self

    def copied(self, to: Path) -> "MadeFolder":
        """Returns a copy of it, to damage."""
        copy = MadeFolder.__new__(MadeFolder)
        copy.__dict__.update(self.__dict__, folder=Path(shutil.copytree(self.folder, to)))
        return copy

    def config(self, *, seq_len: int = 16, seed: int = 3, **options) -> DataConfig:
        """Returns the configuration that reads it."""
        return DataConfig(directory=str(self.folder), seq_len=seq_len, seed=seed, **options)

    def stream(self, source: str, segment: int) -> list[int]:
        """Returns all tokens of a segment."""
        return [token for one in self.documents[source][segment] for token in one.tokens]

    def learned(self, source: str, segment: int) -> list[bool]:
        """Returns for each token of a segment whether it is outside prompts."""
        within = self.documents[source][segment]
        return [place >= one.prompt for one in within for place in range(len(one.tokens))]

    def document_of(self, source: str, segment: int) -> list[int]:
        """Returns each token's document number in a segment."""
        within = self.documents[source][segment]
        return [number for number, one in enumerate(within) for _ in one.tokens]

    def _shard(self, source: str, split: Split, documents: Sequence[Document]) -> ShardEntry:
        name = shard_name(source, split, self._shards[source])
        schema = shard_schema(257, has_loss_mask=source in self.with_prompts, has_record_id=False)
        path = self.folder / name
        with open(path, "wb") as file, open(self.folder / index_name(name), "wb") as index:
            writer = ShardWriter(file, schema=schema, batch_tokens=self.batch_tokens)
            for number, one in enumerate(documents):
                tokens, size = np.array(one.tokens, dtype=np.uint16), len(one.tokens)
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
                place = (source, number)
                writer.add(
                    TokenDocument(tokens, digest, size, *place, num_prompt_tokens=one.prompt)
                )
            return writer.close(name=name, split=split, source=source, label=name, index_file=index)


def flip(folder: Path, source: str, segment: int, batch: int, *, split: str = "train") -> None:
    """Flips one bit in the middle of a record batch."""
    store = TokenStore(folder, source, segment, split, check_sizes=False)
    shard = int(np.searchsorted(store._first_batches, batch, side="right")) - 1
    path = folder / store.entries[shard].name
    data = bytearray(path.read_bytes())
    data[int(store._index["offset"][batch] + store._index["length"][batch] // 2)] ^= 4
    path.write_bytes(data)
