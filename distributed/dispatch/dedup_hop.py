"""One deduplicated all-to-all: a row goes once to every destination that wants it, and one row of
outputs comes back for every target.

A route says which source row it reads, to which destination it goes, the slot of its expert there,
and to which target row its output belongs. On the way out travel
  1. the rows: one for every distinct (destination, source row), in that order;
  2. the routes' metadata: slot, position of the row, position of the target row among those of the
     destination, and the gate weight, as four columns of one exchange; integers travel as the bits
     of floats, so that the weight's gradient comes back the same way;
and on the way back one row for every distinct (destination, target row), which the destination has
summed over its own experts. The source rank adds them up in the order of destinations: a fixed
order. What goes where is written down by kernels/sends.py.

No step reads a number from the device; the sizes come from outside (`ExchangeSizes`), read once.

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
from .expert_map import ExpertPlaces


@dataclass(frozen=True)
class ExchangeSizes:
    """Counts rows, routes and targets for every rank, and from it; (P, 3) each."""

    sent: list[list[int]]
    received: list[list[int]]
    received_P3: Tensor  # the same on the device

    def of(self, column: int) -> tuple[list[int], list[int]]:
        """Returns what goes to every rank and what comes from it."""
        return [row[column] for row in self.sent], [row[column] for row in self.received]


def read_sizes(counters: Counters, *tables_P3: Tensor) -> list[ExchangeSizes]:
    """Reads tables (sent, received, sent, received, …) on the host, all at once."""
    rows = iter(counters.read(torch.cat(tables_P3)))
    lists = [[next(rows) for _ in table_P3] for table_P3 in tables_P3]
    pairs = range(0, len(tables_P3), 2)
    return [ExchangeSizes(lists[i], lists[i + 1], tables_P3[i + 1]) for i in pairs]


class DedupExchange:
    """One deduplicated exchange of one pass, seen by one rank: sender, and receiver of what the
    others send.

    Args:
        places: the destination's rank and the slot there, of every expert that a route may name.
        num_slots: how many slots the routes that come here may name.
    """

    def __init__(
        self,
        communicator: Communicator,
        routes: Routes,
        places: ExpertPlaces,
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
        """Returns how many rows, routes and targets go to every rank."""
        return self._counts.counts_P3

    def prepare(self) -> None:
        """Does what can be done before the sizes are known, in the time in which counts travel.

        `start` does it where this was not called.
        """
        _ = self._packed

    def start(self, x_UD: Tensor, sizes: ExchangeSizes, *, is_inner: bool = False) -> "DedupRows":
        """Starts to send rows and routes; `is_inner`: within another exchange. Collective."""
        # First, whether `prepare` was called or not: a recomputed pass must make tensors in the
        # order of the first.
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
    """Distinct rows under way, and the routes that read them: what this rank's experts must serve.

    Rows and targets are numbered as they come; an expert is its slot here.
    """

    communicator: Communicator
    num_slots: int
    sizes: ExchangeSizes
    rows: AsyncCollective
    metadata: AsyncCollective
    returning: RowPairs  # of the target rows whose sums come back
    is_inner: bool  # an outer exchange keeps its sums for a recomputation

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self._received[0]

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._received[1]

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sends one row of outputs back for every target that came, and adds up what comes home.

        Returns:
            (num_targets, D); the sums of different ranks are added in the order of ranks.
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
