"""Finds prepared folders and verifies every byte of them, without changing them.

In a growing folder it reads the sealed segments. It reads every file twice, to hash and to decode it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ShardError
from .files import read_regular
from .manifest import (
    SPLITS,
    UNFINISHED,
    DatasetManifest,
    SealedSegment,
    is_prepared,
    manifest_name,
    read_manifest,
)
from .read.token_store import TokenStore, verify_shard
from .tokenizers.tokenizer import prepared_tokenizer
from .words import run_and_step

_CONFIG_FILE = "config.json"  # of a run folder

OnBytes = Callable[[int], None]
"""Receives the number of bytes read since the last call."""


@dataclass(frozen=True)
class FoundFolder:
    """Holds a prepared folder's path, and its manifest or its problem."""

    path: Path
    manifest: DatasetManifest | None
    problem: str = ""


def data_folder(path: Path) -> Path:
    """Returns the prepared folder of a path: the path itself, or the data of a run folder.

    Raises:
        ShardError: it is neither, or has no sealed segment yet.
    """
    if is_prepared(path):
        return path
    if (path / UNFINISHED).is_dir():
        raise ShardError(f"{path} is being prepared, and no segment is sealed yet: try again later")
    try:
        config = run_and_step(path)[0] / _CONFIG_FILE
        directory = json.loads(read_regular(config))["data"]["directory"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        directory = ""
    if directory and isinstance(directory, str):
        return Path(directory)
    raise ShardError(
        f"{path} holds no prepared data and is no run folder: name a folder that `moebius prepare` "
        "has written, or a run"
    )


def find_folders(root: Path) -> Iterator[FoundFolder]:
    """Yields `root` and folders up to two levels below it that are prepared, sorted by name."""
    levels = [[root], sorted(root.glob("*")), sorted(root.glob("*/*"))]
    for path in (path for level in levels for path in level):
        if path.is_dir() and is_prepared(path):
            try:
                manifest = read_manifest(path)
                lost = _lost_end(path, manifest)
                yield FoundFolder(path, None if lost else manifest, lost)
            except ShardError as error:
                yield FoundFolder(path, None, str(error))


def _lost_end(directory: Path, manifest: DatasetManifest) -> str:
    """Returns a message if a folder lacks its last manifest and is no longer being prepared."""
    if manifest.complete or (directory / UNFINISHED).exists() or read_manifest(directory).complete:
        return ""
    last = directory / manifest_name(1 + len(manifest.sealed))
    return (
        f"{last} is missing, and nothing is preparing the folder: restore it from a copy, or run the "
        "same `moebius prepare` again"
    )


def verify(directory: Path, manifest: DatasetManifest, on_bytes: OnBytes) -> Iterator[str]:
    """Reads every byte of a folder and yields one message per problem.

    Checks the tokenizer, both hashes of every shard, and that every record batch has its CRC32 and
    decodes to the documents in its index.
    """
    if lost := _lost_end(directory, manifest):
        yield lost
    try:
        prepared_tokenizer(directory)
    except ShardError as error:
        yield str(error)
    for source in manifest.sources:
        for segment in manifest.segments(source.name):
            for split in SPLITS:
                yield from _verify_store(directory, manifest, segment, split, on_bytes)


def _verify_store(
    directory: Path,
    manifest: DatasetManifest,
    segment: SealedSegment,
    split: str,
    on_bytes: OnBytes,
) -> Iterator[str]:
    entries = segment.of(split)
    intact = True
    for entry in entries:
        try:
            verify_shard(directory, entry)
        except ShardError as error:
            intact = False
            yield str(error)
        on_bytes(entry.num_bytes)
    try:
        store = TokenStore(directory, segment.source, segment.number, split, manifest)
    except ShardError as error:  # damage reported above prevents opening, too
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
