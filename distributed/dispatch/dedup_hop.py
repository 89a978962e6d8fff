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
order.

Destinations are (chunk, rank), chunk-major: a chunk is a set of tokens whose routes travel
together, and is a slice of everything that was laid out here. No step reads a number from the
device; the sizes come from outside (`ExchangeSizes`), read once.

Legend: U source rows, T target rows, N routes, P ranks of the communicator,
V = chunks · P destinations, M distinct pairs, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.permute import sort_by_expert
from ...model.moe import PendingRows
from ...model.routing import Routes
from .exchange import AsyncCollective, Communicator

ROWS, ROUTES, TARGETS = 0, 1, 2  # what is counted of an exchange, as columns
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class SendPlan:
    """Routes of this rank with the destination of each."""

    source_N: Tensor
    target_N: Tensor
    destination_N: Tensor
    slot_N: Tensor  # of the expert, as the destination counts its slots
    weight_N: Tensor
    num_sources: int
    num_targets: int


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
        num_slots: how many slots the routes that come here may name.
        num_chunks: parts in which the rows travel; `plan.destination_N` counts them.
    """

    def __init__(
        self, communicator: Communicator, plan: SendPlan, *, num_slots: int, num_chunks: int = 1
    ) -> None:
        self.communicator, self.plan = communicator, plan
        self.num_slots, self.num_chunks = num_slots, num_chunks
        self._num_destinations = num_chunks * communicator.num_ranks
        self.sources = self.targets = self._mask(plan.source_N, plan.num_sources)
        tokens_into_tokens = plan.target_N is plan.source_N and plan.num_targets == plan.num_sources
        if not tokens_into_tokens:
            self.targets = self._mask(plan.target_N, plan.num_targets)
        routes_V = count_of(plan.destination_N, self._num_destinations)
        self.counts_V3 = torch.stack((self.sources.counts_V, routes_V, self.targets.counts_V), 1)

    def prepare(self) -> None:
        """Does what can be done before the sizes are known, in the time in which counts travel.

        `dispatch` does it where this was not called.
        """
        _ = self.metadata_N4

    def dispatch(self, x_UD: Tensor, sizes: ExchangeSizes) -> list["DedupChunk"]:
        """Starts to send every chunk of rows and routes. Collective."""
        # First, whether `prepare` was called or not: a recomputed pass must make tensors in the
        # order of the first.
        metadata_N4 = self.metadata_N4
        pairs = self.sources.pairs(sum(row[ROWS] for row in sizes.sent))
        rows_MD: Tensor = _GatherPairs.apply(x_UD, pairs)  # pyright: ignore[reportAssignmentType]
        chunks = self._start_chunks(rows_MD, metadata_N4, sizes)
        self._returning = pairs
        if self.targets is not self.sources:
            self._returning = self.targets.pairs(sum(row[TARGETS] for row in sizes.sent))
        return chunks

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up the outputs that come back in all chunks, (T, D)."""
        received = [pending.wait() for pending in outputs]
        rows = received[0] if len(received) == 1 else torch.cat(received)
        return _SumPairs.apply(rows, self._returning)  # pyright: ignore[reportReturnType]

    @cached_property
    def metadata_N4(self) -> Tensor:
        """Returns slot, row, target and weight of every route, by destination, in the dtype of
        weights.
        """
        plan, integers = self.plan, _INTEGERS[self.plan.weight_N.dtype]
        order_N = sort_by_expert(plan.destination_N, self._num_destinations)
        source_N = target_N = self.sources.position(plan.destination_N, plan.source_N)
        if self.targets is not self.sources:
            target_N = self.targets.position(plan.destination_N, plan.target_N)
        integers_N3 = torch.stack((plan.slot_N, source_N, target_N), 1).to(integers)
        bits_N3 = integers_N3.index_select(0, order_N).view(plan.weight_N.dtype)
        return torch.cat((bits_N3, plan.weight_N.index_select(0, order_N)[:, None]), 1)

    def _mask(self, row_N: Tensor, num_rows: int) -> "DestinationMask":
        return DestinationMask(
            mask_of(self.plan.destination_N, row_N, self._num_destinations, num_rows)
        )

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
        integers_N3 = metadata_N4[:, :3].detach().contiguous().view(_INTEGERS[metadata_N4.dtype])
        slot_N, source_N, target_N = integers_N3.long().unbind(1)
        received_P3 = self.sizes.received_V3[self.destinations]
        first_P3 = received_P3.cumsum(0) - received_P3
        first_N3 = first_P3.repeat_interleave(received_P3[:, ROUTES], 0, output_size=len(slot_N))
        routes = Routes(
            source_N + first_N3[:, ROWS],
            slot_N,
            metadata_N4[:, 3],
            target_N + first_N3[:, TARGETS],
            self.exchange.num_slots,
            num_targets=sum(self.sizes.of(self.destinations, TARGETS)[1]),
            per_source=0,
            per_target=0,
        )
        return ReceivedChunk(x_UD, routes)

    def send_back(self, y_TD: Tensor) -> AsyncCollective:
        """Starts to send one row of outputs back for every target that came."""
        sent, received = self.sizes.of(self.destinations, TARGETS)
        return self.exchange.communicator.all_to_all(y_TD, received, sent, is_combine=True)


