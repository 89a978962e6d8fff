"""Reads a trained model as one that has grown from it: a table of regions, and what each of them copies.

A reader returns blocks of named tensors. The lowest one reads a checkpoint or a published folder; a
growth wraps the one below, and further growths wrap that. A tensor of the grown model without a `Take` is the one
of that name before. A rank asks for its own slices alone, one at a time, and a block of them costs what it
overlaps below, so a grown start needs no more memory than any other.

The optimizer's state goes through the same table. Where a weight is multiplied by c and the function
undoes it, its gradient is divided by c; the averages of weights change as the weights do. A region that
copies nothing has a state of zeros.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...data_pipeline.words import some_of
from ..average import AVERAGE, RECENT
from ..local_shard import LocalShard, Slice, block_of
from .format import CheckpointError, Chunk, Index, StoredCheckpoint, StoredTensor, audit
from .loading import dtype_named, overlaps, read_chunk
from .pieces import Piece, PublishedFolder

_AS_WEIGHTS = ("model", f"optimizer.{AVERAGE}", f"optimizer.{RECENT}")
# Powers of a take's factor that the state of an optimizer is multiplied by.
_POWERS = {
    "optimizer.exp_avg": -1,
    "optimizer.exp_avg_sq": -2,
    "optimizer.momentum_buffer": -1,
}


@dataclass(frozen=True)
class Take:
    """Maps a region of a grown tensor to a block of a tensor of the model before.

    Its values are factor · block + plus + eye · I + std · N(0, 1).
    """

    name: str  # of the grown tensor, without "model."
    start: tuple[int, ...]  # of the region
    sizes: tuple[int, ...]
    source: str = ""  # of the model before; "": nothing is read
    at: tuple[int, ...] = ()  # start of the block, per dim of the source
    axes: tuple[int, ...] = ()  # grown dim of every dim of the source
    factor: float = 1.0
    plus: float = 0.0
    eye: float = 0.0  # of the region's identity
    std: float = 0.0
    seed: int = 0  # of the noise, which also depends on the name and the place inside the region

    @property
    def piece(self) -> Piece:
        """Returns the region as that of a piece, whose source has only the block."""
        return Piece(self.source, self.name, self.start, self.sizes, self.axes)

    def changed(self, block: Tensor, offsets: Sequence[int]) -> Tensor:
        """Returns the values of a block of the region, of what was copied there.

        Args:
            block: of the region, in the grown order of dims.
            offsets: of the block in the region.
        """
        if (self.factor, self.plus, self.eye, self.std) == (1.0, 0.0, 0.0, 0.0):
            return block
        wide = block.to(torch.promote_types(block.dtype, torch.float32)) * self.factor + self.plus
        if self.eye:
            rows, columns = (
                torch.arange(start, start + size)
                for start, size in zip(offsets[-2:], block.shape[-2:], strict=True)
            )
            wide = wide + self.eye * (rows[:, None] == columns)
        if self.std:  # drawn whole, so that it does not depend on what a rank asks for
            drawn = torch.randn(self.sizes, generator=self._generator())
            wide = wide + self.std * block_of(drawn, offsets, block.shape)
        return wide

    def _generator(self) -> torch.Generator:
        digest = hashlib.blake2b(f"grow/{self.seed}/{self.name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def takes_to_json(takes: Sequence[Take]) -> list[list[Any]]:
    """Returns takes as JSON values, a list of their fields each."""
    return [[*vars(take).values()] for take in takes]


def takes_from_json(rows: Sequence[Sequence[Any]]) -> list[Take]:
    """Returns the takes that `takes_to_json` described."""
    return [
        Take(name, tuple(start), tuple(sizes), source, tuple(at), tuple(axes), *values)
        for name, start, sizes, source, at, axes, *values in rows
    ]


# Readers -----------------------------------------------------------------------------------------


class BlockReader(Protocol):
    """Reads blocks of tensors under their names in a checkpoint, "model.<name>" for weights."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        ...

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of a tensor, on the CPU."""
        ...


def read_weight(reader: BlockReader, name: str) -> Tensor:
    """Returns a whole weight of a model by its name there.

    Raises:
        CheckpointError: there is none of this name.
    """
    shape = reader.shape(f"model.{name}")
    if shape is None:
        raise CheckpointError(f"there is no {name}")
    return reader.read(f"model.{name}", (0,) * len(shape), shape)


class StoredReader:
    """Reads a checkpoint. It keeps the last chunk, which may hold the experts that come next."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self._last: tuple[Chunk | None, Tensor] = (None, torch.empty(0))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        found = self._stored.index.tensors.get(name)
        return None if found is None else found.shape

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of a tensor."""
        tensor = self._stored.index.tensors[name]
        block = torch.empty(tuple(sizes), dtype=dtype_named(tensor.dtype))
        wanted = _asked(tensor.shape, offsets, sizes)
        for chunk in tensor.chunks:
            for there, here, extent in overlaps(chunk, wanted):
                if self._last[0] is not chunk:
                    self._last = (chunk, read_chunk(self._stored, name, chunk))
                block_of(block, here, extent).copy_(block_of(self._last[1], there, extent))
        return block


class PublishedReader:
    """Reads a published folder under our names; a piece without a key is zeros."""

    def __init__(self, folder: PublishedFolder, pieces: Sequence[Piece]) -> None:
        """Checks that the folder has the pieces, and that they give every element once."""
        folder.check([piece for piece in pieces if piece.key])
        refuse_gaps(str(folder.path), pieces)
        self._folder, self._pieces = folder, _by_name(pieces)
        self._shapes = {name: _extent(own) for name, own in self._pieces.items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        return self._shapes.get(name.removeprefix("model."))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of a tensor."""
        return _filled(self._pieces[name.removeprefix("model.")], offsets, sizes, self._part)

    def _part(self, piece: Piece, inside: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if not piece.key:
            return torch.zeros(tuple(sizes))
        offsets = [start + more for start, more in zip(piece.start, inside, strict=True)]
        return self._folder.read(piece, offsets, sizes)


class GrownReader:
    """Reads a model that has grown out of the one that another reader reads."""

    def __init__(self, below: BlockReader, takes: Sequence[Take]) -> None:
        """Checks the table against the model before.

        Raises:
            CheckpointError: it does not give every element of a tensor once, or copies what is not there.
        """
        self._below, self._takes = below, _by_name(takes)
        self._shapes = {name: _extent(own) for name, own in self._takes.items()}
        refuse_gaps("the growth", takes)
        for take in takes:
            found = below.shape(f"model.{take.source}") if take.source else ()
            ends = [at + size for at, size in zip(take.at, take.piece.counts, strict=True)]
            if found is None or [*map(min, ends, found)] != ends or len(ends) != len(found):
                there = "no such tensor" if found is None else list(found)
                raise CheckpointError(f"{take.name} copies {take.source} up to {ends}, of {there}")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        return self._shapes.get(_own_name(name)[1]) or self._below.shape(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of a tensor."""
        slot, own = _own_name(name)
        if own not in self._takes:
            return self._below.read(name, offsets, sizes)
        return _filled(self._takes[own], offsets, sizes, partial(self._part, slot))

    def _part(self, slot: str, take: Take, inside: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of a take's region, of the weights or of a slot of the optimizer."""
        below = f"{slot}.{take.source}"
        block = torch.zeros(tuple(sizes))
        if take.source and (slot == "model" or self._below.shape(below) is not None):
            at = [first + inside[axis] for first, axis in zip(take.at, take.axes, strict=True)]
            copied = self._below.read(below, at, [sizes[axis] for axis in take.axes])
            block = take.piece.ours(copied)
        if slot in _AS_WEIGHTS:
            return take.changed(block, inside)
        power = _POWERS.get(slot, 0)
        return block if take.factor == 1 or not power else block * take.factor**power


_Region = TypeVar("_Region", Piece, Take)


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
            chunks=[*map(_as_chunk, own)],
        )
        for name, own in _by_name(regions).items()
    }
    if gaps := audit(Index(tensors=tensors), {}):
        listed = some_of(gaps, between="\n  ", most=1000)
        raise CheckpointError(f"{what}: does not give every element of the model once:\n  {listed}")


