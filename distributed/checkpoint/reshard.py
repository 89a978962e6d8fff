"""Rewrites a checkpoint as the ranks of another layout would have written it. One process, no
process group.

Any layout loads any checkpoint, so this is never needed. But a rank reads whole chunks and keeps
what it wants of them: 64 ranks that start from a checkpoint of one rank read all of it 64 times.
Rewritten, no byte is read by a rank that does not keep it; every byte is checked on the way; and it
can be done before the big machine is there.

    1. every byte of the source is summed, and every expert counted
    2. who writes what: the same `owners_of`, blocks of experts and FSDP shares as in a run
    3. tensor by tensor: read whole, cut, appended to the files of the ranks that own it
    4. the copy is summed and counted like the source, and every tensor of it compared with what was
       read
    5. one rename

Cost: four passes over the bytes, two of them of sums at about 0.8 GB/s (768 MiB for 128 ranks: 41 s
on two busy cores); memory for the largest tensor two to three times, and 1 MiB per open file. At
most `_FILES_AT_ONCE` files are open, so a tensor that more ranks share is read once per that many
of them.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ..dispatch.expert_map import ExpertMap
from ..layout import Layout, coordinates, expert_blocks
from ..local_shard import LocalShard, Slice, block_shard, whole_shard
from ..placement.move import expert_shard
from ..sharding import fsdp_shard, is_sharded
from .checkpointer import Signature, owners_of
from .format import (
    CheckpointError,
    CheckpointMeta,
    Chunk,
    OnBytes,
    StoredCheckpoint,
    StoredTensor,
    audit,
    damaged_files,
    open_checkpoint,
    open_verified,
    refuse_name_of_another_step,
    tensor_checksum,
)
from .reading import read_tensor, storage_metadata
from .writing import SummingWriter, atomic_directory, refuse_existing, seal

Sharding = Literal["none", "fsdp"]
# told what begins and how many bytes it is about; returns what is told of every few of them
StartProgress = Callable[[str, int], OnBytes]
_FILES_AT_ONCE = 64
_Writes = dict[str, list[tuple[int, Slice]]]  # tensor -> which rank writes which slice of it


def reshard(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    sharding: Sharding = "none",
    expert_maps: Mapping[str, ExpertMap] = MappingProxyType({}),
    start_progress: StartProgress = lambda what, num_bytes: lambda more: None,
) -> CheckpointMeta:
    """Writes a checkpoint anew, in files as the ranks of `layout` would write them.

    `expert_maps` has the maps of banks of experts, by the name of their layer; the experts of banks
    without are cut into contiguous blocks. `out` appears whole and verified, or not at all. The
    state is the same, bit for bit.

    Raises:
        CheckpointError: the source is damaged, a bank has fewer experts than `layout.ep`, `out`
            exists or is called as another step's checkpoint, or the disk is full.
    """
    unchecked = open_checkpoint(source)
    refuse_name_of_another_step(out, unchecked.meta.step)
    refuse_existing(out)  # now too, as all that can be told before an hour of verifying
    size = sum(file.num_bytes for file in unchecked.manifest.files.values())
    _check_experts(unchecked.meta.num_experts, layout)
    stored = open_verified(source, start_progress("checking the checkpoint", size))
    writes = plan_writes(stored, layout, sharding, expert_maps)
    with atomic_directory(out, needed_bytes=size) as temporary:
        writer = SummingWriter(temporary)
        writer.set_up_storage_writer(is_coordinator=True)
        results, sums = _write(
            stored, writes, writer, layout.world_size, start_progress("writing the files", size)
        )
        writer.finish(_metadata(stored, writes), [results])
        meta = stored.meta.model_copy(update={"layout": layout})
        seal(temporary, writer.index, meta, writer.files.sums)
        _compare(temporary, out, sums, start_progress, size)
    return meta


def plan_writes(
    stored: StoredCheckpoint,
    layout: Layout,
    sharding: Sharding,
    expert_maps: Mapping[str, ExpertMap],
) -> _Writes:
    """Returns for every tensor which rank writes which slice of it.

    Tensors that are sharded alike, as those of the layers, are looked at once.
    """
    shardings = {
        name: _sharding_of(
            name, tensor.shape, name in stored.meta.num_experts, sharding, expert_maps
        )
        for name, tensor in stored.index.tensors.items()
    }
    copies = {spec: _first_copy(spec, layout) for spec in set(shardings.values())}
    signature: Signature = {
        name: (spec.shape, stored.index.tensors[name].dtype, len(copies[spec]), spec.has_experts)
        for name, spec in shardings.items()
    }
    owners = owners_of(signature, layout.world_size)
    return {
        name: [
            (owners[name] * len(copies[spec]) + place, slice_)
            for place, shard in enumerate(copies[spec])
            for slice_ in shard.slices
            if slice_.is_first
        ]
        for name, spec in shardings.items()
    }


def shard_of_rank(
    rank: int,
    name: str,
    shape: tuple[int, ...],
    has_experts: bool,
    layout: Layout,
    sharding: Sharding,
    expert_maps: Mapping[str, ExpertMap],
) -> LocalShard:
    """Returns the shard that a rank of a layout stores of a tensor, as parallelize.py cuts it."""
    return _shard_of(rank, _sharding_of(name, shape, has_experts, sharding, expert_maps), layout)


@dataclass(frozen=True)
class _TensorSharding:
    """All that decides, in one layout, which shards its ranks store of a tensor."""

    shape: tuple[int, ...]
    has_experts: bool
    is_sharded: bool
    expert_map: ExpertMap | None  # None: contiguous blocks


def _sharding_of(
    name: str,
    shape: tuple[int, ...],
    has_experts: bool,
    sharding: Sharding,
    expert_maps: Mapping[str, ExpertMap],
) -> _TensorSharding:
    parameter = _parameter_of(name)
    bank = parameter.rpartition(".experts.")[0] if has_experts and sharding == "none" else None
    return _TensorSharding(
        shape,
        has_experts,
        sharding == "fsdp" and is_sharded(parameter),
        expert_maps.get(bank) if bank else None,
    )


def _first_copy(spec: _TensorSharding, layout: Layout) -> list[LocalShard]:
    """Returns the shards of the first copy's ranks; those of the others store the same."""
    first = _shard_of(0, spec, layout)
    return [first, *(_shard_of(rank, spec, layout) for rank in range(1, first.ranks_per_copy))]


