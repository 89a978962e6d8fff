"""A rank's shard of a tensor in the words of torch.distributed.checkpoint: what it writes, and
where it reads to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..local_shard import LocalShard


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


class ShardSavePlanner(DefaultSavePlanner):
    """A planner of DCP that finds the slices of a `TensorShard` to be written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor that is to be written under `index`."""
        return _looked_up(self.state_dict, index, super().lookup_object)


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
        return _looked_up(self.state_dict, index, super().lookup_tensor)


def _looked_up(
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
