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

Destinations are (chunk, rank), chunk-major: a chunk is a set of tokens whose routes travel
together, and is a slice of everything that was laid out here. No step reads a number from the
device; the sizes come from outside (`ExchangeSizes`), read once.

Legend: U source rows, T target rows, N routes, P ranks of the communicator,
V = chunks · P destinations, M distinct pairs, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.addresses import ROUTES, ROWS, TARGETS, Addresses, PackedSends
from ...kernels.sends import count_sends, gather_pairs, pack_sends, sum_pairs, unpack_sends
from ...model.moe import PendingRows
from ...model.routing import Routes
from .exchange import AsyncCollective, Communicator
from .expert_map import ExpertPlaces


@dataclass(frozen=True)
class ExchangeSizes:
    """Counts of rows, routes and targets: of every destination, and of every (chunk, source rank)
    that comes here; (V, 3) each.
    """

    sent: list[list[int]]
    received: list[list[int]]
    received_V3: Tensor  # the same on the device

    def of(self, chunk: slice, column: int) -> tuple[list[int], list[int]]:
        """Returns what goes to every rank and what comes from it in one chunk."""
        sent = [row[column] for row in self.sent[chunk]]
        received = [row[column] for row in self.received[chunk]]
        return sent, received


class DedupAllToAll:
    """One deduplicated exchange of one pass, seen by one rank: sender, and receiver of what the
    others send.

    Args:
        places: the destination's rank and the slot there, of every expert that a route may name.
        num_slots: how many slots the routes that come here may name.
        num_chunks: parts in which the rows travel.
        rows_per_token: neighbouring source rows that travel in one chunk.
    """

    def __init__(
        self,
        communicator: Communicator,
        routes: Routes,
        places: ExpertPlaces,
        *,
        num_sources: int,
        num_slots: int,
        num_chunks: int = 1,
        rows_per_token: int = 1,
    ) -> None:
        self.communicator, self.routes, self.num_slots = communicator, routes, num_slots
        self.num_chunks = num_chunks
        self.addresses = Addresses(
            routes.source_N,
            routes.target_N,
            routes.expert_N,
            places.rank_E,
            places.slot_E,
            num_sources,
            routes.num_targets,
            communicator.num_ranks,
            num_chunks,
            rows_per_token,
            into_sources=routes.target_N is routes.source_N and routes.num_targets == num_sources,
        )
        self._counts = count_sends(self.addresses)

    @property
    def counts_V3(self) -> Tensor:
        """Returns how many rows, routes and targets go to every destination."""
        return self._counts.counts_V3

    def prepare(self) -> None:
        """Does what can be done before the sizes are known, in the time in which counts travel.

        `dispatch` does it where this was not called.
        """
        _ = self._packed

    def dispatch(self, x_UD: Tensor, sizes: ExchangeSizes) -> list["DedupChunk"]:
        """Starts to send every chunk of rows and routes. Collective."""
        # First, whether `prepare` was called or not: a recomputed pass must make tensors in the
        # order of the first.
        packed = self._packed
        pairs = packed.sources.first(sum(row[ROWS] for row in sizes.sent))
        chunks = self._start_chunks(gather_pairs(x_UD, pairs), packed.metadata_N4, sizes)
        self._returning = pairs
        if packed.targets is not None:
            self._returning = packed.targets.first(sum(row[TARGETS] for row in sizes.sent))
        return chunks

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up the outputs that come back in all chunks, (T, D)."""
        received = [pending.wait() for pending in outputs]
        rows = received[0] if len(received) == 1 else torch.cat(received)
        return sum_pairs(rows, self._returning)

    @cached_property
    def _packed(self) -> PackedSends:
        return pack_sends(self.addresses, self._counts, self.routes.weight_N)

    def _start_chunks(
        self, rows_MD: Tensor, metadata_N4: Tensor, sizes: ExchangeSizes
    ) -> list["DedupChunk"]:
        num_ranks = self.communicator.num_ranks
        slices = [slice(i * num_ranks, (i + 1) * num_ranks) for i in range(self.num_chunks)]
        rows = split_rows(rows_MD, [sum(sizes.of(chunk, ROWS)[0]) for chunk in slices])
        metadata = split_rows(metadata_N4, [sum(sizes.of(chunk, ROUTES)[0]) for chunk in slices])
        chunks = []
        for i, destinations in enumerate(slices):
            started = self.communicator.all_to_all(rows[i], *sizes.of(destinations, ROWS))
            described = self.communicator.all_to_all(metadata[i], *sizes.of(destinations, ROUTES))
            chunks.append(DedupChunk(self, destinations, sizes, started, described))
        return chunks


@dataclass(frozen=True)
class ReceivedChunk:
    """Distinct rows that came in a chunk, and the routes that read them."""

    x_UD: Tensor
    routes: Routes  # rows and targets are numbered as they came; an expert is its slot here


@dataclass(frozen=True)
class DedupChunk:
    """One chunk of a deduplicated exchange under way: what the experts of this rank must serve."""

    exchange: DedupAllToAll
    destinations: slice
    sizes: ExchangeSizes
    rows: AsyncCollective
    metadata: AsyncCollective

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self.received.x_UD

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self.received.routes

    @cached_property
    def received(self) -> ReceivedChunk:
        """Waits for rows and routes."""
        x_UD, metadata_N4 = self.rows.wait(), self.metadata.wait()
        received_P3, num_slots = self.sizes.received_V3[self.destinations], self.exchange.num_slots
        came = unpack_sends(metadata_N4, received_P3, num_slots)
        routes = Routes(
            came.source_R,
            came.slot_R,
            came.weight_R,
            came.target_R,
            num_slots,
            num_targets=sum(self.sizes.of(self.destinations, TARGETS)[1]),
            per_source=0,
            per_target=0,
        )
        return ReceivedChunk(x_UD, routes)

    def send_back(self, y_TD: Tensor) -> AsyncCollective:
        """Starts to send one row of outputs back for every target that came."""
        sent, received = self.sizes.of(self.destinations, TARGETS)
        return self.exchange.communicator.all_to_all(y_TD, received, sent, is_combine=True)


def count_of(values_N: Tensor, num_values: int) -> Tensor:
    """Counts how often each value occurs; unlike `bincount` it asks a GPU for nothing."""
    return torch.zeros(num_values, dtype=torch.int64, device=values_N.device).scatter_add_(
        0, values_N, torch.ones_like(values_N)
    )


def split_rows(rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Splits rows into neighbouring pieces; returns the rows themselves where there is one."""
    return (rows,) if len(sizes) == 1 else rows.split(sizes)