@dataclass(frozen=True)
class Pairs:
    """Distinct (destination, row) pairs: their rows in this order, and the same by row."""

    row_M: Tensor
    by_row_M: Tensor  # numbers of the pairs in order of (row, destination)
    first_U: Tensor  # where every row's pairs begin in it


class DestinationMask:
    """The true entries of a mask (V, U), numbered in its order. All but `pairs` is known before
    their number is.
    """

    def __init__(self, mask_VU: Tensor) -> None:
        self.mask_VU, self.counts_V = mask_VU, mask_VU.sum(1)

    def position(self, destination_N: Tensor, row_N: Tensor) -> Tensor:
        """Returns each pair's number among those of its destination."""
        first_V = self.counts_V.cumsum(0) - self.counts_V
        return self._number_VU[destination_N, row_N] - first_V[destination_N]

    def pairs(self, num_pairs: int) -> Pairs:
        """Returns all true entries, of which there are `num_pairs`."""
        num_destinations, num_rows = self.mask_VU.shape
        entry_M = torch.nonzero_static(self.mask_VU.flatten(), size=num_pairs).squeeze(1)
        across_M = torch.nonzero_static(self.mask_VU.T.flatten(), size=num_pairs).squeeze(1)
        row_M, destination_M = (
            across_M // max(num_destinations, 1),
            across_M % max(num_destinations, 1),
        )
        counts_U = self.mask_VU.sum(0)
        return Pairs(
            entry_M % max(num_rows, 1),
            self._number_VU[destination_M, row_M],
            counts_U.cumsum(0) - counts_U,
        )

    @cached_property
    def _number_VU(self) -> Tensor:
        return (self.mask_VU.flatten().cumsum(0) - 1).view_as(self.mask_VU)


def mask_of(destination_N: Tensor, row_N: Tensor, num_destinations: int, num_rows: int) -> Tensor:
    """Marks which destination wants which row, (V, U)."""
    mask = torch.zeros(num_destinations * num_rows, dtype=torch.bool, device=row_N.device)
    return mask.index_fill_(0, destination_N * num_rows + row_N, True).view(
        num_destinations, num_rows
    )


def count_of(values_N: Tensor, num_values: int) -> Tensor:
    """Counts how often each value occurs; unlike `bincount` it asks a GPU for nothing."""
    return torch.zeros(num_values, dtype=torch.int64, device=values_N.device).scatter_add_(
        0, values_N, torch.ones_like(values_N)
    )


def split_rows(rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Splits rows into neighbouring pieces; returns the rows themselves where there is one."""
    return (rows,) if len(sizes) == 1 else rows.split(sizes)


def _sum_by_row(rows_MD: Tensor, by_row_M: Tensor, first_U: Tensor) -> Tensor:
    """(U, D): the sum over every row's pairs in order of destination, zero where there is none."""
    if not len(rows_MD):
        return rows_MD.new_zeros(len(first_U), rows_MD.shape[1])
    return F.embedding_bag(by_row_M, rows_MD, first_U, mode="sum")


class _GatherPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UD: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(pairs.by_row_M, pairs.first_U)
        return x_UD.index_select(0, pairs.row_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_by_row(grads[0].contiguous(), *ctx.saved_tensors), None


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(pairs.row_M)
        return _sum_by_row(rows_MD, pairs.by_row_M, pairs.first_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        [row_M] = ctx.saved_tensors
        return grads[0].index_select(0, row_M), None
