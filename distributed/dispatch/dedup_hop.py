"""One deduplicated all-to-all: a row is sent once per destination, and one output row returns per target.

A route names its source row, its destination, its expert's slot there, and its target row. The
exchange sends
  1. the rows, one for every distinct (destination, source row), in that order;
  2. the routes' metadata: slot, index of the row, index of the target row, and gate weight, as four
     columns. Integers are stored as the bits of floats, so the weight's gradient returns the same way.
One row returns for every distinct (destination, target row), summed over the destination's experts.
The source adds them in destination order, which is fixed. kernels/sends.py packs the routes.

No step reads a value from the device; the caller provides the sizes (`ExchangeSizes`).

Legend: U source rows, T target rows, N routes, P ranks of the communicator, M distinct pairs, D
width.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.calls import ROUTES, ROWS, TARGETS, Addresses, PackedSends, RowPairs
from ...kernels.sends import count_sends, gather_pairs, pack_sends, sum_pairs, unpack_sends
from ...model.execution.recompute import save_combine
from ...model.routing import Routes
from .exchange import AsyncCollective, Communicator, Counters
from .expert_map import ExpertAddresses


@dataclass(frozen=True)
class ExchangeSizes:
    """Numbers of rows, routes and targets sent to and received from each rank; (P, 3) each."""

    sent: list[list[int]]
    received: list[list[int]]
    received_P3: Tensor  # the same on the device

    def of(self, column: int) -> tuple[list[int], list[int]]:
        """Returns one column's numbers sent to and received from each rank."""
        return [row[column] for row in self.sent], [row[column] for row in self.received]


def read_sizes(counters: Counters, *tables_P3: Tensor) -> list[ExchangeSizes]:
    """Reads tables (sent, received, sent, received, …) on the host in one synchronisation."""
    rows = iter(counters.read(torch.cat(tables_P3)))
    lists = [[next(rows) for _ in table_P3] for table_P3 in tables_P3]
    pairs = range(0, len(tables_P3), 2)
    return [ExchangeSizes(lists[i], lists[i + 1], tables_P3[i + 1]) for i in pairs]


class DedupExchange:
    """One rank's side of one deduplicated exchange in one pass.

    Args:
        places: destination rank and slot of every expert.
        num_slots: number of slots on this rank that received routes may name.
    """

    def __init__(
        self,
        communicator: Communicator,
        routes: Routes,
        places: ExpertAddresses,
        *,
        num_sources: int,
        num_slots: int,
    ) -> None:
        self.communicator, self.routes, self.num_slots = communicator, routes, num_slots
        self.addresses = Addresses(
            routes.source_N,
            routes.target_N,
            routes.expert_N,
            places.rank_E,
            places.slot_E,
            num_sources,
            routes.num_targets,
            communicator.num_ranks,
            into_sources=routes.target_N is routes.source_N and routes.num_targets == num_sources,
        )
        self._counts = count_sends(self.addresses)

    @property
    def counts_P3(self) -> Tensor:
        """Returns the numbers of rows, routes and targets sent to each rank."""
        return self._counts.counts_P3

    def prepare(self) -> None:
        """Packs the routes while the counts are in flight; otherwise `start` packs them."""
        _ = self._packed

    def start(self, x_UD: Tensor, sizes: ExchangeSizes, *, is_inner: bool = False) -> "DedupRows":
        """Starts sending rows and routes; `is_inner`: within another exchange. Collective."""
        # Packing comes first in any case: a recomputed pass must create tensors in the same order.
        packed, communicator = self._packed, self.communicator
        pairs = packed.sources.first(sum(row[ROWS] for row in sizes.sent))
        rows_MD = gather_pairs(x_UD, pairs)
        returning = pairs
        if packed.targets is not None:
            returning = packed.targets.first(sum(row[TARGETS] for row in sizes.sent))
        rows = communicator.all_to_all(rows_MD, *sizes.of(ROWS))
        metadata = communicator.all_to_all(packed.metadata_N4, *sizes.of(ROUTES))
        return DedupRows(communicator, self.num_slots, sizes, rows, metadata, returning, is_inner)

    @cached_property
    def _packed(self) -> PackedSends:
        return pack_sends(self.addresses, self._counts, self.routes.weight_N)


@dataclass(frozen=True)
class DedupRows:
    """Distinct rows in flight, and the routes with which this rank's experts read them.

    Rows and targets are numbered in order of arrival; experts are this rank's slots.
    """

    communicator: Communicator
    num_slots: int
    sizes: ExchangeSizes
    rows: AsyncCollective
    metadata: AsyncCollective
    returning: RowPairs  # of the target rows whose sums return
    is_inner: bool  # the outer exchange saves the sums for a recomputation

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self._received[0]

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._received[1]

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sends one output row back per received target, and sums those that return.

        Returns:
            (num_targets, D), summed over ranks in rank order.
        """
        sent, received = self.sizes.of(TARGETS)
        back = self.communicator.all_to_all(y_TD, received, sent, is_combine=True)
        sums = sum_pairs(back.wait(), self.returning)
        return sums if self.is_inner else save_combine(sums)

    @cached_property
    def _received(self) -> tuple[Tensor, Routes]:
        x_UD, metadata_N4 = self.rows.wait(), self.metadata.wait()
        came = unpack_sends(metadata_N4, self.sizes.received_P3, self.num_slots)
        routes = Routes(
            came.source_R,
            came.slot_R,
            came.weight_R,
            came.target_R,
            self.num_slots,
            num_targets=sum(self.sizes.of(TARGETS)[1]),
            per_source=0,
            per_target=0,
        )
        return x_UD, routes
