"""The table of contents of a prepared folder, and atomic writes into it.

A folder is valid when it holds `manifest.json`, which is written last. The manifest names every
shard with its counts and blake2b-256, the tokenizer by its sha256, and carries a sha256 of itself,
so that each byte a loader relies on is under some checksum. It holds no time, host or worker count:
the same input gives the same manifest.
"""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from .config import FORMAT_VERSION
from .errors import PrepareError, ShardError

MANIFEST_FILE = "manifest.json"
TEMPORARY = ".tmp-"
Split = Literal["train", "validation"]


class ShardEntry(BaseModel):
    """Describes a shard: a file of tokens and its index, made from one input split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    split: Split
    source: str  # the input split: URL and range
    num_documents: int
    num_tokens: int  # ends of documents included
    num_text_bytes: int  # UTF-8, without ends of documents
    num_batches: int
    num_bytes: int  # of the file `name`
    blake2b: str
    index_blake2b: str

    @property
    def index_name(self) -> str:
        """Returns the name of the shard's index file."""
        return index_name(self.name)


class DatasetManifest(BaseModel):
    """Describes what a prepared folder holds.

    `spec` is the configuration that `spec_hash` was taken of, for people to read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    spec_hash: str
    spec: dict[str, Any]
    inputs: dict[str, int]  # URL -> size when it was read
    tokenizer: Literal["bpe", "bytes"]
    tokenizer_sha256: str
    vocab_size: int
    end_of_document_id: int
    batch_tokens: int
    shards: tuple[ShardEntry, ...]
    dropped: dict[str, int]  # reason -> documents

    def of(self, split: str) -> tuple[ShardEntry, ...]:
        """Returns the shards of one split, in the order of its token stream."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def num_tokens(self, split: str) -> int:
        """Returns the number of tokens of one split, ends of documents included."""
        return sum(shard.num_tokens for shard in self.of(split))

    def num_documents(self, split: str) -> int:
        """Returns the number of documents of one split."""
        return sum(shard.num_documents for shard in self.of(split))

    def num_text_bytes(self, split: str) -> int:
        """Returns the UTF-8 bytes of one split's text."""
        return sum(shard.num_text_bytes for shard in self.of(split))


def index_name(shard_name: str) -> str:
    """Returns a shard's index file: `train-00000.tok.arrow` -> `train-00000.idx.arrow`."""
    return shard_name.removesuffix(".tok.arrow") + ".idx.arrow"


def write_manifest(directory: Path, manifest: DatasetManifest) -> None:
    """Writes `manifest.json`, which makes the folder valid."""
    body = manifest.model_dump(mode="json")
    with atomic_write(directory / MANIFEST_FILE) as file:
        file.write(json.dumps({"manifest": body, "sha256": _body_hash(body)}, indent=1).encode())


def read_manifest(directory: str | Path) -> DatasetManifest:
    """Reads the manifest of a prepared folder.

    Raises:
        ShardError: there is none, or not a whole one.
    """
    path = Path(directory) / MANIFEST_FILE
    try:
        whole = json.loads(path.read_bytes())
        body = whole["manifest"]
        version = body["format_version"]
        intact = whole["sha256"] == _body_hash(body)
    except FileNotFoundError as error:
        raise ShardError(
            f"{path} does not exist: this folder holds no prepared data; run `moebius prepare`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(
            f"{path} is damaged ({error}): restore it from a copy, or prepare again elsewhere"
        ) from error
    if not intact:
        raise ShardError(
            f"{path} is damaged (its sha256 differs): restore it from a copy, or prepare again "
            "elsewhere"
        )
    if version != FORMAT_VERSION:
        raise ShardError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}: prepare the data "
            "again"
        )
    try:
        return DatasetManifest.model_validate(body)
    except ValidationError as error:
        raise ShardError(
            f"{path} has unknown or missing entries: prepare the data again\n{error}"
        ) from error


def _body_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears whole or not at all: temporary name, fsync, rename.

    Any exception removes the temporary.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    with explained_write_errors(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Fsyncs a folder: a rename survives a power failure only once its folder is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained_write_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors about `path` into what to do about them."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "free some space there and run the same command again; it continues "
            "where it stopped",
            errno.EDQUOT: "your quota is used up; free some space and run the same command again",
            errno.EACCES: "give yourself write permission there, or choose another folder",
            errno.EPERM: "give yourself write permission there, or choose another folder",
            errno.EROFS: "the file system is read-only; choose another folder",
            errno.ENOTDIR: "a file is in the way; choose another folder",
            errno.EEXIST: "a file is in the way; choose another folder",
        }.get(error.errno or 0, "nothing half-written is left; run the same command again")
        raise PrepareError(f"cannot write {path} ({error.strerror or error}): {advice}") from error
