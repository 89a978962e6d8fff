"""Compares the ranks' results with a single rank's, piece by piece."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .contract import Shard
from .ranks.job import GATES, INPUT, OUTPUT, PARAMETER, Arrays
from .scenes import Batch

Array = NDArray[np.float64]
Take = Callable[[Arrays], Array]
Kind = Literal["rows", "gates", "router", "replicated", "experts"]
RTOL = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


@dataclass(frozen=True)
class World:
    """Holds what comparing needs of the layer: the plan of `rank.describe`, and the shards."""

    size: int
    plan: Mapping[str, Any]
    shards: Sequence[Mapping[str, Shard | None]]  # by rank: local name -> where it lies

    @property
    def own_tokens(self) -> bool:
        """Tells whether every rank has its own rows."""
        return self.plan["contract"]["tokens"] == "own"

    @property
    def rtol(self) -> float:
        """Returns the relative error from which a piece counts as wrong."""
        return self.plan["contract"]["rtol"] or RTOL.get(self.plan["dtype"], 1e-4)

    @property
    def scale(self) -> float:
        """Returns the factor from the sum of the ranks' losses to the loss of weight gradients."""
        mean = self.plan["contract"]["scaling"] == "mean" and self.own_tokens
        return 1 / self.size if mean else 1.0

    def experts(self) -> dict[str, int | None]:
        """Returns the reference's expert parameters with the dimension of experts; None if listed."""
        return {shard.full: shard.dim for rank in self.shards for shard in rank.values() if shard}

    def owner(self, expert: int) -> int | None:
        """Returns the rank that holds an expert; None if all ranks hold all."""
        count = self.plan["facts"]["num_experts"]
        for rank, shards in enumerate(self.shards):
            for shard in shards.values():
                if shard is None or shard.dim is None:
                    continue
                each = self.plan["full"][shard.full][shard.dim] // count
                if shard.start <= expert * each < shard.stop:
                    return rank
        return expert * self.size // count if self.experts() else None


@dataclass(frozen=True)
class Piece:
    """Holds one tensor of one rank, or a sum over ranks (`rank` None), and how to select it
    elsewhere.
    """

    quantity: str
    kind: Kind
    rank: int | None
    got: Array
    want: Array
    take: Take  # the same part of any result of the reference, scaled alike

    @property
    def error(self) -> float:
        """Returns the relative error in the 2-norm where the reference is finite; infinity for NaN."""
        return relative_error(self.got, self.want)


def relative_error(got: Array, want: Array) -> float:
    """Returns |got - want| / |want|, with a floor of 0.01 per element if `want` is zero."""
    if got.shape != want.shape:
        return float("inf")
    counts = np.isfinite(want)
    got, want = got[counts], want[counts]
    if not np.isfinite(got).all():
        return float("inf")
    size = max(float(np.linalg.norm(want)), 1e-2 * np.sqrt(max(1, want.size)))
    return float(np.linalg.norm(got - want)) / size


def pieces(world: World, batch: Batch, reference: Arrays, ranks: Sequence[Arrays]) -> list[Piece]:
    """Returns everything that can be compared in one scene."""
    found = _row_pieces(world, batch, reference, ranks)
    for name in ranks[0]:
        if name.startswith(PARAMETER):
            found += _parameter_pieces(world, name, reference, ranks)
    listed = [name for rank in ranks[1:] for name in rank if name not in ranks[0]]
    for name in dict.fromkeys(listed):
        if name.startswith(PARAMETER):
            found += _parameter_pieces(world, name, reference, ranks)
    return found


def _row_pieces(
    world: World, batch: Batch, reference: Arrays, ranks: Sequence[Arrays]
) -> list[Piece]:
    found = []
    for quantity in (OUTPUT, INPUT, GATES):
        for rank, played in enumerate(ranks):
            if quantity not in played:
                continue
            rows = batch.rows_of(rank) if world.own_tokens else slice(None)
            take = _taker(quantity, lambda values, rows=rows: values[rows])
            kind: Kind = "gates" if quantity == GATES else "rows"
            found.append(Piece(quantity, kind, rank, played[quantity], take(reference), take))
    return found


def _parameter_pieces(
    world: World, name: str, reference: Arrays, ranks: Sequence[Arrays]
) -> list[Piece]:
    bare = name.removeprefix(PARAMETER)
    found = []
    for rank, played in enumerate(ranks):
        shard = world.shards[rank].get(bare)
        if shard is not None and name in played:
            take = _shard_taker(shard, world.scale)
            quantity = f"{PARAMETER}{_pattern(shard)}"
            found.append(Piece(quantity, "experts", rank, played[name], take(reference), take))
    if found:
        return found
    take = _taker(name, lambda values: values * world.scale)
    kind: Kind = "router" if bare == world.plan["router"] else "replicated"
    if world.own_tokens and not world.plan["contract"]["finishes"]:
        total = np.sum([played[name] for played in ranks], axis=0) * world.scale
        return [Piece(name, kind, None, total, take(reference), take)]
    return [
        Piece(name, kind, rank, played[name], take(reference), take)
        for rank, played in enumerate(ranks)
    ]


def _pattern(shard: Shard) -> str:
    """Returns the common name of a list of experts: experts.*.w1."""
    if shard.dim is not None:
        return shard.full
    return ".".join("*" if part.isdecimal() else part for part in shard.full.split("."))


def _taker(key: str, part: Callable[[Array], Array]) -> Take:
    return lambda result: part(result[key])


def _shard_taker(shard: Shard, scale: float) -> Take:
    def part(values: Array) -> Array:
        if shard.dim is not None:
            values = values.take(range(shard.start, shard.stop), axis=shard.dim)
        return values * scale

    return _taker(f"{PARAMETER}{shard.full}", part)