def _by_name(regions: Sequence[_Region]) -> dict[str, list[_Region]]:
    found: dict[str, list[_Region]] = {}
    for region in regions:
        found.setdefault(region.name, []).append(region)
    return found


def _extent(regions: Sequence[_Region]) -> tuple[int, ...]:
    """Returns the shape of a tensor that regions cover."""
    ends = [map(sum, zip(one.start, one.sizes, strict=True)) for one in regions]
    return tuple(map(max, zip(*ends, strict=True)))


def _as_chunk(region: Piece | Take) -> Chunk:
    return Chunk(offsets=region.start, sizes=region.sizes, file="", start=0, length=0)


def _own_name(name: str) -> tuple[str, str]:
    """Returns the slot of a tensor, "model" or "optimizer.<slot>", and the parameter's name."""
    first, _, rest = name.partition(".")
    if first == "model":
        return first, rest
    slot, _, own = rest.partition(".")
    return f"{first}.{slot}", own


def _asked(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> LocalShard:
    """Returns a block as the one slice of a shard."""
    return LocalShard(tuple(shape), (Slice(tuple(offsets), tuple(sizes), (0,) * len(sizes)),))


def _filled(
    regions: Sequence[_Region],
    offsets: Sequence[int],
    sizes: Sequence[int],
    part: Callable[[_Region, Sequence[int], Sequence[int]], Tensor],
) -> Tensor:
    """Returns a block, filled with the parts of regions that overlap it."""
    block, asked, count = None, _asked(sizes, offsets, sizes), 0
    for region in regions:
        if sizes and not -region.sizes[0] < region.start[0] - offsets[0] < sizes[0]:
            continue  # as most of the many regions of a bank
        for inside, here, extent in overlaps(_as_chunk(region), asked):
            values = part(region, inside, extent)
            block = torch.zeros(tuple(sizes), dtype=values.dtype) if block is None else block
            block = block.to(torch.promote_types(block.dtype, values.dtype))
            block_of(block, here, extent).copy_(values)
            count += values.numel()
    if block is None or count != math.prod(sizes):
        raise CheckpointError(f"{regions[0].name}: has no values for all of {list(sizes)}")
    return block
