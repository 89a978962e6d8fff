"""Reads a trained model as one that grows out of it: a table of regions, and what each of them copies.

A reader fills blocks of named tensors. The lowest one reads a checkpoint or a published folder; a growth
wraps the one below, and further growths wrap that. A tensor of the grown model without a `Take` is the one of
that name before. A rank asks for its own slices alone, and they are filled in place, a region at a time.

The optimizer's state goes through the same table. Where a weight is multiplied by c and the function
undoes it, its gradient is divided by c; the averages of weights change as the weights do. A region that
copies nothing has a state of zeros.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import add, gt
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ...data_pipeline.words import some_of
from ..average import AVERAGE, RECENT
from ..local_shard import LocalShard, Slice, block_of
from .format import CheckpointError, Chunk, Index, StoredCheckpoint, StoredTensor, audit
from .loading import overlaps, read_chunk
from .pieces import Piece, PublishedFolder, Whole

_KEPT_BYTES = 2**30  # of chunks in memory, unless one has more
# Powers of a take's factor that a tensor is multiplied by; others stay as they are.
_POWERS = {
    "model": 1,
    f"optimizer.{AVERAGE}": 1,
    f"optimizer.{RECENT}": 1,
    "optimizer.exp_avg": -1,
    "optimizer.exp_avg_sq": -2,
    "optimizer.momentum_buffer": -1,
}


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Take(NamedTuple):
    """Maps a region of a grown tensor to a block of a tensor of the model before.

    Its values are factor · block + plus + eye · I + std · N(0, 1).
    """

    name: str  # of the grown tensor, without "model."
    start: tuple[Whole, ...]  # of the region
    sizes: tuple[Whole, ...]
    source: str = ""  # of the model before; "": nothing is read
    at: tuple[Whole, ...] = ()  # start of the block, per dim of the source
    axes: tuple[Whole, ...] = ()  # grown dim of every dim of the source
    factor: _Number = 1.0
    plus: _Number = 0.0
    eye: _Number = 0.0  # of the region's identity
    std: _Number = 0.0
    seed: Whole = 0  # of the noise, which also depends on the name and the place inside the region

    @property
    def counts(self) -> list[int]:
        """Returns the sizes of the block that is copied, per dim of the source."""
        return [self.sizes[axis] for axis in self.axes]

    def fits(self, shape: tuple[int, ...] | None) -> bool:
        """Returns whether a source of this shape has the block, which gives all of the region."""
        if shape is None or len(shape) != len(self.at) or len(shape) != len(self.axes):
            return False
        ends = map(add, self.at, self.counts)
        is_inside = min(self.at, default=0) >= 0 and not any(map(gt, ends, shape))
        return is_inside and math.prod(self.counts) == math.prod(self.sizes)

    def theirs(self, block: Tensor) -> Tensor:
        """Returns a block of the region as a view in the source's order of dims."""
        lacking = [dim for dim in range(block.ndim) if dim not in self.axes]  # of size 1
        return block.permute(*lacking, *self.axes)[(0,) * len(lacking)]

    def add_to(self, block: Tensor, inside: Sequence[int]) -> None:
        """Adds what is not copied to a block of the region, which begins `inside` it."""
        block.add_(self.plus)
        if self.eye:
            ends = zip(inside[-2:], block.shape[-2:], strict=True)
            rows, columns = (torch.arange(start, start + size) for start, size in ends)
            block.add_((rows[:, None] == columns) * self.eye)
        if self.std:  # drawn whole, so that it does not depend on what a rank asks for
            key = f"grow/{self.seed}/{self.name}".encode()
            number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            drawn = torch.randn(self.sizes, generator=torch.Generator().manual_seed(number))
            block.add_(block_of(drawn, inside, block.shape) * self.std)


def takes_to_json(takes: Sequence[Take]) -> list[list[Any]]:
    """Returns takes as JSON values, a list of their fields each; copies need no more than six."""
    return [[*(take[:6] if take[6:] == (1.0, 0.0, 0.0, 0.0, 0) else take)] for take in takes]


# Regions -----------------------------------------------------------------------------------------

_Region = TypeVar("_Region", Piece, Take)


def _by_name(regions: Sequence[_Region]) -> dict[str, list[tuple[_Region, Chunk]]]:
    """Returns the regions of every tensor, each beside the chunk of it that it is."""
    found: dict[str, list[tuple[_Region, Chunk]]] = {}
    for region in regions:
        chunk = Chunk(offsets=region.start, sizes=region.sizes, file="", start=0, length=0)
        found.setdefault(region.name, []).append((region, chunk))
    return found


