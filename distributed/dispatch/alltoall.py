"""One row per route, straight to the rank of its expert: bitwise equal to one rank.

Flow of one sparse layer and pass:
  1. count the routes of every slot and launch the exchange of counts (P ranks × their slots);
  2. meanwhile sort the routes by slot (stable: the canonical order expert, source rank, source
     position) and gather their rows;
  3. read the counts on the host: the one synchronisation;
  4. launch rows and gate weights; the receiver knows every row's expert from the counts;
  5. the experts run on what came, as on one rank;
  6. start the outputs back, and add them up in route order.

Where the routes have `per_expert` (a mixture's slots, expert choice) every rank has the same
counts, and 1 to 3 fall away: nothing is sorted, no counts travel, the host never waits for the
device, and all splits are equal. Rows come as (source rank, expert, position) in either case; here
they are brought into canonical order by one transposed copy each way.

In canonical order an expert sees the same rows in the same order on 1 or on P ranks, so outputs,
input gradients and expert gradients are bitwise equal (on CPUs: kernels/segments.py says why).
Chunks are ranges of experts: each expert still sees all its rows at once, so chunks change no bit
either. A rank has as many chunks that are not empty as it has experts, at most.

Cost per rank and direction: N·D elements and N gate weights, N the number of routes, minus what
stays on its rank. The backward sends the same amount the other way. A rank without rows takes part
in every exchange: its empty tensors come out of the exchange itself, so its backward does too.

Legend: U rows, N routes, D width, P ranks, S slots, e slots of one rank, V = chunks · P.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...kernels.calls import check_counts
from ...kernels.permute import gather_rows, in_order, sort_by_expert, sum_rows
from ...model.execution.recompute import save_combine, save_decision
from ...model.moe import Dispatched, DispatchedChunk, PendingRows
from ...model.routing import Routes, slot_routes
from .base import ExpertParallelDispatcher
from .dedup_hop import count_of, split_rows
from .exchange import AllToAll, AsyncCollective, Communicator
from .expert_map import ExpertMap


@dataclass(frozen=True)
class _Chunks:
    """The order in which slots travel: by chunk, then by rank, then as they stand. A chunk is a
    range of every rank's slots.
    """

    key_S: Tensor  # place of every slot in the order of travel
    slot_S: Tensor  # the slot in each place
    destination_S: Tensor  # (chunk, rank) of every slot
    own: tuple[range, ...]  # this rank's slots in every chunk


@dataclass(frozen=True)
class _Splits:
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class _Dispatched:
    """A pass under way, and the order in which its routes were sent; None: as they stood."""

    chunks: Sequence[DispatchedChunk]
    routes: Routes
    order_N: Tensor | None

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up the outputs in route order, (num_targets, D). Collective."""
        received, routes = [pending.wait() for pending in outputs], self.routes
        rows = received[0] if len(received) == 1 else torch.cat(received)
        return save_combine(
            sum_rows(
                rows,
                self.order_N,
                routes.target_N,
                num_rows=routes.num_targets,
                per_row=routes.per_target,
            )
        )


