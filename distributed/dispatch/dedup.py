"""One row per destination rank, however many of its experts a token chose; and one answer row back.

Flow of one sparse layer and pass:
  1. mark which rank wants which row, and which target row gets something from which rank; launch
     the exchange of the counts;
  2. meanwhile write down every route for its rank; then read the counts on the host: the one
     synchronisation;
  3. launch the distinct rows, and the routes (expert, row, target, gate weight: 16 bytes each);
  4. the destination's experts answer, weigh, and sum for every (source rank, target row);
  5. launch the sums home, where those of different ranks are added in the order of ranks.

Exactly Σ over rows of the distinct ranks that serve them are sent, and Σ over target rows of the
distinct ranks that have something for them come back: never more than one per route, and with K
experts per token on P ranks P·(1 − (1 − 1/P)^K) of K on average where the choice is even (8 experts
of 8 ranks: 5.25 of 8). Sums are grouped by rank, so results equal one rank's up to rounding.

Chunks are ranges of tokens, of rows and targets together, so chunks send no row twice.

Routes with `per_expert` go one row per route (dispatch_alltoall.py): a mixture's slots share no
row, and what expert choice could save is little against knowing all counts beforehand.

Legend: U source rows, N routes, P ranks, V = chunks · P.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...model.moe import Sent
from ...model.recompute import save_combine, save_decision
from ...model.routing import Routes
from .alltoall import AllToAllDispatcher
from .dedup_hop import (
    ROUTES,
    ROWS,
    DedupAllToAll,
    DedupChunk,
    ExchangeSizes,
    ReceivedChunk,
    SendPlan,
)
from .exchange import AllToAll, AsyncCollective, Counters, Pending
from .expert_map import ExpertMap
from .setup import Setup


@dataclass(frozen=True)
class DedupPart:
    """A chunk of the hop, as the experts see it. What it carries are local expert numbers."""

    chunk: DedupChunk
    num_slots: int

    @property
    def x_UD(self) -> Tensor:
        return self.chunk.rows.wait()

    @property
    def routes(self) -> Routes:
        return routes_of(self.chunk.wait(), self.num_slots)

    def answer(self, y_UD: Tensor) -> AsyncCollective:
        return self.chunk.answer(y_UD)


class DedupDispatcher:
    """One row per (source row, rank); equal to `LocalDispatcher` up to the order of sums."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self._known = setup, AllToAllDispatcher(setup)
        self.communicator = self._known.communicator

    def stats(self) -> Counters:
        """What this dispatcher has done so far."""
        return self.setup.counters.copy()

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective. Returns the distinct rows for this rank's experts, and the routes that read
        them.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        if routes.per_expert:
            return self._known.dispatch(x_UD, routes)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator])
        exchange = DedupAllToAll(
            self.communicator, self._addressed(x_UD, routes, expert_map), self.setup.overlap_chunks
        )
        asked = save_decision(lambda: self._ask(exchange))
        exchange.plan()
        sizes = save_decision(lambda: self._sizes(exchange, asked))
        chunks = exchange.launch(x_UD, sizes)
        count_rows(self.setup.counters, sizes)
        self.setup.counters.add(routes_served=sum(row[ROUTES] for row in sizes.received))
        return Sent(
            [DedupPart(chunk, expert_map.slots_P[self.communicator.rank]) for chunk in chunks],
            exchange,
        )

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """Collective. The answers to (num_targets, D) at home, added up in the order of ranks."""
        exchange = sent.way_home
        return (
            save_combine(exchange.collect(sent.answers(y)))
            if isinstance(exchange, DedupAllToAll)
            else self._known.combine(y, sent)
        )

    def _addressed(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> SendPlan:
        tables, slot_N = expert_map.tables(x_UD.device), expert_map.slots_of(routes.expert_N)
        destination_N = tables.rank_S[slot_N]
        if self.setup.overlap_chunks > 1:
            destination_N = (
                self.setup.chunk_of(routes, len(x_UD)) * self.communicator.num_ranks + destination_N
            )
        return SendPlan(
            routes.source_N,
            routes.target_N,
            destination_N,
            tables.local_S[slot_N],
            routes.weight_N,
            len(x_UD),
            routes.num_targets,
        )

    def _ask(self, exchange: DedupAllToAll) -> Pending:
        """(P, chunks, 3), on their way: what every rank has for this one."""
        asked_Pc3 = (
            exchange.counts_V3.view(exchange.num_chunks, self.communicator.num_ranks, 3)
            .transpose(0, 1)
            .contiguous()
        )
        equal = [1] * self.communicator.num_ranks
        return AllToAll(self.communicator.group, equal, equal).start(asked_Pc3)

    def _sizes(self, exchange: DedupAllToAll, asked_Pc3: Pending) -> ExchangeSizes:
        counters = self.setup.counters
        received_V3 = counters.wait(asked_Pc3).transpose(0, 1).reshape(-1, 3)
        return read_sizes(counters, exchange.counts_V3, received_V3)[0]


def routes_of(arrival: ReceivedChunk, num_slots: int) -> Routes:
    """What the experts of a rank must do; the load of a route is its expert's local number."""
    return Routes(
        arrival.source_N,
        arrival.slot_N,
        arrival.weight_N,
        arrival.target_N,
        num_slots,
        arrival.num_targets,
        per_source=0,
        per_target=0,
    )


def read_sizes(counters: Counters, *tables_V3: Tensor) -> list[ExchangeSizes]:
    """Tables (sent, received, sent, received, …) on the host, in one read."""
    lengths = [len(table) for table in tables_V3]
    rows = iter(counters.read(torch.cat(tables_V3)))
    lists = [[next(rows) for _ in range(length)] for length in lengths]
    return [
        ExchangeSizes(lists[i], lists[i + 1], tables_V3[i + 1]) for i in range(0, len(lists), 2)
    ]


def count_rows(counters: Counters, sizes: ExchangeSizes) -> None:
    """Adds a hop's rows."""
    counters.add(rows_sent=sum(row[ROWS] for row in sizes.sent))
