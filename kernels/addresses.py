"""Records of what an exchange sends: to which rank every route goes, and what is written down of it.

Legend: N routes, E experts, P ranks, U source rows, T target rows, B blocks of routes, b blocks of
rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# What is counted of an exchange, as columns.
ROWS, ROUTES, TARGETS = 0, 1, 2


@dataclass(frozen=True)
class Addresses:
    """Holds N routes and the rank of every expert.

    `into_sources`: the target rows are the source rows, one by one.
    """

    source_N: Tensor  # int64, as the following two
    target_N: Tensor
    expert_N: Tensor
    rank_E: Tensor  # int32
    slot_E: Tensor  # int32: its number on that rank
    num_sources: int
    num_targets: int
    num_ranks: int
    into_sources: bool = False


@dataclass(frozen=True)
class BlockCounts:
    """Holds what programs need of each other: counts of blocks of routes and of blocks of rows."""

    base_PB: Tensor  # int32, as all: how many routes of a rank earlier blocks have
    sources_b: Tensor  # pairs of a block of source rows
    targets_b: Tensor | None


@dataclass(frozen=True)
class SendCounts:
    """Holds what goes to every rank, and the number of every row among those that do.

    The numbers are −1 where a row does not go there; `number_PT` is None where target rows are the
    source rows. `blocks` is of Triton's kernels alone.
    """

    counts_P3: Tensor  # int64: distinct rows, routes, distinct target rows
    destination_N: Tensor  # int32
    number_PU: Tensor  # int32
    number_PT: Tensor | None  # int32
    blocks: BlockCounts | None = None


@dataclass(frozen=True)
class RowPairs:
    """Lists distinct (rank, row) pairs by rank, and their places in it by row.

    There are at most N; what stands after the last has no meaning.
    """

    row_N: Tensor  # int32, as the following two
    by_row_N: Tensor  # places in `row_N`, in the order of (row, rank)
    first_U: Tensor  # where every row's places begin in `by_row_N`

    def first(self, num_pairs: int) -> "RowPairs":
        """Returns the lists without what stands after the last pair."""
        return RowPairs(self.row_N[:num_pairs], self.by_row_N[:num_pairs], self.first_U)


@dataclass(frozen=True)
class PackedSends:
    """Holds what travels: the routes by rank, and which rows go with them.

    The integers of the metadata (slot, row, target, as numbers of the rank's own) are the
    bits of floats, so that the weight's gradient comes back the same way.
    """

    metadata_N4: Tensor  # of the weights' dtype: slot, row, target, weight
    place_N: Tensor  # int32: where each route stands in it
    sources: RowPairs
    targets: RowPairs | None  # None: as `sources`


INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide as a weight
