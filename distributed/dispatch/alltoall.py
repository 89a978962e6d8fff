"""One row per route, straight to the rank of its expert: bitwise equal to one rank.

Flow of one sparse layer and pass:
  1. count the routes of every slot and launch the exchange of counts (P ranks × their slots);
  2. meanwhile sort the routes by slot (stable: the canonical order expert, source rank, source
     position) and gather their rows;
  3. read the counts on the host: the one synchronisation;
  4. launch rows and gate weights; the receiver knows every row's expert from the counts;
  5. the experts run on what came, as on one rank;
  6. launch the answers home, and add them up in route order.

Where the routes have `per_expert` (a mixture's slots, expert choice) every rank has the same
counts, and 1 to 3 fall away: nothing is sorted, no counts travel, the host never waits for the
device, and all splits are equal. Rows come as (source rank, expert, position) in either case; here
they are brought into canonical order by one transposed copy each way.

In canonical order an expert sees the same rows in the same order on 1 or on P ranks, so outputs,
input gradients and expert gradients are bitwise equal (on CPUs: kernels/segments.py says why).
Chunks are ranges of experts: each expert still sees all its rows at once, so chunks change no bit
either. A rank has as many chunks that are not empty as it has experts, at most.

Cost per rank and direction: N·D elements and N gate weights, N the number of routes, minus what
stays home. The backward sends the same amount the other way. A rank without rows takes part in
every exchange: its empty tensors come out of the exchange itself, so its backward does too.

Legend: U rows, N routes, D width, P ranks, S slots, e slots of one rank, V = chunks · P.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...kernels.operands import check_counts
from ...kernels.permute import gather_rows, in_order, sort_by_expert, sum_rows
from ...model.moe import Sent
from ...model.recompute import save_combine, save_decision
from ...model.routing import Routes, slot_routes
from .dedup_hop import count_of, split_rows
from .exchange import AllToAll, AsyncCollective, Communicator, Counters
from .expert_map import ExpertMap
from .setup import Setup


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
class _WayHome:
    """The sender's order; None: the routes stood in it."""

    routes: Routes
    order_N: Tensor | None


@dataclass(frozen=True)
class _CountedPart:
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
        return self.rows.wait()

    @property
    def routes(self) -> Routes:
        """One route per row."""
        weights, counts_Pe = self.weights.wait(), self.counts_Pe
        num_rows = len(weights)
        slots_Pe = (
            torch.arange(counts_Pe.shape[1], device=counts_Pe.device) + self.first_slot
        ).repeat(len(counts_Pe))
        slot_U = slots_Pe.repeat_interleave(counts_Pe.reshape(-1), output_size=num_rows)
        row_U = torch.arange(num_rows, device=counts_Pe.device)
        return Routes(
            row_U, slot_U, weights, row_U, self.num_slots, num_rows, per_source=1, per_target=1
        )

    def answer(self, y_UD: Tensor) -> AsyncCollective:
        return self.communicator.launch(
            y_UD, self.splits.received, self.splits.sent, is_combine=True
        )


@dataclass(frozen=True)
class _KnownPart:
    """Rows under way, equally many for every slot from every rank."""

    communicator: Communicator
    splits: _Splits
    rows: AsyncCollective
    weights: AsyncCollective
    own: range
    num_slots: int

    @property
    def x_UD(self) -> Tensor:
        """In canonical order."""
        return _transpose(self.rows.wait(), self.communicator.num_ranks, len(self.own))

    @property
    def routes(self) -> Routes:
        """One route per row, sorted; of known counts where the part has all slots."""
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

    def answer(self, y_UD: Tensor) -> AsyncCollective:
        rows = _transpose(y_UD, len(self.own), self.communicator.num_ranks)
        return self.communicator.launch(
            rows, self.splits.received, self.splits.sent, is_combine=True
        )


