"""Two exchanges: one row per node, then inside the node one row per rank; outputs are summed inside
the node before they go back. Where a node's ranks share memory, the second goes through that
(symmetric.py), with the same bits.

Rank i of a node speaks to rank i of the others (the inter exchange), and what comes in is spread
among the ranks of the own node (the intra exchange), both as in dedup.py. So between nodes exactly
Σ over rows of the distinct nodes that serve them travel, which is what the slow links carry; for 8
experts per token on 2 nodes of 8 ranks 1.99 rows where `dedup` sends 6.5 on average.

The sizes of both exchanges follow from one table, which all ranks gather: how many rows, routes and
targets every rank has for every rank and for every node. So there is one read on the host per pass,
as with the others. Costs P · (P + M) · 24 bytes.

Legend: P ranks = M nodes · G ranks of a node, U source rows, T target rows, N routes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...kernels.calls import ROUTES, ROWS
from ...kernels.sends import count_sends
from ...model.execution.recompute import save_decision
from ...model.moe import Dispatched
from ...model.routing import Routes
from .alltoall import RowSharingDispatcher
from .base import Setup
from .dedup_hop import DedupExchange, DedupRows, ExchangeSizes, read_sizes
from .exchange import AllGather
from .expert_map import ExpertMap, ExpertPlaces, places, places_in_node, places_on_nodes
from .symmetric import start_exchange


@dataclass(frozen=True)
class _Dispatched:
    """A pass under way: the inter exchange, and the intra exchange, which begins when its rows are
    here.
    """

    inter: DedupRows
    start_intra: Callable[[DedupRows], Dispatched]
    started: list[Dispatched] = field(default_factory=list)

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows from other nodes and spreads them; waits for the distinct rows."""
        return self._intra.x_UD

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._intra.routes

    def combine(self, y_TD: Tensor) -> Tensor:
        """Adds up outputs inside the nodes, sends the sums back and adds them up in the order of
        nodes, (num_targets, D). Collective.
        """
        return self.inter.combine(self._intra.combine(y_TD))

    @property
    def _intra(self) -> Dispatched:
        # Not a cached_property: Python 3.11 has one lock for all of them, and simulated ranks, which
        # are threads, wait for each other here.
        if not self.started:
            self.started.append(self.start_intra(self.inter))
        return self.started[0]


class HierarchicalDispatcher(RowSharingDispatcher):
    """Sends one row per (row, node), then one per rank inside the node; equal to `LocalDispatcher`
    up to the order of sums.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.nodes is None:
            raise ValueError(
                "the hierarchical dispatcher needs the groups between and inside nodes "
                "(build_node_groups)"
            )
        self.inter = setup.communicator(setup.nodes.inter)
        self.intra = setup.communicator(setup.nodes.intra)
        self.communicators += [self.inter, self.intra]
        if self.inter.num_ranks * self.intra.num_ranks != self.communicator.num_ranks:
            raise ValueError(
                f"{self.inter.num_ranks} nodes × {self.intra.num_ranks} ranks are not the EP "
                f"group's {self.communicator.num_ranks}"
            )

    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts to send the distinct rows between nodes, and the routes that read them.
        Collective.
        """
        inter = DedupExchange(
            self.inter,
            routes,
            places_on_nodes(expert_map, x_UD.device, self.intra.num_ranks),
            num_sources=len(x_UD),
            num_slots=expert_map.num_slots,
        )
        sizes, intra_sizes = save_decision(
            lambda: self._exchange_sizes(inter, places(expert_map, x_UD.device))
        )
        came = inter.start(x_UD, sizes)
        self.setup.counters.add(
            rows_sent=sum(row[ROWS] for row in (*sizes.sent, *intra_sizes.sent)),
            routes_served=sum(row[ROUTES] for row in intra_sizes.received),
        )
        if self.setup.outbox is not None:
            self.setup.outbox.check(self.intra.checking)
        return _Dispatched(came, lambda came: self._start_intra(came, expert_map, intra_sizes))

    def _start_intra(
        self, came: DedupRows, expert_map: ExpertMap, sizes: ExchangeSizes
    ) -> Dispatched:
        """Spreads what came to this rank among the ranks of its node."""
        x_UD, routes = came.x_UD, came.routes
        inside = places_in_node(expert_map, x_UD.device, self.intra.num_ranks)
        num_slots = expert_map.slots_P[self.communicator.rank]
        if self.setup.outbox is not None:
            return start_exchange(
                self.setup.outbox,
                self.intra.counters,
                x_UD,
                routes,
                places=inside,
                num_slots=num_slots,
                is_inner=True,
            )
        exchange = DedupExchange(
            self.intra, routes, inside, num_sources=len(x_UD), num_slots=num_slots
        )
        return exchange.start(x_UD, sizes, is_inner=True)

    def _exchange_sizes(
        self, inter: DedupExchange, on_ranks: ExpertPlaces
    ) -> tuple[ExchangeSizes, ExchangeSizes]:
        """Exchanges counts and reads them on the host; the routes are written down meanwhile.

        Returns:
            The sizes of the inter and of the intra exchange.
        """
        by_rank = replace(
            inter.addresses,
            rank_E=on_ranks.rank_E,
            slot_E=on_ranks.slot_E,
            num_ranks=self.communicator.num_ranks,
        )
        counts = torch.cat((count_sends(by_rank).counts_P3, inter.counts_P3))
        pending = AllGather(self.communicator.group).start(counts)
        inter.prepare()
        return self._read_sizes(inter, self.setup.counters.wait(pending))

    def _read_sizes(
        self, inter: DedupExchange, gathered: Tensor
    ) -> tuple[ExchangeSizes, ExchangeSizes]:
        num_nodes, node_size = self.inter.num_ranks, self.intra.num_ranks
        here, local = self.inter.rank, self.intra.rank
        num_ranks = self.communicator.num_ranks
        gathered = gathered.view(num_nodes, node_size, -1, 3)  # of source node and source rank
        by_rank = gathered[:, :, :num_ranks].reshape(num_nodes, node_size, num_nodes, node_size, 3)
        inter_received = gathered[:, local, num_ranks + here].contiguous()
        # What reaches this node through its rank i, whatever node it comes from, goes on from rank
        # i.
        intra_sent = by_rank[:, local, here].sum(0)
        intra_received = by_rank[:, :, here, local].sum(0)
        sizes, intra_sizes = read_sizes(
            self.setup.counters, inter.counts_P3, inter_received, intra_sent, intra_received
        )
        return sizes, intra_sizes
