"""One deduplicated hop: a row goes once to every destination that wants it, and one answer row
comes back for every target.

A route says which source row it reads, to which destination it goes, what it carries there (`load`:
the slot of its expert) and which target row its answer belongs to. On the way out travel
  1. the rows: one for every distinct (destination, source row), in that order;
  2. the routes: load, position of the row, position of the target row among those of the
     destination, and the gate weight, as four columns of one exchange; integers travel as the bits
     of floats, so that the weight's gradient comes back the same way;
and on the way home one row for every distinct (destination, target row), which the destination has
summed over its own experts. Home adds them up in the order of destinations: a fixed order.

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
from .exchange import AsyncCollective, Communicator

ROWS, ROUTES, TARGETS = 0, 1, 2  # what is counted of a hop, as columns
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class SendPlan:
    """Routes that know where they go."""

    source_N: Tensor
    target_N: Tensor
    destination_N: Tensor
    slot_N: Tensor
    weight_N: Tensor
    num_sources: int
    num_targets: int


@dataclass(frozen=True)
class ExchangeSizes:
    """Rows, routes and targets of every destination, and of every (chunk, source rank) that comes
    here; (V, 3) each.
    """

    sent: list[list[int]]
    received: list[list[int]]
    received_V3: Tensor  # the same on the device

    def of(self, chunk: slice, column: int) -> tuple[list[int], list[int]]:
        """What goes to every rank and what comes from it in one chunk."""
        return [row[column] for row in self.sent[chunk]], [
            row[column] for row in self.received[chunk]
        ]


@dataclass(frozen=True)
class ReceivedChunk:
    """What came in a chunk: distinct rows, and the routes that read them. Rows and targets are
    numbered as they came.
    """

    x_UD: Tensor
    source_N: Tensor
    target_N: Tensor
    slot_N: Tensor
    weight_N: Tensor
    num_targets: int


class DedupAllToAll:
    """One hop of one pass, seen by one rank: sender, and receiver of what the others send."""

    def __init__(self, communicator: Communicator, routes: SendPlan, num_chunks: int = 1) -> None:
        self.communicator, self.routes, self.num_chunks = communicator, routes, num_chunks
        self._num_destinations = num_chunks * communicator.num_ranks
        sources = mask_of(
            routes.destination_N, routes.source_N, self._num_destinations, routes.num_sources
        )
        self.sources = self.targets = DestinationMask(sources)
        tokens_into_tokens = (
            routes.target_N is routes.source_N and routes.num_targets == routes.num_sources
        )
        if not tokens_into_tokens:
            targets = mask_of(
                routes.destination_N, routes.target_N, self._num_destinations, routes.num_targets
            )
            self.targets = DestinationMask(targets)
        routes_V = count_of(routes.destination_N, self._num_destinations)
        self.counts_V3 = torch.stack((self.sources.counts_V, routes_V, self.targets.counts_V), 1)

    def plan(self) -> None:
        """Whatever can be done before the sizes are known: for the time in which the counts travel.
        `launch` catches it up.
        """
        _ = self.metadata_N4

    def launch(self, x_UD: Tensor, sizes: ExchangeSizes) -> list["DedupChunk"]:
        """Collective. Every chunk of rows and routes on its way."""
        num_rows, num_targets = (
            sum(row[column] for row in sizes.sent) for column in (ROWS, TARGETS)
        )
        pairs = self.sources.pairs(num_rows)
        rows_MD = _GatherPairs.apply(x_UD, pairs)
        chunks = self._launch_chunks(rows_MD, self.metadata_N4, sizes)  # pyright: ignore[reportArgumentType]
        self.home = pairs if self.targets is self.sources else self.targets.pairs(num_targets)
        return chunks

    def collect(self, collectives: Sequence[AsyncCollective]) -> Tensor:
        """(T, D): the answers that came home in all chunks, added up."""
        answers = [collective.wait() for collective in collectives]
        rows = answers[0] if len(answers) == 1 else torch.cat(answers)
        return _SumPairs.apply(rows, self.home)  # pyright: ignore[reportReturnType]

    @cached_property
    def metadata_N4(self) -> Tensor:
        """In order of destination: what every route must say, in the dtype of the gate weights."""
        routes, integers = self.routes, _INTEGERS[self.routes.weight_N.dtype]
        destination_N = routes.destination_N
        order_N = sort_by_expert(destination_N, self._num_destinations)
        source_N = target_N = self.sources.position(destination_N, routes.source_N)
        if self.targets is not self.sources:
            target_N = self.targets.position(destination_N, routes.target_N)
        said_N3 = torch.stack((routes.slot_N, source_N, target_N), 1).to(integers)
        bits_N3 = said_N3.index_select(0, order_N).view(routes.weight_N.dtype)
        return torch.cat((bits_N3, routes.weight_N.index_select(0, order_N)[:, None]), 1)

    def _launch_chunks(
        self, rows_MD: Tensor, metadata_N4: Tensor, sizes: ExchangeSizes
    ) -> list["DedupChunk"]:
        num_ranks, communicator = self.communicator.num_ranks, self.communicator
        slices = [slice(i * num_ranks, (i + 1) * num_ranks) for i in range(self.num_chunks)]
        rows = split_rows(rows_MD, [sum(sizes.of(chunk, ROWS)[0]) for chunk in slices])
        metadata = split_rows(metadata_N4, [sum(sizes.of(chunk, ROUTES)[0]) for chunk in slices])
        return [
            DedupChunk(
                self,
                chunk,
                sizes,
                communicator.launch(rows[i], *sizes.of(chunk, ROWS)),
                communicator.launch(metadata[i], *sizes.of(chunk, ROUTES)),
            )
            for i, chunk in enumerate(slices)
        ]


@dataclass(frozen=True)
class DedupChunk:
    """One chunk of a hop on its way."""

    exchange: DedupAllToAll
    destinations: slice
    sizes: ExchangeSizes
    rows: AsyncCollective
    metadata: AsyncCollective

    def wait(self) -> ReceivedChunk:
        """Waits for rows and routes."""
        x_UD, metadata_N4 = self.rows.wait(), self.metadata.wait()
        integers = _INTEGERS[metadata_N4.dtype]
        slot_N, source_N, target_N = (
            metadata_N4[:, :3].detach().contiguous().view(integers).long().unbind(1)
        )
        received_P3 = self.sizes.received_V3[self.destinations]
        first_P3 = received_P3.cumsum(0) - received_P3
        first_N3 = first_P3.repeat_interleave(
            received_P3[:, ROUTES], 0, output_size=len(metadata_N4)
        )
        num_targets = sum(self.sizes.of(self.destinations, TARGETS)[1])
        return ReceivedChunk(
            x_UD,
            source_N + first_N3[:, ROWS],
            target_N + first_N3[:, TARGETS],
            slot_N,
            metadata_N4[:, 3],
            num_targets,
        )

    def answer(self, y_TD: Tensor) -> AsyncCollective:
        """One row for every target that came, on its way home."""
        sent, received = self.sizes.of(self.destinations, TARGETS)
        return self.exchange.communicator.launch(y_TD, received, sent, is_combine=True)


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
        """Each pair's number among those of its destination."""
        first_V = self.counts_V.cumsum(0) - self.counts_V
        return self._number_VU[destination_N, row_N] - first_V[destination_N]

    def pairs(self, num_pairs: int) -> Pairs:
        """All of them, of which there are `num_pairs`."""
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
    """(V, U): which destination wants which row."""
    mask = torch.zeros(num_destinations * num_rows, dtype=torch.bool, device=row_N.device)
    return mask.index_fill_(0, destination_N * num_rows + row_N, True).view(
        num_destinations, num_rows
    )


def count_of(values_N: Tensor, num_values: int) -> Tensor:
    """How often each value occurs. Unlike `bincount` it asks a GPU for nothing."""
    return torch.zeros(num_values, dtype=torch.int64, device=values_N.device).scatter_add_(
        0, values_N, torch.ones_like(values_N)
    )


def split_rows(rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Neighbouring pieces; the rows themselves where there is one."""
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
