"""Describes which part of a global tensor a rank stores, for checkpoints, gradient norms and moves.

A tensor has a global name and a global shape. A rank stores slices of it, anywhere in its local
tensor: a block of experts, its rows of an FSDP shard, experts in any order. Ranks c·n … c·n + n − 1
store the c-th copy, where n is `ranks_per_copy`: 1 for whole tensors, ep for experts, dp_shard for
FSDP shards. (These ranks are consecutive because ep is the innermost axis.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Slice:
    """A block of a global tensor and its place in the rank's local tensor."""

    offsets: tuple[int, ...]  # in the global tensor
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]  # in the rank's local tensor
    is_first: bool = True  # False for replicas of hot experts, which are not counted or saved

    def view(self, local: Tensor) -> Tensor:
        """Returns this slice as a view of the rank's local tensor."""
        return block_of(local, self.local_offsets, self.sizes)

    def copy_from(self, global_tensor: Tensor) -> Tensor:
        """Copies this slice from the global tensor; a view would keep the whole tensor in memory."""
        return block_of(global_tensor, self.offsets, self.sizes).clone()


@dataclass(frozen=True)
class LocalShard:
    """The slices of a global tensor that one rank stores."""

    global_shape: tuple[int, ...]
    slices: tuple[Slice, ...]  # empty if FSDP leaves nothing for this rank
    ranks_per_copy: int = 1
    has_experts: bool = False  # along dim 0

    def copy_index(self, rank: int) -> int:
        """Returns the index of the copy to which the shard of `rank` belongs."""
        return rank // self.ranks_per_copy

    def first_views(self, local: Tensor) -> list[Tensor]:
        """Returns views of `local` that, over the ranks of one copy, hold every element once."""
        return [slice_.view(local) for slice_ in self.slices if slice_.is_first]


def block_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Returns a view of the block of a tensor at `offsets`."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def set_local_shard(parameter: Tensor, shard: LocalShard) -> None:
    """Records on a parameter which part of the global tensor it is on this rank."""
    parameter.local_shard = shard  # type: ignore[attr-defined]


def local_shard_of(parameter: Tensor) -> LocalShard:
    """Returns the shard that `set_local_shard` recorded; a parameter without one is whole."""
    return getattr(parameter, "local_shard", None) or whole_shard(parameter.shape)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor's local part on this rank, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shard(shape: Sequence[int]) -> LocalShard:
    """Returns the shard of a rank that stores the whole tensor."""
    size = tuple(shape)
    start = (0,) * len(size)
    return LocalShard(size, (Slice(start, size, start),))


def block_shard(
    shape: Sequence[int],
    dim: int,
    start: int,
    length: int,
    *,
    ranks_per_copy: int,
    has_experts: bool,
) -> LocalShard:
    """Returns the shard that is one range along `dim` and whole along all other dimensions.

    An empty range gives a shard without slices.
    """
    whole = replace(whole_shard(shape), has_experts=has_experts)
    return narrowed_shard(whole, dim, start, length, ranks_per_copy=ranks_per_copy)


def narrowed_shard(
    shard: LocalShard, dim: int, start: int, length: int, *, ranks_per_copy: int
) -> LocalShard:
    """Returns the shard of a rank that keeps one range of its group's shard, as FSDP does.

    `start` and `length` are along `dim` of the group's local tensor, not of the global one.
    """
    slices = []
    for slice_ in shard.slices:
        local_start = slice_.local_offsets[dim]
        first = max(start, local_start)
        last = min(start + length, local_start + slice_.sizes[dim])
        if first < last:
            offsets, sizes = list(slice_.offsets), list(slice_.sizes)
            local_offsets = list(slice_.local_offsets)
            offsets[dim] += first - local_start
            sizes[dim], local_offsets[dim] = last - first, first - start
            slices.append(
                Slice(tuple(offsets), tuple(sizes), tuple(local_offsets), slice_.is_first)
            )
    return LocalShard(shard.global_shape, tuple(slices), ranks_per_copy, shard.has_experts)
