"""Writes a checkpoint's files with checksums and fsync; format.py describes them.

Every rank writes its slices into its own file and sends rank 0 a JSON list of them, which rank 0 merges
into the index. All ranks compute who writes what (`owners_of`), so no planning step is needed.
torch.distributed.checkpoint (DCP) can read the result through `.metadata`. Its own writer is not used,
because its collectives unpickle what other ranks send.

Cost: one pass over the bytes, and one message per rank with some 200 bytes per chunk.
"""

import hashlib
import io
import os
import pickle
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...data_pipeline.files import sync
from ..local_shard import LocalShard, Slice
from .format import (
    SUM_BYTES,
    CheckpointError,
    CheckpointManifest,
    CheckpointMeta,
    Chunk,
    FileSum,
    Index,
    StoredTensor,
    audit,
    blake2b,
    digest_of_sums,
)
from .loading import dtype_name, dtype_named

# The tensors' files ------------------------------------------------------------------------------


class _SummedFile(io.FileIO):
    """A file that computes its checksum while it is written, and remembers its OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._digest = hashlib.blake2b(digest_size=SUM_BYTES)
        self._num_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Writes bytes and adds them to the checksum."""
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self.name))
            raise
        self._digest.update(memoryview(data).cast("B")[:written])
        self._num_bytes += written
        return written

    def sum(self) -> FileSum:
        """Returns the size and checksum of the bytes written."""
        return FileSum(num_bytes=self._num_bytes, blake2b=self._digest.hexdigest())


def write_tensors(
    file: Path, tensors: Iterable[tuple[str, Tensor, LocalShard]]
) -> tuple[Index, FileSum]:
    """Writes the first slices of tensors (not those of replicas) to a new, synced file.

    Args:
        file: the file; its name goes into the index.
        tensors: each tensor's name, this rank's part on the CPU, and its shard.

    Returns:
        The index of the file, and its size and checksum.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    stored: dict[str, StoredTensor] = {}
    target = _SummedFile(file)
    try:
        with io.BufferedWriter(target, buffer_size=2**20) as stream:
            for name, tensor, shard in tensors:
                chunks = [
                    _write_chunk(stream, file.name, slice_, tensor.detach())
                    for slice_ in shard.slices
                    if slice_.is_first
                ]
                stored[name] = StoredTensor(
                    dtype=dtype_name(tensor.dtype), shape=shard.global_shape, chunks=chunks
                )
            stream.flush()
            os.fsync(stream.fileno())
    except Exception:
        if target.failure is not None:  # torch.save says "unexpected pos" when the disk is full
            raise target.failure from None
        raise
    return Index(tensors=stored), target.sum()


def _write_chunk(stream: Any, file: str, slice_: Slice, tensor: Tensor) -> Chunk:
    part, start = slice_.view(tensor), stream.tell()
    if part.untyped_storage().size() != part.nbytes:
        part = part.clone()  # saving a view would save its whole storage
    torch.save(part, stream)
    return Chunk(
        offsets=slice_.offsets,
        sizes=slice_.sizes,
        file=file,
        start=start,
        length=stream.tell() - start,
    )


def merged(indices: Iterable[Index]) -> Index:
    """Merges the indices of all ranks."""
    tensors: dict[str, StoredTensor] = {}
    for index in indices:
        for name, found in index.tensors.items():
            known = tensors.get(name)
            chunks = [*(known.chunks if known else ()), *found.chunks]
            tensors[name] = found.model_copy(update={"chunks": chunks})
    return Index(tensors=tensors)


def _dcp_metadata(index: Index) -> Metadata:
    """Converts the index to torch.distributed.checkpoint's metadata."""
    tensors, places = {}, {}
    for name, stored in index.tensors.items():
        chunks = []
        for number, chunk in enumerate(stored.chunks):
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            # DCP reads these attributes and has no public class for them.
            places[MetadataIndex(name, offsets, number)] = SimpleNamespace(
                relative_path=chunk.file,
                offset=chunk.start,
                length=chunk.length,
                transform_descriptors=None,
            )
        properties = TensorProperties(dtype=dtype_named(stored.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
    return Metadata(tensors, storage_data=places, version=CURRENT_DCP_VERSION)


# Small files -------------------------------------------------------------------------------------


def seal(path: Path, index: Index, meta: CheckpointMeta, sums: Mapping[str, FileSum]) -> int:
    """Writes the small files of a checkpoint; `sums` are the checksums of the tensors' files.

    Returns:
        The bytes of all files but the manifest.

    Raises:
        CheckpointError: the index does not hold every part of every tensor once.
    """
    if problems := audit(index, meta.num_experts):
        listed = "\n  ".join(problems)
        raise CheckpointError(f"the files do not hold every part of every tensor once:\n  {listed}")
    all_sums, small = dict(sums), {"index.json": index, "meta.json": meta}
    for name, record in small.items():
        all_sums[name] = write_synced(path / name, record.model_dump_json())
    all_sums[".metadata"] = write_synced(path / ".metadata", pickle.dumps(_dcp_metadata(index)))
    manifest = CheckpointManifest(format=1, files=all_sums, digest=digest_of_sums(all_sums))
    write_synced(path / "manifest.json", manifest.model_dump_json(indent=1))
    sync(path)
    return sum(found.num_bytes for found in all_sums.values())


def drop_cached(path: Path) -> None:
    """Drops a directory's synced files from the page cache, so that reading them reads the disk.

    Without posix_fadvise it does nothing.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def write_synced(path: Path, content: str | bytes) -> FileSum:
    """Writes and syncs a file; returns its size and checksum."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(data)
    sync(path)
    return FileSum(num_bytes=len(data), blake2b=blake2b(data))


def software_versions() -> dict[str, str]:
    """Returns the versions of moebius, torch and Python."""
    try:
        own = version("moebius")
    except PackageNotFoundError:
        own = "unknown"
    return {"moebius": own, "torch": torch.__version__, "python": platform.python_version()}