@dataclass(frozen=True)
class _CountedChunk:
    """Rows under way as (source rank, slot, position), with the counts that say where each slot's
    begin.
    """

    communicator: Communicator
    splits: _Splits
    rows: AsyncCollective
    weights: AsyncCollective
    counts_Pe: Tensor
    first_slot: int
    num_slots: int

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows."""
        return self.rows.wait()

    @property
    def routes(self) -> Routes:
        """Waits for the gate weights: one route per row."""
        weights, counts_Pe = self.weights.wait(), self.counts_Pe
        num_rows = len(weights)
        slot_e = torch.arange(counts_Pe.shape[1], device=counts_Pe.device) + self.first_slot
        slots_Pe = slot_e.repeat(len(counts_Pe))
        slot_U = slots_Pe.repeat_interleave(counts_Pe.reshape(-1), output_size=num_rows)
        row_U = torch.arange(num_rows, device=counts_Pe.device)
        return Routes(
            row_U, slot_U, weights, row_U, self.num_slots, num_rows, per_source=1, per_target=1
        )

    def send_back(self, y_TD: Tensor) -> AsyncCollective:
        """Starts to send one row of outputs back for every row that came."""
        return self.communicator.all_to_all(
            y_TD, self.splits.received, self.splits.sent, is_combine=True
        )


@dataclass(frozen=True)
class _KnownChunk:
    """Rows under way, equally many for every slot from every rank."""

    communicator: Communicator
    splits: _Splits
    rows: AsyncCollective
    weights: AsyncCollective
    own: range
    num_slots: int

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows, and brings them into canonical order."""
        return _transpose(self.rows.wait(), self.communicator.num_ranks, len(self.own))

    @property
    def routes(self) -> Routes:
        """Waits for the gate weights: one route per row, sorted.

        Their counts are known where the chunk has all slots.
        """
        weights = _transpose(self.weights.wait(), self.communicator.num_ranks, len(self.own))
        if len(self.own) == self.num_slots > 0:
            return slot_routes(
                len(weights), num_experts=self.num_slots, device=weights.device
            ).with_weights(weights)
        row_U = torch.arange(len(weights), device=weights.device)
        slot_U = row_U // max(1, len(weights) // max(1, len(self.own))) + self.own.start
        return Routes(
            row_U, slot_U, weights, row_U, self.num_slots, len(weights), per_source=1, per_target=1
        )

    def send_back(self, y_TD: Tensor) -> AsyncCollective:
        """Starts to send one row of outputs back for every row that came, in the order of ranks."""
        rows = _transpose(y_TD, len(self.own), self.communicator.num_ranks)
        return self.communicator.all_to_all(
            rows, self.splits.received, self.splits.sent, is_combine=True
        )


class AllToAllDispatcher(ExpertParallelDispatcher):
    """Sends one row per route to the rank of its expert; bitwise equal to `LocalDispatcher`."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts to send one row for every route. Collective.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        check_counts(routes, routes.num_experts)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator])
        if routes.per_expert and expert_map.filled_once:
            return self._dispatch_known(x_UD, routes, expert_map)
        return self._dispatch_counted(x_UD, routes, expert_map)

    def _dispatch_known(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> _Dispatched:
        """Every rank sends `per_expert` rows to every slot: all is known beforehand."""
        chunks, communicator = self._chunks(expert_map, x_UD.device), self.communicator
        order_N = None
        if self.setup.overlap_chunks > 1 or expert_map.slot_E is not None:
            order_N = _known_order(chunks, expert_map, routes.per_expert)
        splits = []
        for ranges, own in zip(_ranges(expert_map, len(chunks.own)), chunks.own, strict=True):
            sent = [routes.per_expert * len(slots) for slots in ranges]
            received = [routes.per_expert * len(own)] * communicator.num_ranks
            splits.append(_Splits(sent, received))
        rows_ND = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        collectives = self._start(rows_ND, in_order(routes.weight_N, order_N), splits)
        num_slots = expert_map.slots_P[communicator.rank]
        dispatched = [
            _KnownChunk(communicator, split, rows, weights, own, num_slots)
            for split, (rows, weights), own in zip(splits, collectives, chunks.own, strict=True)
        ]
        return _Dispatched(dispatched, routes, order_N)

    def _dispatch_counted(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> _Dispatched:
        chunks, communicator, counters = (
            self._chunks(expert_map, x_UD.device),
            self.communicator,
            self.setup.counters,
        )
        slot_N = expert_map.slots_of(routes.expert_N)
        sent_S = count_of(slot_N, expert_map.num_slots)
        own = expert_map.slots_P[communicator.rank]
        counts = AllToAll(
            communicator.group, list(expert_map.slots_P), [own] * communicator.num_ranks
        )
        pending = save_decision(lambda: counts.start(sent_S))
        key_N = slot_N if len(chunks.own) == 1 else chunks.key_S[slot_N]
        order_N = sort_by_expert(key_N, expert_map.num_slots)
        rows_ND = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        received_Pe = counters.wait(pending).view(communicator.num_ranks, own)
        splits = save_decision(lambda: self._read(sent_S, received_Pe, chunks))
        collectives = self._start(rows_ND, in_order(routes.weight_N, order_N), splits)
        dispatched = []
        for split, (rows, weights), slots in zip(splits, collectives, chunks.own, strict=True):
            counts_Pe = received_Pe[:, slots.start : slots.stop]
            dispatched.append(
                _CountedChunk(communicator, split, rows, weights, counts_Pe, slots.start, own)
            )
        return _Dispatched(dispatched, routes, order_N)

    def _read(self, sent_S: Tensor, received_Pe: Tensor, chunks: _Chunks) -> list[_Splits]:
        """Reads every chunk's splits on the host."""
        num_ranks, num_chunks = self.communicator.num_ranks, len(chunks.own)
        sent_V = sent_S.new_zeros(num_chunks * num_ranks).index_add_(
            0, chunks.destination_S, sent_S
        )
        received_V = torch.cat([received_Pe[:, own.start : own.stop].sum(1) for own in chunks.own])
        both = self.setup.counters.read(
            torch.stack((sent_V, received_V)).view(2, num_chunks, num_ranks)
        )
        return [_Splits(sent, received) for sent, received in zip(*both, strict=True)]

    def _start(
        self, rows_ND: Tensor, weight_N: Tensor, splits: list[_Splits]
    ) -> list[tuple[AsyncCollective, AsyncCollective]]:
        """Starts every chunk's rows and gate weights, and counts them."""
        self.setup.counters.add(
            rows_sent=len(weight_N), routes_served=sum(sum(split.received) for split in splits)
        )
        sizes = [sum(split.sent) for split in splits]
        rows, weights = split_rows(rows_ND, sizes), split_rows(weight_N, sizes)
        return [
            (
                self.communicator.all_to_all(rows[i], split.sent, split.received),
                self.communicator.all_to_all(weights[i], split.sent, split.received),
            )
            for i, split in enumerate(splits)
        ]

    def _chunks(self, expert_map: ExpertMap, device: torch.device) -> _Chunks:
        return _chunks(expert_map, self.setup.overlap_chunks, self.communicator.rank, device)


