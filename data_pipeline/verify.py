"""Looks into prepared folders: which there are, what they hold, and whether every byte is as it was
written.

Nothing here changes a folder, and a folder that is still being made is read as far as it is sealed.
Cost: a summary reads the manifests alone; lengths decode every record batch, at some 400 M
tokens/s; verifying reads every file twice, once for its hash and once to decode it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ShardError
from .growth import UNFINISHED
from .manifest import DatasetManifest, SealedEra, ShardEntry, is_prepared, read_manifest
from .prepare_config import NUM_BYTE_IDS, PrepareConfig, SourceConfig
from .read.token_store import TokenStore, prepared_tokenizer, verify_shard

SPLITS = ("train", "validation")
_CONFIG_FILE = "config.json"  # of a run folder

OnBytes = Callable[[int], None]
"""Told how many more bytes were read."""


@dataclass(frozen=True)
class Counts:
    """Counts the shards of one split of a source or of a folder."""

    num_shards: int
    num_documents: int
    num_tokens: int  # ends of documents included
    num_text_bytes: int  # UTF-8
    num_bytes: int  # of the files, indices left out

    @property
    def bytes_per_token(self) -> float:
        """Returns the UTF-8 bytes that a token stands for; 0 where there are none."""
        return self.num_text_bytes / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True)
class FoundFolder:
    """Is a prepared folder, or what is wrong with it."""

    path: Path
    manifest: DatasetManifest | None
    problem: str = ""


@dataclass(frozen=True)
class Lengths:
    """Describes how long the documents of a split are, in tokens with their ends."""

    num_documents: int
    mean: float
    shortest: int
    percentiles: dict[int, int]  # 10, 50, 90, 99
    longest: int
    histogram: dict[int, int]  # lower bound, a power of two -> documents


def data_folder(path: Path) -> Path:
    """Returns the prepared folder that a path names: itself, or that of a run folder.

    Raises:
        ShardError: it is neither.
    """
    if is_prepared(path) or (path / "manifest.json").exists():
        return path
    try:
        saved = json.loads((path / _CONFIG_FILE).read_bytes())
        directory = saved["data"]["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        directory = ""
    if directory and isinstance(directory, str):
        return Path(directory)
    raise ShardError(
        f"{path} holds no prepared data and is no run folder: name a folder that `moebius prepare` "
        "has written, or a run"
    )


def is_data_folder(path: Path) -> bool:
    """Returns whether a path is a prepared folder, or one that is being made."""
    return is_prepared(path) or (path / "manifest.json").exists() or (path / UNFINISHED).is_dir()


def check_readable(path: Path) -> None:
    """Checks that a prepared folder has something to look at.

    Raises:
        ShardError: it has not, and why.
    """
    if is_prepared(path):
        return
    if (path / UNFINISHED).is_dir():
        raise ShardError(
            f"{path} is being prepared, and no era is sealed yet: ask again when the first is "
            "(`moebius data ls` lists the folder from then on)"
        )
    data_folder(path)
    read_manifest(path)


def config_of_folder(path: Path) -> PrepareConfig:
    """Returns what a prepared folder was made of, as far as its manifest tells: for its readers.

    Raises:
        ShardError: it cannot be read.
    """
    check_readable(path)
    manifest = read_manifest(path)
    sources = [
        SourceConfig(name=source.name, input=("-",), licence=source.licence)
        for source in manifest.sources
    ]
    return PrepareConfig(
        sources=tuple(sources),
        tokenizer=manifest.header.tokenizer.kind,
        vocab_size=max(NUM_BYTE_IDS, manifest.vocab_size),
    )


def find_folders(root: Path) -> Iterator[FoundFolder]:
    """Yields the prepared folders in `root`, down to two levels below it, sorted by name."""
    levels = [[root], sorted(root.glob("*")), sorted(root.glob("*/*"))]
    for path in (path for level in levels for path in level):
        if path.is_dir() and (is_prepared(path) or (path / "manifest.json").exists()):
            try:
                yield FoundFolder(path, read_manifest(path))
            except ShardError as error:
                yield FoundFolder(path, None, str(error))


def count(shards: Iterator[ShardEntry] | tuple[ShardEntry, ...]) -> Counts:
    """Returns the sums over some shards."""
    entries = tuple(shards)
    return Counts(
        num_shards=len(entries),
        num_documents=sum(entry.num_documents for entry in entries),
        num_tokens=sum(entry.num_tokens for entry in entries),
        num_text_bytes=sum(entry.num_text_bytes for entry in entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
    )


def count_source(manifest: DatasetManifest, source: str, split: str) -> Counts:
    """Returns the sums over one split of a source."""
    return count(entry for era in manifest.eras(source) for entry in era.of(split))


def stats(directory: Path, manifest: DatasetManifest, *, lengths: bool = False) -> dict[str, Any]:
    """Returns what a folder holds as values of JSON.

    Args:
        directory: the prepared folder.
        manifest: its manifest.
        lengths: also read every document's length.

    Raises:
        ShardError: with `lengths`, a record batch is damaged.
    """
    return {
        "directory": str(directory),
        "complete": manifest.complete,
        "spec_hash": manifest.spec_hash,
        "manifest_sha256": manifest.sha256,
        "tokenizer": manifest.header.tokenizer.model_dump(mode="json"),
        "era_tokens": manifest.header.era_tokens,
        "sources": [
            _source_stats(directory, manifest, source.name, lengths) for source in manifest.sources
        ],
        "dropped": manifest.completion.dropped if manifest.completion else {},
        "quarantined": [
            split.model_dump()
            for split in (manifest.completion.quarantined if manifest.completion else ())
        ],
        "inputs": manifest.inputs,
    }


def _source_stats(
    directory: Path, manifest: DatasetManifest, name: str, lengths: bool
) -> dict[str, Any]:
    source = manifest.source(name)
    splits = {}
    for split in SPLITS:
        counts = count_source(manifest, name, split)
        splits[split] = vars(counts) | {"bytes_per_token": counts.bytes_per_token}
        if lengths and counts.num_documents:
            splits[split]["document_tokens"] = vars(
                document_lengths(directory, manifest, name, split)
            )
    eras = [
        {
            "number": era.number,
            "num_shards": len(era.shards),
            **{f"{split}_tokens": era.num_tokens(split) for split in SPLITS},
        }
        for era in manifest.eras(name)
    ]
    return source.model_dump(mode="json") | {"splits": splits, "eras": eras}


def document_lengths(
    directory: Path, manifest: DatasetManifest, source: str, split: str
) -> Lengths:
    """Reads how long the documents of one split of a source are; it has some.

    Raises:
        ShardError: a record batch is damaged.
    """
    found = []
    for era in manifest.eras(source):
        store = TokenStore(directory, source, era.number, split, manifest)
        for batch in range(store.num_batches):
            found.append(np.diff(store.document_ends(batch), prepend=0))
        store.close()
    lengths = np.sort(np.concatenate(found))
    places, counts = np.unique(np.log2(lengths).astype(np.int64), return_counts=True)
    return Lengths(
        num_documents=len(lengths),
        mean=float(lengths.mean()),
        shortest=int(lengths[0]),
        percentiles={
            share: int(lengths[len(lengths) * share // 100]) for share in (10, 50, 90, 99)
        },
        longest=int(lengths[-1]),
        histogram={2 ** int(place): int(n) for place, n in zip(places, counts, strict=True)},
    )


def verify(directory: Path, manifest: DatasetManifest, on_bytes: OnBytes) -> Iterator[str]:
    """Reads every byte of a folder and yields what is wrong, one sentence each.

    Checks the tokenizer, both hashes of every shard, and every record batch: its CRC32, and that it
    decodes to the documents that its index states.
    """
    try:
        prepared_tokenizer(directory)
    except ShardError as error:
        yield str(error)
    for source in manifest.sources:
        for era in manifest.eras(source.name):
            for split in SPLITS:
                yield from _verify_store(directory, manifest, era, split, on_bytes)


def _verify_store(
    directory: Path, manifest: DatasetManifest, era: SealedEra, split: str, on_bytes: OnBytes
) -> Iterator[str]:
    entries = era.of(split)
    intact = True
    for entry in entries:
        try:
            verify_shard(directory, entry)
        except ShardError as error:
            intact = False
            yield str(error)
        on_bytes(entry.num_bytes)
    try:
        store = TokenStore(directory, era.source, era.number, split, manifest)
    except ShardError as error:  # what was told above cannot be opened either
        if intact:
            yield str(error)
        on_bytes(sum(entry.num_bytes for entry in entries))
        return
    for batch in range(store.num_batches):
        try:
            store.read(batch)
        except ShardError as error:
            yield str(error)
        on_bytes(sum(entry.num_bytes for entry in entries) // store.num_batches)
    store.close()