def _shard_of(rank: int, spec: _TensorSharding, layout: Layout) -> LocalShard:
    shape, shard = spec.shape, whole_shard(spec.shape)
    if spec.has_experts:
        ep_rank = coordinates(layout, rank).ep
        if spec.expert_map is not None:
            return expert_shard(shape, spec.expert_map, ep_rank)
        experts = expert_blocks(shape[0], layout.ep)[ep_rank]
        shard = block_shard(
            shape, 0, experts.start, len(experts), ranks_per_copy=layout.ep, has_experts=True
        )
        shape = (len(experts), *shape[1:])
    return fsdp_shard(shard, shape, layout, rank) if spec.is_sharded else shard


def _parameter_of(name: str) -> str:
    """Returns the model's own name of a weight, or of the weight that a moment belongs to."""
    for prefix in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_experts(num_experts: Mapping[str, int], layout: Layout) -> None:
    if few := {name: count for name, count in num_experts.items() if count < layout.ep}:
        name, count = min(few.items(), key=lambda item: item[1])
        raise CheckpointError(
            f"ep {layout.ep} is more than the experts: {name} has {count}; every rank of an ep "
            f"group holds at least one of each bank, so choose an ep of at most {count}"
        )


def _write(
    stored: StoredCheckpoint,
    writes: _Writes,
    writer: SummingWriter,
    world_size: int,
    on_bytes: OnBytes,
) -> tuple[list[WriteResult], dict[str, str]]:
    """Writes all files.

    Returns:
        Where everything is, and a checksum of every whole tensor that was read.
    """
    results: list[WriteResult] = []
    sums: dict[str, str] = {}
    for first in range(0, world_size, _FILES_AT_ONCE):
        ranks = range(first, min(first + _FILES_AT_ONCE, world_size))
        with ExitStack() as stack:
            files = {rank: f"__{rank}_0.distcp" for rank in ranks}
            streams = {
                rank: stack.enter_context(
                    writer.files.create_stream(Path(writer.path) / file, "wb")
                )
                for rank, file in files.items()
            }
            for name, of_tensor in writes.items():
                mine = [(rank, slice_) for rank, slice_ in of_tensor if rank in streams]
                if not mine:
                    continue
                tensor = read_tensor(stored, name)
                sums.setdefault(name, tensor_checksum(tensor))
                for rank, slice_ in mine:
                    results.append(_append(tensor, name, slice_, streams[rank], files[rank]))
                    on_bytes(results[-1].size_in_bytes)
            for stream in streams.values():
                stream.flush()
                os.fsync(stream.fileno())
    return results, sums


def _append(tensor: Tensor, name: str, slice_: Slice, stream: Any, file: str) -> WriteResult:
    """Appends one slice to a file, as DCP's writer does."""
    start = stream.tell()
    torch.save(tensor if slice_.sizes == tuple(tensor.shape) else slice_.copy_from(tensor), stream)
    length = stream.tell() - start
    return WriteResult(
        MetadataIndex(name, torch.Size(slice_.offsets)), length, _StorageInfo(file, start, length)
    )


def _metadata(stored: StoredCheckpoint, writes: _Writes) -> Metadata:
    """Describes the copy in DCP's words."""
    return Metadata(
        {
            name: storage_metadata(
                StoredTensor(
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    chunks=[
                        Chunk(offsets=b.offsets, sizes=b.sizes, file="", start=0, length=0)
                        for _, b in writes[name]
                    ],
                )
            )
            for name, tensor in stored.index.tensors.items()
        }
    )


def _compare(
    path: Path, out: Path, sums: Mapping[str, str], start_progress: StartProgress, size: int
) -> None:
    """Checks the copy as any checkpoint, and then every tensor against what the source had."""
    stored = open_checkpoint(path)
    problems = audit(stored)
    problems += damaged_files(
        stored, sorted(stored.manifest.files), start_progress("checking the copy", size)
    )
    on_bytes = start_progress("comparing the tensors", size)
    for name, expected in () if problems else sums.items():
        tensor = read_tensor(stored, name)
        on_bytes(tensor.nbytes)
        if tensor_checksum(tensor) != expected:
            problems.append(f"{name} is not what was read")
    if problems:
        listed = "\n  ".join(problems)
        raise CheckpointError(
            f"{out} does not read as it was written; is the disk sound? Nothing was left of it, "
            "and the source is whole:\n"
            f"  {listed}"
        )
