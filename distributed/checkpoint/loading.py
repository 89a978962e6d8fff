"""Loads checkpoints of any layout into the tensors of this one, all or nothing, on all ranks.

Every rank checks a share of the files and reads what it needs; nothing is overwritten before all of
it fits, and nothing that a file says is executed.
"""

import io
import itertools
import os
import pickle
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..local_shard import LocalShard
from ..mesh import Mesh
from .format import (
    CheckpointError,
    CheckpointMeta,
    Chunk,
    CorruptCheckpointError,
    StoredCheckpoint,
    StoredTensor,
    audit,
    damaged_files,
    open_checkpoint,
    refuse,
)
from .together import causes, together

# What torch.load raises on bytes that are no tensor: from its zip reader, its unpickler, and what
# calls those with nonsense.
_DECODING_ERRORS = (
    RuntimeError,
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    OverflowError,
)


def check_for_all(path: Path, group: dist.ProcessGroup, *, reading: int = 0) -> CheckpointMeta:
    """Checks every byte of a checkpoint, each rank a share of the files; returns its meta.

    A collective call; an error is raised on all ranks.

    Args:
        path: the checkpoint.
        group: all ranks.
        reading: another number divides the files among the ranks in another way.

    Raises:
        CorruptCheckpointError: it is damaged; tells all that is wrong with it.
    """
    return together(group, lambda: open_share(path, group.rank() + reading, group.size()).meta)


def open_share(path: Path, part: int, parts: int) -> StoredCheckpoint:
    """Opens a checkpoint and checks that it holds everything, and the bytes of a part of its files.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    stored = open_checkpoint(path)
    share = sorted(stored.manifest.files)[part % parts :: parts]
    refuse(path, audit(stored) + damaged_files(stored, share))
    return stored


def load(
    path: Path,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, LocalShard] = MappingProxyType({}),
    *,
    mesh: Mesh | None = None,
    check_bytes: bool = True,
    allow_unexpected: bool = False,
) -> dict[str, Any]:
    """Fills `tensors` in place from a checkpoint of any layout; returns the meta saved with it.

    `shards` has this rank's shard of each; tensors without one are whole. Without a mesh nothing
    is communicated; with one it is a collective call, and an error is raised on all ranks. Nothing
    is overwritten unless everything fits: names, shapes, dtypes, every element once, and (with
    `check_bytes`) the checksum of every file. `allow_unexpected` lets the checkpoint hold more than
    is asked for (weights without the optimizer's state).

    Safe on files of unknown origin: JSON and torch's weights_only loader are all that reads them.
    """
    group = None if mesh is None else mesh.world_group
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.layout.world_size)

    def check() -> StoredCheckpoint:
        if check_bytes:
            stored = open_share(path, rank, world_size)
        else:
            stored = open_checkpoint(path)
            refuse(path, audit(stored))
        if unlike := _differences(stored, tensors, shards, allow_unexpected):
            listed = "\n  ".join(unlike)
            raise CheckpointError(f"{path} does not fit what is asked for:\n  {listed}")
        return stored

    stored = together(group, check)
    state = {
        name: TensorShard(tensor.detach(), shards[name]) if name in shards else tensor.detach()
        for name, tensor in tensors.items()
    }
    _read_into(state, stored, group)
    return stored.meta.meta


def _differences(
    stored: StoredCheckpoint,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, LocalShard],
    allow_unexpected: bool,
) -> list[str]:
    """Spells where the checkpoint and what is asked for do not fit, one text for each misfit."""
    found = stored.index.tensors
    problems = [f"missing in the checkpoint: {name}" for name in tensors if name not in found]
    if not allow_unexpected:
        problems += [
            f"in the checkpoint but not asked for: {name}" for name in found if name not in tensors
        ]
    problems += [
        text for name, shard in shards.items() for text in misfits(name, tensors[name], shard)
    ]
    for name, tensor in tensors.items():
        if name not in found:
            continue
        shape = shards[name].global_shape if name in shards else tuple(tensor.shape)
        if found[name].shape != shape:
            problems.append(
                f"{name}: shape {list(found[name].shape)} in the checkpoint, {list(shape)} here"
            )
        elif found[name].dtype != dtype_name(tensor.dtype):
            problems.append(
                f"{name}: {found[name].dtype} in the checkpoint, {dtype_name(tensor.dtype)} here"
            )
    return problems


def _read_into(
    state: dict[str, Any], stored: StoredCheckpoint, group: dist.ProcessGroup | None
) -> None:
    """Fills the tensors of `state`, each rank those that it needs.

    DCP's own collectives unpickle, so it must not know of ranks.
    """
    rank = 0 if group is None else group.rank()

    def read() -> None:
        planner = ShardLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings():  # it warns that a world of one is one
                warnings.filterwarnings("ignore", message="torch.distributed is")
                dcp_load(state, storage_reader=SafeReader(stored), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(
                f"rank {rank}: {stored.path} cannot be read: {causes(error)}"
            ) from None

    together(group, read)


# The bytes of tensors ----------------------------------------------------------------------------


def read_tensor(stored: StoredCheckpoint, name: str) -> Tensor:
    """Reads one whole tensor, to the CPU, chunk by chunk."""
    tensor = stored.index.tensors[name]
    if [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]:
        return _read_chunk(stored, name, tensor.chunks[0]).contiguous()
    whole = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))
    for chunk in tensor.chunks:
        part = whole
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(_read_chunk(stored, name, chunk))
    return whole


def _read_chunk(stored: StoredCheckpoint, name: str, chunk: Chunk) -> Tensor:
    path, dtype = stored.path / chunk.file, dtype_named(stored.index.tensors[name].dtype)
    try:
        with open(path, "rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.length)
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != chunk.length:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: has {len(data)} of the {chunk.length} bytes that "
            "index.json promises"
        )
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _DECODING_ERRORS as error:
        # torch has no error of its own for that; the file may well be whole
        if "can't allocate memory" in str(error):
            raise
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: holds no tensor ({error})"
        ) from error
    expected = (chunk.sizes, dtype)
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: not the tensor that index.json promises"
        )
    return tensor


class SafeReader(StorageReader):
    """A reader for DCP that can execute nothing.

    It reads index.json instead of the pickle `.metadata`, and tensors with weights_only.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self.checkpoint_id = str(stored.path)
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in stored.index.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one object reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts everything: the checkpoint was opened before."""
        return True

    def read_metadata(self) -> Metadata:
        """Returns the index, as DCP describes it."""
        return Metadata(
            {name: storage_metadata(tensor) for name, tensor in self._stored.index.tensors.items()}
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Does nothing: the index is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keeps the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, in the order of the files, each chunk once."""
        items = sorted(plan.items, key=lambda item: self._place(item.storage_index))
        for index, wanted in itertools.groupby(items, key=lambda item: item.storage_index):
            # Once: moved experts are many slices of one chunk.
            chunk = _read_chunk(self._stored, index.fqn, self._chunks[index])
            for item in wanted:
                part = chunk
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        return self._chunks[index].file, self._chunks[index].start


def storage_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    """Describes a stored tensor in DCP's words."""
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_named(tensor.dtype)), torch.Size(tensor.shape), chunks
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a type as index.json spells it: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the type that index.json spells "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"index.json: {name!r} is no dtype")
    return dtype


