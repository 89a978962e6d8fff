"""Loads checkpoints of any layout into the tensors of this one, all or nothing, on all ranks.

Every rank checks a share of the files and reads what it needs; nothing is overwritten before all of
it fits, and nothing that a file says is executed.
"""

import io
import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..local_shard import LocalShard, block_of, whole_shard
from ..mesh import Mesh
from .format import (
    CheckpointError,
    CheckpointMeta,
    Chunk,
    CorruptCheckpointError,
    StoredCheckpoint,
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


def open_share(path: Path, part: int, parts: int, *, check_bytes: bool = True) -> StoredCheckpoint:
    """Opens a checkpoint and checks that it holds everything, and the bytes of a part of its files.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    stored = open_checkpoint(path)
    share = sorted(stored.manifest.files)[part % parts :: parts] if check_bytes else []
    refuse(path, audit(stored.index, stored.meta.num_experts) + damaged_files(stored, share))
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
        stored = open_share(path, rank, world_size, check_bytes=check_bytes)
        if unlike := _differences(stored, tensors, shards, allow_unexpected):
            listed = "\n  ".join(unlike)
            raise CheckpointError(f"{path} does not fit what is asked for:\n  {listed}")
        return stored

    stored = together(group, check)

    def read() -> None:
        try:
            _read_into(tensors, shards, stored)
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {path} cannot be read: {causes(error)}") from error

    together(group, read)
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
    tensors: Mapping[str, Tensor], shards: Mapping[str, LocalShard], stored: StoredCheckpoint
) -> None:
    """Fills this rank's tensors, in the order of the files, each chunk read once.

    Experts that have moved are many slices of one chunk.
    """
    wanted = [
        (chunk, name, blocks)
        for name, tensor in tensors.items()
        for chunk in stored.index.tensors[name].chunks
        if (blocks := list(_blocks(chunk, shards.get(name) or whole_shard(tensor.shape))))
    ]
    for chunk, name, blocks in sorted(wanted, key=lambda each: (each[0].file, each[0].start)):
        values, target = _read_chunk(stored, name, chunk), tensors[name].detach()
        for there, here, sizes in blocks:
            block_of(target, here, sizes).copy_(block_of(values, there, sizes))


def _blocks(chunk: Chunk, shard: LocalShard) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields what a chunk and a rank's slices have in common: where it begins in the chunk and in
    the rank's tensor, and its sizes.
    """
    for slice_ in shard.slices:
        ends = zip(chunk.offsets, chunk.sizes, slice_.offsets, slice_.sizes, strict=True)
        spans = [(max(a, b), min(a + size_a, b + size_b)) for a, size_a, b, size_b in ends]
        if all(start < end for start, end in spans):
            there = [start - a for (start, _), a in zip(spans, chunk.offsets, strict=True)]
            own = zip(spans, slice_.offsets, slice_.local_offsets, strict=True)
            here = [start - b + local for (start, _), b, local in own]
            yield there, here, [end - start for start, end in spans]


# The bytes of tensors ----------------------------------------------------------------------------


def read_tensor(stored: StoredCheckpoint, name: str) -> Tensor:
    """Reads one whole tensor, to the CPU, chunk by chunk."""
    tensor = stored.index.tensors[name]
    if [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]:
        return _read_chunk(stored, name, tensor.chunks[0]).contiguous()
    whole = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))
    for chunk in tensor.chunks:
        block_of(whole, chunk.offsets, chunk.sizes).copy_(_read_chunk(stored, name, chunk))
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


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a type as index.json spells it: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the type that index.json spells "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"index.json: {name!r} is no dtype")
    return dtype


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
