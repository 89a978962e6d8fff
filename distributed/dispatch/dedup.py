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

Routes with `per_expert` go one row per route (alltoall.py): a mixture's slots share no row, and
what expert choice could save is little against knowing all counts beforehand.

Legend: U source rows, N routes, P ranks.
"""

import math

from torch import Tensor

from ...kernels.calls import ROUTES, ROWS, TARGETS
from ...model.execution.recompute import save_decision
from ...model.moe import Dispatched
from ...model.routing import Routes
from .alltoall import RowSharingDispatcher
from .base import rows_are_equal
from .dedup_hop import DedupExchange, ExchangeSizes, read_sizes
from .exchange import AllToAll
from .expert_map import ExpertMap, places


class DedupDispatcher(RowSharingDispatcher):
    """Sends one row per (source row, rank); equal to `LocalDispatcher` up to the order of sums."""

    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts to send the distinct rows, and the routes that read them. Collective."""
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
        """Returns the sizes where every token sends the same to every rank; None where that is not
        so, or is to be checked.

        Every rank then serves equally many heads, each with experts of its own, and all ranks have
        equally many rows.
        """
        routes, num_ranks = exchange.routes, self.communicator.num_ranks
        heads, num_sources = routes.equal_blocks, exchange.addresses.num_sources
        is_known = heads > 0 and heads % num_ranks == 0 and expert_map.is_even
        if not (is_known and rows_are_equal()) or self.communicator.checking:
            return None
        # A token is a block of source rows and the block of target rows that belongs to it.
        num_tokens = max(1, math.gcd(num_sources, routes.num_targets))
        counts = [0, 0, 0]
        counts[ROWS] = -(-num_sources // num_tokens // num_ranks)  # one row, or those of its heads
        counts[ROUTES] = len(routes.expert_N) // num_tokens // num_ranks
        counts[TARGETS] = -(-(routes.num_targets // num_tokens) // num_ranks)
        sizes_P = [[num_tokens * count for count in counts]] * num_ranks
        return ExchangeSizes(sizes_P, sizes_P, exchange.counts_P3)

    def _exchange_sizes(self, exchange: DedupExchange) -> ExchangeSizes:
        """Exchanges counts and reads them on the host; the routes are written down meanwhile."""
        one_each, counters = [1] * self.communicator.num_ranks, self.setup.counters
        counts = AllToAll(self.communicator.group, one_each, one_each)
        pending = counts.start(exchange.counts_P3)
        exchange.prepare()
        return read_sizes(counters, exchange.counts_P3, counters.wait(pending))[0]
