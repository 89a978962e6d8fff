"""Sends one row per node, then one per rank inside the node; outputs are summed inside the node first.

Rank i of a node exchanges with rank i of the other nodes (inter), then forwards what it received to
the ranks of its own node (intra); both exchanges work like dedup.py. Each row crosses the slow links
once per distinct node that serves it. For 8 experts per token on 2 nodes of 8 ranks that is 1.99 rows
on average; `dedup` sends 6.5.

One table gives the sizes of both exchanges: the rows, routes and targets that every rank has for
every rank and every node. All ranks gather it, 24 bytes for each pair of a rank and a rank or node,
and read it on the host once per pass.

Legend: U source rows, N routes, T target rows.
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
from .expert_map import ExpertAddresses, ExpertMap, places, places_in_node, places_on_nodes


@dataclass(frozen=True)
class _TwoHops:
    """A pass in flight: the inter exchange, then the intra exchange of its received rows."""

    inter: DedupRows
    start_intra: Callable[[DedupRows], Dispatched]
    started: list[Dispatched] = field(default_factory=list)

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows from other nodes, forwards them, and waits for the distinct rows."""
        return self._intra.x_UD

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._intra.routes

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sums outputs inside the nodes, then over nodes in node order, (num_targets, D). Collective."""
        return self.inter.combine(self._intra.combine(y_TD))

    @property
    def _intra(self) -> Dispatched:
        # Not a cached_property: its single lock in Python 3.11 would deadlock simulated ranks, which
        # are threads that wait for each other here.
        if not self.started:
            self.started.append(self.start_intra(self.inter))
        return self.started[0]


class HierarchicalDispatcher(RowSharingDispatcher):
    """Sends one row per (row, node), then one per rank; equal to `LocalDispatcher` up to the order of sums."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.nodes is not None, "hierarchical needs the groups of build_node_groups"
        self.inter = setup.communicator(setup.nodes.inter)
        self.intra = setup.communicator(setup.nodes.intra)
        self.communicators += [self.inter, self.intra]

    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts sending the distinct rows and their routes between nodes. Collective."""
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
        return _TwoHops(came, lambda came: self._start_intra(came, expert_map, intra_sizes))

    def _start_intra(
        self, came: DedupRows, expert_map: ExpertMap, sizes: ExchangeSizes
    ) -> Dispatched:
        """Forwards received rows to the ranks of this node."""
        x_UD, routes = came.x_UD, came.routes
        inside = places_in_node(expert_map, x_UD.device, self.intra.num_ranks)
        exchange = DedupExchange(
            self.intra,
            routes,
            inside,
            num_sources=len(x_UD),
            num_slots=expert_map.slots_P[self.communicator.rank],
        )
        return exchange.start(x_UD, sizes, is_inner=True)

    def _exchange_sizes(
        self, inter: DedupExchange, on_ranks: ExpertAddresses
    ) -> tuple[ExchangeSizes, ExchangeSizes]:
        """Exchanges counts, packs the routes meanwhile, and reads the counts on the host.

        Returns:
            The sizes of the inter and the intra exchange.
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
        num_nodes, node_size = self.inter.num_ranks, self.intra.num_ranks
        here, local = self.inter.rank, self.intra.rank
        num_ranks = self.communicator.num_ranks
        gathered = self.setup.counters.wait(pending)
        gathered = gathered.view(num_nodes, node_size, -1, 3)  # by source node and source rank
        by_rank = gathered[:, :, :num_ranks].reshape(num_nodes, node_size, num_nodes, node_size, 3)
        inter_received = gathered[:, local, num_ranks + here].contiguous()
        # Rank i forwards everything that reaches this node through it, from any node.
        intra_sent = by_rank[:, local, here].sum(0)
        intra_received = by_rank[:, :, here, local].sum(0)
        sizes, intra_sizes = read_sizes(
            self.setup.counters, inter.counts_P3, inter_received, intra_sent, intra_received
        )
        return sizes, intra_sizes
