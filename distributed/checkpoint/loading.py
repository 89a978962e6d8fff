"""Loads checkpoints of any layout into this layout's tensors, all or nothing, on all ranks.

Every rank verifies a share of the files and reads what it needs. Nothing is overwritten before
everything fits, and nothing in a file is executed.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    Index,
    StoredCheckpoint,
    Weights,
    audit,
    damaged_files,
    open_checkpoint,
    refuse,
)
from .together import causes, together

_AVERAGES = "optimizer.weight_average."  # of ../average.py


def check_for_all(path: Path, group: dist.ProcessGroup, *, reading: int = 0) -> CheckpointMeta:
    """Verifies every byte of a checkpoint, each rank a share of the files; returns its meta. Collective.

    Args:
        path: the checkpoint.
        group: all ranks.
        reading: another number distributes the files over the ranks in another way.

    Raises:
        CorruptCheckpointError: on all ranks: it is damaged; lists all problems.
    """
    return together(group, lambda: open_share(path, group.rank() + reading, group.size()).meta)


def open_share(path: Path, part: int, parts: int, *, check_bytes: bool = True) -> StoredCheckpoint:
    """Opens a checkpoint, checks that it is complete, and verifies one of `parts` shares of its files.

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
    converts: bool = False,
    weights: Weights = "trained",
) -> dict[str, Any]:
    """Fills `tensors` in place from a checkpoint of any layout; returns the caller's meta.

    Nothing is overwritten unless everything fits: names, shapes, dtypes (float32 takes bfloat16) and every element once. Safe on
    files of unknown origin, which only JSON and torch's weights_only loader read.

    Args:
        path: the checkpoint.
        tensors: this rank's tensors by name.
        shards: this rank's shards; tensors without one are whole.
        mesh: all ranks, which makes the call collective; None communicates nothing.
        check_bytes: verify the checksum of every file.
        allow_unexpected: the checkpoint may hold more tensors (weights without optimizer state).
        converts: its tensors may have other dtypes, which become those of `tensors`.
        weights: which weights to read as "model.<name>".

    Raises:
        CheckpointError: the checkpoint is damaged, does not fit or has no average; on all ranks.
    """
    group = None if mesh is None else mesh.world_group
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.layout.world_size)

    def check() -> StoredCheckpoint:
        stored = open_share(path, rank, world_size, check_bytes=check_bytes)
        stored = choose_weights(stored, weights)
        if unlike := _differences(stored, tensors, shards, allow_unexpected, converts):
            listed = "\n  ".join(unlike)
            raise CheckpointError(f"{path} does not fit the requested tensors:\n  {listed}")
        return stored

    stored = together(group, check)

    def read() -> None:
        try:
            _read_into(tensors, shards, stored)
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {path} cannot be read: {causes(error)}") from error

    together(group, read)
    return stored.meta.meta


def choose_weights(stored: StoredCheckpoint, weights: Weights) -> StoredCheckpoint:
    """Returns a checkpoint whose "model.<name>" are the trained weights, or their average.

    Buffers have no average and stay as they are.

    Raises:
        CheckpointError: it has no average.
    """
    if weights == "trained":
        return stored
    tensors = stored.index.tensors
    averages = {
        f"model.{name.removeprefix(_AVERAGES)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(_AVERAGES)
    }
    if not averages:
        raise CheckpointError(
            f"{stored.path}: has no averaged weights, which a run keeps with train.average: leave out "
            '--weights average (weights="average"), or average several checkpoints with `moebius ckpt '
            "average`"
        )
    return replace(stored, index=Index(tensors={**tensors, **averages}), weights=weights)


def _differences(
    stored: StoredCheckpoint,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, LocalShard],
    allow_unexpected: bool,
    converts: bool,
) -> list[str]:
    """Lists the differences between the checkpoint and the requested tensors."""
    found = stored.index.tensors
    problems = [f"missing in the checkpoint: {name}" for name in tensors if name not in found]
    if not allow_unexpected:
        problems += [
            f"in the checkpoint but not requested: {name}" for name in found if name not in tensors
        ]
    for name, tensor in tensors.items():
        if name not in found:
            continue
        shape = shards[name].global_shape if name in shards else tuple(tensor.shape)
        there, here = found[name].dtype, dtype_name(tensor.dtype)
        if found[name].shape != shape:
            problems.append(
                f"{name}: shape {list(found[name].shape)} in the checkpoint, {list(shape)} here"
            )
        elif not converts and there != here and (there, here) != ("bfloat16", "float32"):
            problems.append(f"{name}: {there} in the checkpoint, {here} here")
    return problems


def _read_into(
    tensors: Mapping[str, Tensor], shards: Mapping[str, LocalShard], stored: StoredCheckpoint
) -> None:
    """Fills this rank's tensors in file order, reading each chunk once."""
    wanted = [
        (chunk, name, blocks)
        for name, tensor in tensors.items()
        for chunk in stored.index.tensors[name].chunks
        if (blocks := list(overlaps(chunk, shards.get(name) or whole_shard(tensor.shape))))
    ]
    for chunk, name, blocks in sorted(wanted, key=lambda each: (each[0].file, each[0].start)):
        values, target = read_chunk(stored, name, chunk), tensors[name].detach()
        for there, here, sizes in blocks:
            block_of(target, here, sizes).copy_(block_of(values, there, sizes))


def overlaps(chunk: Chunk, shard: LocalShard) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields the overlaps of a chunk and a rank's slices: offsets in both, and sizes."""
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
    """Reads one whole tensor to the CPU, chunk by chunk."""
    tensor = stored.index.tensors[name]
    if [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]:
        return read_chunk(stored, name, tensor.chunks[0]).contiguous()
    whole = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))
    for chunk in tensor.chunks:
        block_of(whole, chunk.offsets, chunk.sizes).copy_(read_chunk(stored, name, chunk))
    return whole


def read_chunk(stored: StoredCheckpoint, name: str, chunk: Chunk) -> Tensor:
    """Reads one chunk of a tensor to the CPU.

    Raises:
        CorruptCheckpointError: its file cannot be read, or holds something else there.
    """
    path, dtype = stored.path / chunk.file, dtype_named(stored.index.tensors[name].dtype)
    try:
        with open(path, "rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.length)
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != chunk.length:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: has {len(data)} of the {chunk.length} bytes that index.json lists"
        )
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything on bytes that are not a tensor
        # torch has no own error for lack of memory; the file may be intact
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: holds no tensor ({error})"
        ) from error
    expected = (chunk.sizes, dtype)
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: not the tensor that index.json lists"
        )
    return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name in index.json: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype with that name in index.json."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"index.json: {name!r} is not a dtype")
    return dtype