class AllToAllDispatcher:
    """One row per route to the rank that holds its expert; bitwise equal to `LocalDispatcher`."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.communicator = setup, setup.communicator(setup.group)

    def stats(self) -> Counters:
        """What this dispatcher has done so far."""
        return self.setup.counters.copy()

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective. Returns the rows for this rank's experts, one route per row, experts numbered
        from 0.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        check_counts(routes, routes.num_experts)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator])
        self.setup.counters.add(rows_sent=len(routes.expert_N))
        if routes.per_expert and expert_map.filled_once:
            return self._dispatch_known(x_UD, routes, expert_map)
        return self._dispatch_counted(x_UD, routes, expert_map)

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """Collective. The answers to (num_targets, D) at home, added up in route order."""
        home: _WayHome = sent.way_home
        received = [collective.wait() for collective in sent.answers(y)]
        rows, routes = received[0] if len(received) == 1 else torch.cat(received), home.routes
        return save_combine(
            sum_rows(
                rows,
                home.order_N,
                routes.target_N,
                num_rows=routes.num_targets,
                per_row=routes.per_target,
            )
        )

    def _dispatch_known(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Sent:
        """Every rank sends `per_expert` rows to every slot: all is known beforehand."""
        chunks, communicator = self._chunks(expert_map, x_UD.device), self.communicator
        order_N = None
        if self.setup.overlap_chunks > 1 or expert_map.slot_E is not None:
            order_N = _known_order(chunks, expert_map, routes.per_expert)
        splits = [
            _Splits(
                [
                    routes.per_expert * len(own)
                    for own in _ranges(expert_map, self.setup.overlap_chunks)[chunk]
                ],
                [routes.per_expert * len(chunks.own[chunk])] * communicator.num_ranks,
            )
            for chunk in range(self.setup.overlap_chunks)
        ]
        collectives = self._launch(x_UD, routes, order_N, splits)
        num_slots = expert_map.slots_P[communicator.rank]
        self.setup.counters.add(routes_served=sum(sum(split.received) for split in splits))
        parts = [
            _KnownPart(communicator, split, rows, weights, own, num_slots)
            for split, (rows, weights), own in zip(splits, collectives, chunks.own, strict=True)
        ]
        return Sent(parts, _WayHome(routes, order_N))

    def _dispatch_counted(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Sent:
        chunks, communicator, counters = (
            self._chunks(expert_map, x_UD.device),
            self.communicator,
            self.setup.counters,
        )
        slot_N = expert_map.slots_of(routes.expert_N)
        sent_S = count_of(slot_N, expert_map.num_slots)
        own = expert_map.slots_P[communicator.rank]
        asked = save_decision(
            lambda: AllToAll(
                communicator.group, list(expert_map.slots_P), [own] * communicator.num_ranks
            ).start(sent_S)
        )
        order_N = sort_by_expert(
            slot_N if len(chunks.own) == 1 else chunks.key_S[slot_N], expert_map.num_slots
        )
        rows = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        received_Pe = counters.wait(asked).view(communicator.num_ranks, own)
        splits = save_decision(lambda: self._read(sent_S, received_Pe, chunks))
        collectives = self._launch(rows, routes, order_N, splits, gathered=True)
        counters.add(routes_served=sum(sum(split.received) for split in splits))
        parts = [
            _CountedPart(
                communicator,
                split,
                *collective,
                received_Pe[:, part.start : part.stop],
                part.start,
                own,
            )
            for split, collective, part in zip(splits, collectives, chunks.own, strict=True)
        ]
        return Sent(parts, _WayHome(routes, order_N))

    def _read(self, sent_S: Tensor, received_Pe: Tensor, chunks: _Chunks) -> list[_Splits]:
        """Every chunk's splits."""
        num_ranks, num_chunks = self.communicator.num_ranks, len(chunks.own)
        sent_V = sent_S.new_zeros(num_chunks * num_ranks).index_add_(
            0, chunks.destination_S, sent_S
        )
        received_V = torch.cat([received_Pe[:, own.start : own.stop].sum(1) for own in chunks.own])
        both = self.setup.counters.read(
            torch.stack((sent_V, received_V)).view(2, num_chunks, num_ranks)
        )
        return [_Splits(sent, received) for sent, received in zip(*both, strict=True)]

    def _launch(
        self,
        x_UD: Tensor,
        routes: Routes,
        order_N: Tensor | None,
        splits: list[_Splits],
        *,
        gathered: bool = False,
    ) -> list[tuple[AsyncCollective, AsyncCollective]]:
        rows_ND = x_UD
        if not gathered:
            rows_ND = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        sizes = [sum(split.sent) for split in splits]
        pieces = zip(
            split_rows(rows_ND, sizes),
            split_rows(in_order(routes.weight_N, order_N), sizes),
            splits,
            strict=True,
        )
        return [
            (
                self.communicator.launch(rows, split.sent, split.received),
                self.communicator.launch(weights, split.sent, split.received),
            )
            for rows, weights, split in pieces
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
