"""Which part of a whole tensor a rank holds: what checkpoints, gradient norms and moves of experts
must agree on.

A tensor has a global name and a whole shape. A rank holds boxes of it, wherever they lie in its own
memory: a block of experts, the rows that FSDP left it, experts in any order. The ranks c·n … c·n +
n − 1 hold the c-th copy of it, n being `ranks_per_copy`: 1 for what every rank holds whole, ep for
experts, dp_shard for what FSDP shards. (All of these are runs of neighbours, because ep is the
innermost axis.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it begins in the whole, its size, and where it begins in what the
    rank holds.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]
    # within its copy: a hot expert may live in several slots, and counts and is saved once
    is_first: bool = True

    def of(self, held: Tensor) -> Tensor:
        """Its view in the rank's tensor."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            held = held.narrow(dim, start, size)
        return held

    def cut(self, whole: Tensor) -> Tensor:
        """A copy of what it holds; the whole tensor must not stay behind a view."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole.clone()


@dataclass(frozen=True)
class Held:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]  # of the whole
    boxes: tuple[Box, ...]  # none: FSDP had nothing left for this rank
    ranks_per_copy: int = 1
    has_experts: bool = False  # along dim 0

    def copy_of(self, rank: int) -> int:
        """To which copy of the tensor that rank's part belongs."""
        return rank // self.ranks_per_copy

    def first_boxes(self, held: Tensor) -> list[Tensor]:
        """Views that together, over one copy's ranks, are every element once."""
        return [box.of(held) for box in self.boxes if box.is_first]


def hold(parameter: Tensor, held: Held) -> None:
    """Notes on a parameter what this rank holds of it."""
    parameter.held = held  # type: ignore[attr-defined]


def held_of(parameter: Tensor) -> Held:
    """What `hold` noted; without a note it is whole."""
    return getattr(parameter, "held", None) or whole(parameter.shape)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of it in its memory; shares that memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(shape: Sequence[int]) -> Held:
    """Everything."""
    size = tuple(shape)
    return Held(size, (Box((0,) * len(size), size, (0,) * len(size)),))


def block(
    shape: Sequence[int],
    dim: int,
    start: int,
    length: int,
    *,
    ranks_per_copy: int,
    has_experts: bool,
) -> Held:
    """One range along one dim; the rest whole. No range: nothing."""
    size = tuple(shape)
    boxes = (_range(whole(size).boxes[0], dim, start, length, 0),) if length else ()
    return Held(size, boxes, ranks_per_copy, has_experts)


def narrowed(held: Held, dim: int, start: int, length: int, *, ranks_per_copy: int) -> Held:
    """Of what a group holds alike, the range `start` … of its own memory along `dim`: what FSDP
    leaves one of its ranks.
    """
    boxes = []
    for box in held.boxes:
        first = max(start, box.local[dim])
        last = min(start + length, box.local[dim] + box.sizes[dim])
        if first < last:
            boxes.append(_range(box, dim, first - box.local[dim], last - first, first - start))
    return Held(held.shape, tuple(boxes), ranks_per_copy, held.has_experts)


def _range(box: Box, dim: int, start: int, length: int, local: int) -> Box:
    """The part of a box from `start` (within it) along one dim, which lies at `local` in the rank's
    memory.
    """
    return Box(
        (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], length, *box.sizes[dim + 1 :]),
        (*box.local[:dim], local, *box.local[dim + 1 :]),
        box.is_first,
    )
