"""Writes a checkpoint's files: summed on the way, synced, and without torch.distributed.checkpoint's
collectives, which unpickle what other ranks send.

DCP sends every rank's plan to one rank, the joint plan back, and what was written to that rank
again. Here no plan needs to travel before the writing: `owners_of` has chosen already, alike on all
ranks, who writes what. So each rank writes its own plan, tells rank 0 in JSON what it wrote and
where, and rank 0 lets DCP check that all of every tensor is there and make its index of it.

Cost: one pass over the bytes, since checksums are taken while writing; one message per rank, some
200 bytes per chunk. What stands in the files says format.py.
"""

import hashlib
import io
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..layout import MeshConfig, plan_layout
from .checkpoint_folder import atomic_directory, sync_directory
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
    damaged_files,
    digest_of_sums,
    open_checkpoint,
    refuse_name_of_another_step,
)
from .loading import dtype_name, dtype_named, lookup_shard, storage_metadata

_FILE = "__0_0.distcp"

# The tensors' files ------------------------------------------------------------------------------


class _SummedFile(io.FileIO):
    """A file whose checksum is taken while it is written, and that remembers why it failed."""

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
        """Returns the size and the checksum of what was written."""
        return FileSum(num_bytes=self._num_bytes, blake2b=self._digest.hexdigest())


class _SummingFiles(FileSystem):
    """DCP's file system, which takes the checksum of each file that it writes."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise AssertionError(f"a writer writes, it was asked for mode {mode!r}")
        file = _SummedFile(path)
        try:
            with io.BufferedWriter(file, buffer_size=2**20) as stream:
                yield stream
        except Exception:
            if file.failure is not None:  # torch.save says "unexpected pos" when the disk is full
                raise file.failure from None
            raise
        self.sums[Path(path).name] = file.sum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class SummingWriter(FileSystemWriter):
    """DCP's writer: one file per rank, synced, with checksums, without the machine's path in it.

    After the save `files.sums` has this rank's checksums, and `index` on rank 0 says where
    everything is.
    """

    def __init__(self, path: Path) -> None:
        # Copying ahead would touch the first GPU from this thread; the staged tensors are in main
        # memory already.
        super().__init__(path, per_thread_copy_ahead=0)
        self.files = _SummingFiles()
        self.fs = self.files
        self.index = Index(tensors={})

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.index = _index_of(
            metadata, {result.index: result.storage_data for part in results for result in part}
        )

    def storage_meta(self) -> None:
        return None


def _index_of(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> Index:
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        tensor = cast(TensorStorageMetadata, stored)  # `write_plan` has refused all else
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                Chunk(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=place.relative_path,
                    start=place.offset,
                    length=place.length,
                )
            )
        tensors[name] = StoredTensor(
            dtype=dtype_name(tensor.properties.dtype), shape=tuple(tensor.size), chunks=chunks
        )
    return Index(tensors=tensors)


class ShardSavePlanner(DefaultSavePlanner):
    """A planner of DCP that finds the slices of a `TensorShard` to be written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor that is to be written under `index`."""
        return lookup_shard(self.state_dict, index, super().lookup_object)


@dataclass(frozen=True)
class WrittenChunk:
    """One chunk of a tensor as a rank wrote it; every field is a plain value."""

    name: str
    is_part: bool  # of a tensor that several chunks make up
    shape: Sequence[int]  # of the whole tensor
    dtype: str
    requires_grad: bool
    pin_memory: bool
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    start: int
    length: int


def write_plan(
    tensors: Mapping[str, Any], writer: FileSystemWriter, planner: SavePlanner, *, rank: int
) -> list[dict[str, Any]]:
    """Writes this rank's part of a checkpoint; returns what it wrote, as plain values.

    Args:
        tensors: what this rank writes, by name: tensors, or `TensorShard`s of them.
        rank: names the file, __<rank>_0.distcp.

    Raises:
        CheckpointError: a value is no tensor.
    """
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer names files by a plan's place in the list of all ranks' plans.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    plan = planner.finish_plan(plan)
    places = {result.index: result for result in writer.write_data(plan, planner).wait()}
    return [asdict(_written(item, places[item.index])) for item in plan.items]


def finish_save(
    writer: FileSystemWriter, planner: SavePlanner, written: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Rank 0: checks that the chunks make up every tensor and writes DCP's index, `.metadata`.

    Args:
        planner: the one that rank 0 wrote with.
        written: what `write_plan` returned, by rank.
    """
    chunks = [[WrittenChunk(**chunk) for chunk in of_rank] for of_rank in written]
    plans = [SavePlan([_item(chunk) for chunk in of_rank]) for of_rank in chunks]
    plans, metadata = planner.create_global_plan(plans)
    results = [
        [_result(item, chunk) for item, chunk in zip(plan.items, of_rank, strict=True)]
        for plan, of_rank in zip(plans, chunks, strict=True)
    ]
    writer.finish(metadata, results)


def _written(item: WriteItem, result: WriteResult) -> WrittenChunk:
    data, place = item.tensor_data, result.storage_data
    if data is None:
        raise CheckpointError(
            f"{item.index.fqn} is no tensor; values that are none belong into meta"
        )
    return WrittenChunk(
        name=item.index.fqn,
        is_part=item.type is WriteItemType.SHARD,
        shape=list(data.size),
        dtype=dtype_name(data.properties.dtype),
        requires_grad=data.properties.requires_grad,
        pin_memory=data.properties.pin_memory,
        offsets=list(data.chunk.offsets),
        sizes=list(data.chunk.sizes),
        file=place.relative_path,
        start=place.offset,
        length=place.length,
    )


