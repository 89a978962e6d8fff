"""One row per destination rank, however many of its experts a token chose; and one row of outputs
back.

Flow of one sparse layer and pass:
  1. mark which rank wants which row, and which target row gets something from which rank; start the
     exchange of the counts;
  2. meanwhile write down every route for its rank; then read the counts on the host: the one
     synchronisation. There is none, and no exchange of counts, where every rank serves as many of
     the heads, each with experts of its own, and all ranks promise as many rows (`equal_rows`);
  3. start the distinct rows, and the routes (slot, row, target, gate weight: 16 bytes each);
  4. the destination's experts compute, weigh, and sum for every (source rank, target row);
  5. start the sums back; at their source those of different ranks are added in the order of ranks.

Exactly Σ over rows of the distinct ranks that serve them are sent, and Σ over target rows of the
distinct ranks that have something for them come back: never more than one per route, and with K
experts per token on P ranks P·(1 − (1 − 1/P)^K) of K on average where the choice is even (8 experts
of 8 ranks: 5.25 of 8). Sums are grouped by rank, so results equal one rank's up to rounding.

Chunks are ranges of tokens, of rows and targets together, so chunks send no row twice.

Routes with `per_expert` go one row per route (alltoall.py): a mixture's slots share no row, and
what expert choice could save is little against knowing all counts beforehand.

Legend: U source rows, N routes, P ranks, V = chunks · P.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.addresses import ROUTES, ROWS
from ...model.execution.recompute import save_combine, save_decision
from ...model.moe import Dispatched, PendingRows
from ...model.routing import Routes
from .alltoall import AllToAllDispatcher
from .base import ExpertParallelDispatcher, Setup
from .dedup_hop import DedupAllToAll, DedupChunk, ExchangeSizes
from .exchange import AllToAll, Counters, Pending
from .expert_map import ExpertMap


@dataclass(frozen=True)
class _Dispatched:
    """A pass under way."""

    chunks: Sequence[DedupChunk]
    exchange: DedupAllToAll

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up what the ranks send back, in their order, (num_targets, D). Collective."""
        return save_combine(self.exchange.combine(outputs))


class DedupDispatcher(ExpertParallelDispatcher):
    """Sends one row per (source row, rank); equal to `LocalDispatcher` up to the order of sums."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._one_per_route = AllToAllDispatcher(setup)

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts to send the distinct rows, and the routes that read them. Collective.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        if routes.per_expert:
            return self._one_per_route.dispatch(x_UD, routes)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator])
        exchange = DedupAllToAll(
            self.communicator,
            routes,
            expert_map.places(x_UD.device),
            num_sources=len(x_UD),
            num_slots=expert_map.slots_P[self.communicator.rank],
            num_chunks=self.setup.overlap_chunks,
            rows_per_token=self.setup.rows_per_token(routes, len(x_UD)),
        )
        sizes = save_decision(
            lambda: self._known_sizes(exchange, expert_map) or self._exchange_sizes(exchange)
        )
        chunks = exchange.dispatch(x_UD, sizes)
        self.setup.counters.add(
            rows_sent=sum(row[ROWS] for row in sizes.sent),
            routes_served=sum(row[ROUTES] for row in sizes.received),
        )
        return _Dispatched(chunks, exchange)

    def _known_sizes(self, exchange: DedupAllToAll, expert_map: ExpertMap) -> ExchangeSizes | None:
        """Returns the sizes where every token sends the same to every rank; None where that is not
        so, or is to be checked.
        """
        to, num_ranks = exchange.addresses, self.communicator.num_ranks
        of_token = self.setup.counts_of_token(exchange.routes, to.num_sources, expert_map)
        if of_token is None or self.communicator.checking:
            return None
        num_tokens = to.num_sources // to.rows_per_token
        sizes_V = []
        for chunk in range(to.num_chunks):
            first, end = (-(-i * num_tokens // to.num_chunks) for i in (chunk, chunk + 1))
            sizes_V += [[(end - first) * count for count in of_token]] * num_ranks
        return ExchangeSizes(sizes_V, sizes_V, exchange.counts_V3)

    def _exchange_sizes(self, exchange: DedupAllToAll) -> ExchangeSizes:
        """Exchanges counts and reads them on the host; the routes are written down meanwhile."""
        pending, counters = self._start_counts(exchange), self.setup.counters
        exchange.prepare()
        received_V3 = counters.wait(pending).transpose(0, 1).reshape(-1, 3)
        return read_sizes(counters, exchange.counts_V3, received_V3)[0]

    def _start_counts(self, exchange: DedupAllToAll) -> Pending:
        """Starts to send every rank what this one has for it, (P, chunks, 3)."""
        num_ranks = self.communicator.num_ranks
        counts_cP3 = exchange.counts_V3.view(exchange.num_chunks, num_ranks, 3)
        one_each = [1] * num_ranks
        counts = AllToAll(self.communicator.group, one_each, one_each)
        return counts.start(counts_cP3.transpose(0, 1).contiguous())


def read_sizes(counters: Counters, *tables_V3: Tensor) -> list[ExchangeSizes]:
    """Reads tables (sent, received, sent, received, …) on the host, all at once."""
    rows = iter(counters.read(torch.cat(tables_V3)))
    lists = [[next(rows) for _ in range(len(table_V3))] for table_V3 in tables_V3]
    pairs = range(0, len(tables_V3), 2)
    return [ExchangeSizes(lists[i], lists[i + 1], tables_V3[i + 1]) for i in pairs]