# Shards in the words of torch.distributed.checkpoint ----------------------------------------------


class TensorShard:
    """A rank's shard of a tensor, as DCP asks after it (torch.distributed._checkpointable)."""

    def __init__(self, tensor: Tensor, shard: LocalShard) -> None:
        self.tensor, self.shard = tensor, shard

    def size(self) -> torch.Size:
        """Returns the shape of the global tensor."""
        return torch.Size(self.shard.global_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes))
            for slice_ in self.shard.slices
        ]

    def __create_write_items__(self, name: str, part: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(slice_.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(
                        torch.Size(slice_.offsets), torch.Size(slice_.sizes)
                    ),
                    properties=TensorProperties.create_from_tensor(self.tensor),
                    size=self.size(),
                ),
            )
            for slice_ in self.shard.slices
            if slice_.is_first
        ]

    def at(self, offsets: Sequence[int]) -> Tensor:
        """Returns the view of the slice that begins at `offsets` in the global tensor."""
        return next(
            slice_ for slice_ in self.shard.slices if slice_.offsets == tuple(offsets)
        ).view(self.tensor)


class ShardLoadPlanner(DefaultLoadPlanner):
    """A planner of DCP that finds the slices of a `TensorShard` to be read."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state as it is, `TensorShard`s among it."""
        # An empty one: it would put None in the place of what it does not know.
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor into which the value of `index` is read."""
        return lookup_shard(self.state_dict, index, super().lookup_tensor)


def lookup_shard(
    state: Mapping[str, Any], index: MetadataIndex, otherwise: Callable[[MetadataIndex], Any]
) -> Any:
    """Returns what DCP asks for; by itself it finds parts of tensors in tensors only."""
    part = state[index.fqn]
    return part.at(index.offset or ()) if isinstance(part, TensorShard) else otherwise(index)


def misfits(name: str, tensor: Tensor, shard: LocalShard) -> Iterator[str]:
    """Yields a text if a slice of the shard does not lie in the tensor that should store it."""
    shape = tuple(tensor.shape)
    for slice_ in shard.slices:
        if len(slice_.local_offsets) != len(shape) or any(
            start + size > end
            for start, size, end in zip(slice_.local_offsets, slice_.sizes, shape, strict=True)
        ):
            yield (
                f"{name} has shape {list(shape)} here, in which there is no block of "
                f"{slice_.sizes} at {slice_.local_offsets}"
            )
            return
