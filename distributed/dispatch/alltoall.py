"""Sends one row per route to the rank of its expert; bitwise equal to one rank.

Flow of one sparse layer and pass:
  1. count the routes of every slot and start the exchange of counts (P ranks × their slots);
  2. meanwhile sort the routes stably by slot, which gives the canonical order (expert, source rank,
     source position), and gather their rows;
  3. read the counts on the host: the only synchronisation;
  4. start sending rows and gate weights; the counts tell the receiver every row's expert;
  5. run the experts on the received rows, as on one rank;
  6. start sending the outputs back, and sum them in route order.

With `per_expert` (a mixture's slots, expert choice) every rank has the same counts, and steps 1 to 3
disappear: nothing is sorted, no counts are exchanged, and the host never waits for the device. Rows
always arrive as (source rank, expert, position); a transposed copy before the experts, and one
after them, restores the canonical order.

In canonical order an expert sees the same rows in the same order on 1 or P ranks, so outputs, input
gradients and expert gradients are bitwise equal wherever the backend's are (docs/measured.md).

Cost per rank and direction: N·D elements and N gate weights for N routes, minus those that stay on
the rank. The backward sends as much in reverse. A rank without rows still takes part in every
exchange: its empty tensors are outputs of the exchange, so its backward runs too.

Legend: U rows, N routes, D width, P ranks, S slots (not positions): places for experts on all ranks,
of which an expert may have several (expert_map.py); e slots of one rank.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.calls import check_counts
from ...kernels.permute import gather_rows, in_order, sort_by_expert, sum_rows
from ...model.execution.recompute import save_combine, save_decision
from ...model.moe import Dispatched
from ...model.routing import Routes, slot_routes
from .base import ExpertParallelDispatcher, Setup
from .exchange import AllToAll, AsyncCollective, Communicator
from .expert_map import ExpertMap


@dataclass(frozen=True)
class _Sent:
    """Rows and gate weights in flight, one per route; how many go to and come from each rank."""

    communicator: Communicator
    sent: list[int]
    received: list[int]
    rows: AsyncCollective
    weights: AsyncCollective
    routes: Routes  # this rank's own
    order_N: Tensor | None  # the order of sending; None: route order

    def combine(self, y_UD: Tensor) -> Tensor:
        """Sends back the output of each received row; returns this rank's sums in route order.

        (U, D) to (num_targets, D).
        """
        back = self.communicator.all_to_all(y_UD, self.received, self.sent, is_combine=True)
        routes = self.routes
        sums = sum_rows(
            back.wait(),
            self.order_N,
            routes.target_N,
            num_rows=routes.num_targets,
            per_row=routes.per_target,
        )
        return save_combine(sums)


@dataclass(frozen=True)
class _CountedRows:
    """Rows in the order (source rank, slot, position), and their counts per rank and slot."""

    sending: _Sent
    counts_Pe: Tensor

    @property
    def x_UD(self) -> Tensor:
        """Waits for the dispatched rows and returns them, (U, D)."""
        return self.sending.rows.wait()

    @property
    def routes(self) -> Routes:
        """Waits for the gate weights: one route per row."""
        weights, counts_Pe = self.sending.weights.wait(), self.counts_Pe
        num_ranks, num_slots = counts_Pe.shape
        slots_Pe = torch.arange(num_slots, device=counts_Pe.device).repeat(num_ranks)
        slot_U = slots_Pe.repeat_interleave(counts_Pe.reshape(-1), output_size=len(weights))
        return _one_per_row(slot_U, weights, num_slots)

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sends the outputs back and sums them. Collective."""
        return self.sending.combine(y_TD)


@dataclass(frozen=True)
class _KnownRows:
    """Rows in flight if every rank sends equally many to every slot."""

    sending: _Sent
    num_slots: int  # of this rank

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows and reorders them canonically."""
        return self._by_slot(self.sending.rows.wait())

    @property
    def routes(self) -> Routes:
        """Waits for the gate weights: one route per row, sorted."""
        weights = self._by_slot(self.sending.weights.wait())
        if not self.num_slots:
            return _one_per_row(torch.arange(0, device=weights.device), weights, 0)
        sorted_routes = slot_routes(len(weights), num_experts=self.num_slots, device=weights.device)
        return sorted_routes.with_weights(weights)

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sends the outputs back in rank order and sums them. Collective."""
        num_ranks = self.sending.communicator.num_ranks
        return self.sending.combine(_transpose(y_TD, self.num_slots, num_ranks))

    def _by_slot(self, rows: Tensor) -> Tensor:
        return _transpose(rows, self.sending.communicator.num_ranks, self.num_slots)