def _extent(parts: Sequence[tuple[Any, Chunk]]) -> tuple[int, ...]:
    """Returns the shape of a tensor that regions cover."""
    ends = [map(sum, zip(one.offsets, one.sizes, strict=True)) for _, one in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _overlapping(
    parts: Sequence[tuple[_Region, Chunk]], block: Tensor, offsets: Sequence[int]
) -> Iterator[tuple[_Region, list[int], Tensor]]:
    """Yields the regions that a block overlaps: where in each, and the view of the block there."""
    sizes = tuple(block.shape)
    asked = LocalShard(sizes, (Slice(tuple(offsets), sizes, (0,) * len(sizes)),))
    for region, chunk in parts:
        if sizes and not -chunk.sizes[0] < chunk.offsets[0] - offsets[0] < sizes[0]:
            continue  # as most of the many regions of a bank
        for inside, here, extent in overlaps(chunk, asked):
            yield region, inside, block_of(block, here, extent)


def refuse_gaps(
    what: str,
    regions: Sequence[_Region],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Checks that regions give every element of their tensors exactly once.

    Args:
        what: they are of, for the message.
        regions: of any tensors.
        shapes: of these tensors, by name; none: where their regions end.

    Raises:
        CheckpointError: lists the tensors with parts that are missing or there twice.
    """
    tensors = {
        name: StoredTensor(
            dtype="",
            shape=_extent(own) if shapes is None else shapes[name],
            chunks=[chunk for _, chunk in own],
        )
        for name, own in _by_name(regions).items()
    }
    if gaps := audit(Index(tensors=tensors), {}):
        listed = some_of(gaps, between="\n  ", most=1000)
        raise CheckpointError(f"{what}: does not give every element of the model once:\n  {listed}")


# Readers -----------------------------------------------------------------------------------------


class BlockReader(ABC):
    """Reads blocks of tensors under their names in a checkpoint, "model.<name>" for weights."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        return self._shapes.get(name)

    @abstractmethod
    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills the block of a tensor that begins at `offsets`, in place and in its dtype."""

    def weight(
        self, name: str, dtype: torch.dtype = torch.float32, *, entry: int | None = None
    ) -> Tensor:
        """Returns a weight of the model by its name there, whole or one `entry` of its first dim."""
        shape = self.shape(f"model.{name}") or ()
        sizes, start = shape, [0] * len(shape)
        if entry is not None:
            sizes, start[0] = (1, *shape[1:]), entry
        block = torch.empty(sizes, dtype=dtype)
        self.fill(block, f"model.{name}", start)
        return block


class StoredReader(BlockReader):
    """Reads a checkpoint. It keeps the last tensor's chunks, which hold the experts that come next."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        super().__init__({name: one.shape for name, one in stored.index.tensors.items()})
        self._stored = stored
        self._kept: dict[tuple[str, str, int], Tensor] = {}  # by name, file and start

    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills the block of a tensor that begins at `offsets`."""
        parts: Any = [(chunk, chunk) for chunk in self._stored.index.tensors[name].chunks]
        for chunk, inside, view in _overlapping(parts, block, offsets):
            view.copy_(block_of(self._values(name, chunk), inside, view.shape))

    def _values(self, name: str, chunk: Chunk) -> Tensor:
        key = name, chunk.file, chunk.start
        if key not in self._kept:
            num_bytes = chunk.length + sum(each.nbytes for each in self._kept.values())
            if num_bytes > _KEPT_BYTES or any(kept[0] != name for kept in self._kept):
                self._kept.clear()
            self._kept[key] = read_chunk(self._stored, name, chunk)
        return self._kept[key]


class PublishedReader(BlockReader):
    """Reads a published folder under our names; a piece without a key is zeros."""

    def __init__(self, folder: PublishedFolder, pieces: Sequence[Piece]) -> None:
        """Checks that the folder has the pieces, and that they give every element once."""
        folder.check(pieces)
        refuse_gaps(str(folder.path), pieces)
        self._folder, self._parts = folder, _by_name(pieces)
        super().__init__({f"model.{name}": _extent(own) for name, own in self._parts.items()})

    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills the block of a tensor that begins at `offsets`."""
        parts = self._parts[name.removeprefix("model.")]
        for piece, inside, view in _overlapping(parts, block, offsets):
            at = [start + more for start, more in zip(piece.start, inside, strict=True)]
            view.copy_(self._folder.read(piece, at, view.shape) if piece.key else torch.zeros(()))


class GrownReader(BlockReader):
    """Reads a model that has grown out of the one that another reader reads."""

    def __init__(self, below: BlockReader, takes: Sequence[Take]) -> None:
        """Checks that the takes give every element of a tensor once, from blocks that are there."""
        refuse_gaps("the growth", takes)
        self._below, self._parts = below, _by_name(takes)
        super().__init__({name: _extent(own) for name, own in self._parts.items()})
        for take in takes:
            if take.source and not take.fits(below.shape(f"model.{take.source}")):
                raise CheckpointError(
                    f"the growth: {take.name} copies {take.counts} at {take.at} of {take.source}, which is "
                    f"{below.shape(f'model.{take.source}')}"
                )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        return self._shapes.get(_own_name(name)[1]) or self._below.shape(name)

    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Fills the block of a tensor that begins at `offsets`."""
        slot, own = _own_name(name)
        if own not in self._parts:
            return self._below.fill(block, name, offsets)
        power = _POWERS.get(slot, 0)
        found = _overlapping(self._parts[own], block, offsets)
        for take, inside, view in sorted(found, key=lambda each: each[0].at):  # as they are stored
            factor = take.factor**power
            if factor == 1 and (power != 1 or not (take.plus or take.eye or take.std)):
                self._copy(take, slot, inside, view)
                continue
            wide = torch.empty(view.shape, dtype=torch.promote_types(view.dtype, torch.float32))
            self._copy(take, slot, inside, wide)
            wide.mul_(factor)
            if power == 1:  # of weights
                take.add_to(wide, inside)
            view.copy_(wide)

    def _copy(self, take: Take, slot: str, inside: Sequence[int], block: Tensor) -> None:
        """Fills a block of a take's region with what it copies."""
        name = f"{slot}.{take.source}"
        if not take.source or (slot != "model" and self._below.shape(name) is None):
            block.zero_()  # also the state of what the optimizer before did not keep
            return
        at = [first + inside[axis] for first, axis in zip(take.at, take.axes, strict=True)]
        self._below.fill(take.theirs(block), name, at)


def _own_name(name: str) -> tuple[str, str]:
    """Returns the slot of a tensor, "model" or "optimizer.<slot>", and the parameter's name."""
    first, _, rest = name.partition(".")
    if first == "model":
        return first, rest
    slot, _, own = rest.partition(".")
    return f"{first}.{slot}", own
