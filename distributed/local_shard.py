"""Which part of a global tensor a rank stores: what checkpoints, gradient norms and moves of
experts must agree on.

A tensor has a global name and a global shape. A rank stores slices of it, wherever they lie in its
own memory: a block of experts, the rows that FSDP left it, experts in any order. The ranks c·n …
c·n + n − 1 store the c-th copy of it, n being `ranks_per_copy`: 1 for what every rank stores whole,
ep for experts, dp_shard for what FSDP shards. (All of these are runs of neighbours, because ep is
the innermost axis.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Slice:
    """A block of a global tensor: where it begins in it, its sizes, and where the rank keeps it."""

    offsets: tuple[int, ...]  # in the global tensor
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]  # in the rank's own tensor
    # within its copy: a hot expert may live in several slots, and counts and is saved once
    is_first: bool = True

    def view(self, local: Tensor) -> Tensor:
        """Returns the view of this slice in the rank's own tensor."""
        return block_of(local, self.local_offsets, self.sizes)

    def copy_from(self, global_tensor: Tensor) -> Tensor:
        """Returns a copy of this slice of the global tensor.

        It is no view: the whole tensor must not stay in memory behind it.
        """
        return block_of(global_tensor, self.offsets, self.sizes).clone()


@dataclass(frozen=True)
class LocalShard:
    """The slices of a global tensor that one rank stores."""

    global_shape: tuple[int, ...]
    slices: tuple[Slice, ...]  # none: FSDP had nothing left for this rank
    ranks_per_copy: int = 1
    has_experts: bool = False  # along dim 0

    def copy_index(self, rank: int) -> int:
        """Returns which copy of the tensor the shard of `rank` belongs to, counted from 0."""
        return rank // self.ranks_per_copy

    def first_views(self, local: Tensor) -> list[Tensor]:
        """Returns views of `local` that hold every element once, over the ranks of one copy."""
        return [slice_.view(local) for slice_ in self.slices if slice_.is_first]


def block_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Returns the view of a block of a tensor, which begins at `offsets`."""
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
    """Returns the part of a tensor that lies in this rank's memory; it shares that memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shard(shape: Sequence[int]) -> LocalShard:
    """Returns the shard of a rank that stores the whole tensor of that shape."""
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
    """Returns the shard that is one range along `dim`, and whole along all other dimensions.

    A range of no length is a shard without slices.
    """
    size = tuple(shape)
    everything = whole_shard(size).slices[0]
    slices = (_sub_slice(everything, dim, start, length, 0),) if length else ()
    return LocalShard(size, slices, ranks_per_copy, has_experts)


def narrowed_shard(
    shard: LocalShard, dim: int, start: int, length: int, *, ranks_per_copy: int
) -> LocalShard:
    """Returns the shard of a rank that keeps one range of what its group stores alike.

    This is what FSDP leaves one of its ranks: `start` and `length` are along `dim` of the group's
    local tensor, not of the global one.
    """
    slices = []
    for slice_ in shard.slices:
        local_start = slice_.local_offsets[dim]
        first = max(start, local_start)
        last = min(start + length, local_start + slice_.sizes[dim])
        if first < last:
            slices.append(_sub_slice(slice_, dim, first - local_start, last - first, first - start))
    return LocalShard(shard.global_shape, tuple(slices), ranks_per_copy, shard.has_experts)


def _sub_slice(slice_: Slice, dim: int, start: int, length: int, local_start: int) -> Slice:
    """Returns the part of a slice from `start` (counted within it) on, along one dimension.

    It lies at `local_start` of the rank's memory along that dimension.
    """
    return Slice(
        (*slice_.offsets[:dim], slice_.offsets[dim] + start, *slice_.offsets[dim + 1 :]),
        (*slice_.sizes[:dim], length, *slice_.sizes[dim + 1 :]),
        (*slice_.local_offsets[:dim], local_start, *slice_.local_offsets[dim + 1 :]),
        slice_.is_first,
    )
