"""Sends a row once per destination rank, however many of its experts the token chose.

Flow of one sparse layer and pass:
  1. find the distinct (rank, row) and (rank, target row) pairs, and start the exchange of counts;
  2. meanwhile pack the routes; then read the counts on the host: the only synchronisation. Counts
     are known without it if every rank serves equally many heads, each with its own experts, and
     all ranks promise equally many rows (`Routes.equal_blocks`);
  3. start sending the distinct rows and the routes (slot, row, target, gate weight: 16 bytes each);
  4. the destination's experts compute, weight and sum for every (source rank, target row);
  5. start sending the sums back; the source adds those of different ranks in rank order.

A row is sent once to each distinct rank that serves it, and one row per target returns from each.
That is never more than one per route. With K experts per token on P ranks and uniform routing it is
P·(1 − (1 − 1/P)^K) of K on average (8 experts on 8 ranks: 5.25 of 8). Sums are grouped by rank, so
results equal one rank's up to rounding.

Routes with `per_expert` are sent one row per route (alltoall.py): a mixture's slots share no rows,
and for expert choice the saving is small compared with knowing all counts in advance.

Legend: U source rows, N routes, P ranks.
"""

import math

from torch import Tensor

from ...kernels.calls import ROUTES, ROWS, TARGETS
from ...model.execution.recompute import save_decision
from ...model.moe import Dispatched
from ...model.routing import Routes
from .alltoall import RowSharingDispatcher
from .dedup_hop import DedupExchange, ExchangeSizes, read_sizes
from .exchange import AllToAll
from .expert_map import ExpertMap, places


class DedupDispatcher(RowSharingDispatcher):
    """Sends one row per (source row, rank); equal to `LocalDispatcher` up to the order of sums."""

    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts sending the distinct rows and the routes that read them. Collective."""
        exchange = DedupExchange(
            self.communicator,
            routes,
            places(expert_map, x_UD.device),
            num_sources=len(x_UD),
            num_slots=expert_map.slots_P[self.communicator.rank],
        )
        sizes = save_decision(
            lambda: self._known_sizes(exchange, expert_map) or self._exchange_sizes(exchange)
        )
        came = exchange.start(x_UD, sizes)
        self.setup.counters.add(
            rows_sent=sum(row[ROWS] for row in sizes.sent),
            routes_served=sum(row[ROUTES] for row in sizes.received),
        )
        return came

    def _known_sizes(self, exchange: DedupExchange, expert_map: ExpertMap) -> ExchangeSizes | None:
        """Returns the sizes if every token sends the same to every rank, else None.

        This holds if all ranks have equally many rows and serve equally many heads, each with its
        own experts. A checked pass exchanges sizes anyway.
        """
        routes, num_ranks = exchange.routes, self.communicator.num_ranks
        heads, num_sources = routes.equal_blocks, exchange.addresses.num_sources
        is_known = heads > 0 and heads % num_ranks == 0 and expert_map.is_even
        if not is_known or self.communicator.checking:
            return None
        # A token is a block of source rows with its block of target rows.
        num_tokens = max(1, math.gcd(num_sources, routes.num_targets))
        counts = [0, 0, 0]
        counts[ROWS] = -(-num_sources // num_tokens // num_ranks)  # one row, or its heads' rows
        counts[ROUTES] = len(routes.expert_N) // num_tokens // num_ranks
        counts[TARGETS] = -(-(routes.num_targets // num_tokens) // num_ranks)
        sizes_P = [[num_tokens * count for count in counts]] * num_ranks
        return ExchangeSizes(sizes_P, sizes_P, exchange.counts_P3)

    def _exchange_sizes(self, exchange: DedupExchange) -> ExchangeSizes:
        """Exchanges counts, packs the routes meanwhile, and reads the counts on the host."""
        one_each, counters = [1] * self.communicator.num_ranks, self.setup.counters
        counts = AllToAll(self.communicator.group, one_each, one_each)
        pending = counts.start(exchange.counts_P3)
        exchange.prepare()
        return read_sizes(counters, exchange.counts_P3, counters.wait(pending))[0]