def _item(chunk: WrittenChunk) -> WriteItem:
    """What the rank that wrote the chunk had planned."""
    offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
    properties = TensorProperties(
        dtype=dtype_named(chunk.dtype),
        requires_grad=chunk.requires_grad,
        pin_memory=chunk.pin_memory,
    )
    return WriteItem(
        index=MetadataIndex(chunk.name, offsets),
        type=WriteItemType.SHARD if chunk.is_part else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=properties,
            size=torch.Size(chunk.shape),
        ),
    )


def _result(item: WriteItem, chunk: WrittenChunk) -> WriteResult:
    place = _StorageInfo(chunk.file, chunk.start, chunk.length)
    return WriteResult(index=item.index, size_in_bytes=chunk.length, storage_data=place)


# Small files -------------------------------------------------------------------------------------


def seal(path: Path, index: Index, meta: CheckpointMeta, sums: Mapping[str, FileSum]) -> int:
    """Writes the small files beside the tensors' files, whose checksums are `sums`.

    Returns:
        The bytes of all files but the manifest.
    """
    all_sums = dict(sums)
    for name, record in {"index.json": index, "meta.json": meta}.items():
        all_sums[name] = write_synced(path / name, record.model_dump_json())
    manifest = CheckpointManifest(format=1, files=all_sums, digest=digest_of_sums(all_sums))
    write_synced(path / "manifest.json", manifest.model_dump_json(indent=1))
    sync_directory(path)
    return sum(found.num_bytes for found in all_sums.values())


def drop_cached(path: Path) -> None:
    """Asks the system to forget the files of a directory, so that reading them asks the disk.

    They must be synced. Where the system knows no such request it does nothing, and reading back
    may read memory.
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
    """Writes a text or bytes to a file and to the disk (fsync); returns its size and checksum."""
    data = content.encode() if isinstance(content, str) else content
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(num_bytes=len(data), blake2b=blake2b(data))


def encoded(meta: dict[str, Any]) -> str:
    """Returns the caller's values as JSON.

    Raises:
        CheckpointError: they are no JSON.
    """
    try:
        return json.dumps(meta)
    except TypeError as error:
        raise CheckpointError(
            f"meta must be JSON: {error}; tensors belong among the tensors"
        ) from error


def software_versions() -> dict[str, str]:
    """Returns by what software a checkpoint is written."""
    try:
        own = version("moebius")
    except PackageNotFoundError:
        own = "unknown"
    return {"moebius": own, "torch": torch.__version__, "python": platform.python_version()}


# Tensors that no run has written -----------------------------------------------------------------


def write_checkpoint(
    out: Path,
    tensors: Mapping[str, Callable[[], Tensor]],
    *,
    step: int,
    num_experts: Mapping[str, int],
    meta: dict[str, Any],
) -> CheckpointMeta:
    """Writes the checkpoint of a step as one rank would, reads it back, and calls it `out`.

    Args:
        out: appears whole or not at all.
        tensors: by their names in a checkpoint; each is made when it is written.
        step: optimizer steps done.
        num_experts: of the tensors that have experts.
        meta: the caller's; JSON.

    Raises:
        CheckpointError: `out` exists or is called as another step's, or the disk is full or unsound.
    """
    refuse_name_of_another_step(out, step)
    with atomic_directory(out, needed_bytes=0) as temporary:
        writer = SummingWriter(temporary)
        writer.set_up_storage_writer(is_coordinator=True)
        stored, results = _write_whole(tensors, writer, temporary / _FILE)
        writer.finish(Metadata({k: storage_metadata(v) for k, v in stored.items()}), [results])
        layout = plan_layout(MeshConfig(), 1)
        written = CheckpointMeta(
            step=step,
            generation=0,
            layout=layout,
            num_experts=dict(num_experts),
            versions=software_versions(),
            meta=meta,
        )
        seal(temporary, writer.index, written, writer.files.sums)
        found = open_checkpoint(temporary)
        if problems := audit(found) + damaged_files(found, sorted(found.manifest.files)):
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{out} does not read as it was written; is the disk sound? Nothing was left of "
                f"it:\n  {listed}"
            )
    return written


def _write_whole(
    tensors: Mapping[str, Callable[[], Tensor]], writer: SummingWriter, file: Path
) -> tuple[dict[str, StoredTensor], list[WriteResult]]:
    """Writes all tensors into one file; returns what they are, and where each one is."""
    stored: dict[str, StoredTensor] = {}
    results: list[WriteResult] = []
    with writer.files.create_stream(file, "wb") as opened:
        stream: Any = opened
        for name, make in tensors.items():
            tensor = make().detach().contiguous()
            start = stream.tell()
            torch.save(tensor.clone(), stream)  # a view would bring its whole storage along
            length = stream.tell() - start
            offsets = (0,) * tensor.ndim
            whole = Chunk(
                offsets=offsets,
                sizes=tuple(tensor.shape),
                file=file.name,
                start=start,
                length=length,
            )
            stored[name] = StoredTensor(
                dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), chunks=[whole]
            )
            place = _StorageInfo(file.name, start, length)
            index = MetadataIndex(name, torch.Size(offsets))
            results.append(WriteResult(index, length, place))
        stream.flush()
        os.fsync(stream.fileno())
    return stored, results
