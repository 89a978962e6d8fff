"""torch.distributed.checkpoint's save, without its collectives: those unpickle what other ranks
send.

DCP sends every rank's plan to one rank, the joint plan back, and what was written to that rank
again. Here no plan needs to travel before the writing: `owners_of` has chosen already, alike on all
ranks, who writes what. So each rank writes its own plan, tells rank 0 in JSON what it wrote and
where, and rank 0 lets DCP check that all of every tensor is there and make its index of it.

Cost: one message per rank, some 200 bytes per chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .format import CheckpointError
from .reading import dtype_name, dtype_named


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
        tensors: what this rank writes, by name: tensors, or `Part`s of them.
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