def _transpose(rows: Tensor, num_outer: int, num_inner: int) -> Tensor:
    """Rows in order (outer, inner, position) to (inner, outer, position). A view where there is one
    of either.
    """
    if not len(rows):
        return rows
    return rows.reshape(num_outer, num_inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def _ranges(expert_map: ExpertMap, num_chunks: int) -> list[list[range]]:
    """The local slots of every chunk and rank: nearly equal neighbouring ranges."""
    return [
        [
            range(count * chunk // num_chunks, count * (chunk + 1) // num_chunks)
            for count in expert_map.slots_P
        ]
        for chunk in range(num_chunks)
    ]


@lru_cache(maxsize=256)
def _chunks(expert_map: ExpertMap, num_chunks: int, rank: int, device: torch.device) -> _Chunks:
    first = [sum(expert_map.slots_P[:p]) for p in range(len(expert_map.slots_P))]
    ranges = _ranges(expert_map, num_chunks)
    slots, destinations = [], [0] * expert_map.num_slots
    for chunk, own in enumerate(ranges):
        for p, local in enumerate(own):
            slots += [first[p] + slot for slot in local]
            for slot in local:
                destinations[first[p] + slot] = chunk * len(first) + p
    slot_S = torch.tensor(slots, dtype=torch.int64, device=device)
    key_S = torch.empty_like(slot_S)
    key_S[slot_S] = torch.arange(len(slots), device=device)
    return _Chunks(
        key_S,
        slot_S,
        torch.tensor(destinations, dtype=torch.int64, device=device),
        tuple(own[rank] for own in ranges),
    )


def _known_order(chunks: _Chunks, expert_map: ExpertMap, per_expert: int) -> Tensor:
    """Routes stand by expert; they travel by slot in the order of `chunks`."""
    expert_S = chunks.slot_S
    slot_E = expert_map.tables(chunks.slot_S.device).slot_E
    if slot_E is not None:
        expert_S = torch.empty_like(slot_E).index_copy_(
            0, slot_E, torch.arange(len(slot_E), device=slot_E.device)
        )
        expert_S = expert_S[chunks.slot_S]
    return (
        expert_S[:, None] * per_expert + torch.arange(per_expert, device=expert_S.device)
    ).flatten()