class AllToAllDispatcher(ExpertParallelDispatcher):
    """Sends one row per route to the rank of its expert; bitwise equal to `LocalDispatcher`."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts sending one row per route. Collective.

        Raises:
            ValueError: `per_expert` does not fit the routes, or there are fewer experts than ranks.
        """
        check_counts(routes, routes.num_experts)
        expert_map = self.begin(x_UD, routes)
        if routes.per_expert and expert_map.filled_once:
            return self._dispatch_known(x_UD, routes, expert_map)
        return self._dispatch_counted(x_UD, routes, expert_map)

    def _dispatch_known(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> _KnownRows:
        """Starts sending `per_expert` rows to every slot; all counts are known."""
        own = expert_map.slots_P[self.communicator.rank]
        order_N = _known_order(expert_map, routes.per_expert, x_UD.device)
        rows_ND = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        sent = [routes.per_expert * count for count in expert_map.slots_P]
        received = [routes.per_expert * own] * self.communicator.num_ranks
        return _KnownRows(self._send(rows_ND, routes, order_N, sent, received), own)

    def _dispatch_counted(
        self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap
    ) -> _CountedRows:
        """Exchanges counts, then starts sending rows sorted by slot: steps 1 to 4 above."""
        communicator, counters = self.communicator, self.setup.counters
        own = expert_map.slots_P[communicator.rank]
        slot_N = expert_map.slots_of(routes.expert_N)
        sent_S = _count_of(slot_N, expert_map.num_slots)
        counts = AllToAll(
            communicator.group, list(expert_map.slots_P), [own] * communicator.num_ranks
        )
        # a recomputed step reuses these counts and sends none (model/execution/recompute.py)
        pending = save_decision(lambda: counts.start(sent_S))
        order_N = sort_by_expert(slot_N, expert_map.num_slots)
        rows_ND = gather_rows(x_UD, order_N, routes.source_N, per_row=routes.per_source)
        received_Pe = counters.wait(pending).view(communicator.num_ranks, own)
        rank_S = expert_map.tables(x_UD.device).rank_S

        def read() -> list[list[int]]:
            sent_P = sent_S.new_zeros(communicator.num_ranks).index_add_(0, rank_S, sent_S)
            return counters.read(torch.stack((sent_P, received_Pe.sum(1))))

        sent, received = save_decision(read)
        return _CountedRows(self._send(rows_ND, routes, order_N, sent, received), received_Pe)

    def _send(
        self,
        rows_ND: Tensor,
        routes: Routes,
        order_N: Tensor | None,
        sent: list[int],
        received: list[int],
    ) -> _Sent:
        """Starts sending rows and gate weights, and counts them."""
        communicator, weight_N = self.communicator, in_order(routes.weight_N, order_N)
        self.setup.counters.add(rows_sent=len(weight_N), routes_served=sum(received))
        rows = communicator.all_to_all(rows_ND, sent, received)
        weights = communicator.all_to_all(weight_N, sent, received)
        return _Sent(communicator, sent, received, rows, weights, routes, order_N)


class RowSharingDispatcher(ExpertParallelDispatcher):
    """Base of dispatchers that send a row once for several routes.

    Routes with `per_expert` share few rows and have known counts, so they are sent one by one.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._one_per_route = AllToAllDispatcher(setup)

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts sending the rows and the routes that read them. Collective.

        Raises:
            ValueError: `per_expert` does not fit the routes, or there are fewer experts than ranks.
        """
        if routes.per_expert:
            return self._one_per_route.dispatch(x_UD, routes)
        return self.dispatch_shared(x_UD, routes, self.begin(x_UD, routes))

    @abstractmethod
    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts sending the rows of a pass that `begin` has started."""


def _one_per_row(slot_U: Tensor, weights: Tensor, num_slots: int) -> Routes:
    """Returns one route per received row, each with its own target row."""
    row_U = torch.arange(len(weights), device=weights.device)
    return Routes(
        row_U, slot_U, weights, row_U, num_slots, len(weights), per_source=1, per_target=1
    )


def _transpose(rows: Tensor, num_outer: int, num_inner: int) -> Tensor:
    """Reorders rows from (outer, inner, position) to (inner, outer, position).

    Returns a view if there is only one outer or inner index.
    """
    if not len(rows):
        return rows
    return rows.reshape(num_outer, num_inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def _count_of(values_N: Tensor, num_values: int) -> Tensor:
    """Counts how often each value occurs; unlike `bincount`, does not synchronise with a GPU."""
    return torch.zeros(num_values, dtype=torch.int64, device=values_N.device).scatter_add_(
        0, values_N, torch.ones_like(values_N)
    )


def _known_order(expert_map: ExpertMap, per_expert: int, device: torch.device) -> Tensor | None:
    """Returns the order by slot of routes sorted by expert; None: no reordering."""
    slot_E = expert_map.tables(device).slot_E
    if slot_E is None:
        return None
    expert_S = torch.empty_like(slot_E).index_copy_(
        0, slot_E, torch.arange(len(slot_E), device=device)
    )
    return (expert_S[:, None] * per_expert + torch.arange(per_expert, device=device)).flatten()
