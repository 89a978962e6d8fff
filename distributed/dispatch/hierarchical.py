"""Two exchanges: one row per node, then inside the node one row per rank; outputs are summed inside
the node before they go back. Where a node's ranks share memory, the second goes through that
(symmetric.py), with the same bits.

Rank i of a node speaks to rank i of the others (the inter exchange), and what comes in is spread
among the ranks of the own node (the intra exchange), both as in dedup.py. So between nodes exactly
Σ over rows of the distinct nodes that serve them travel, which is what the slow links carry; for 8
experts per token on 2 nodes of 8 ranks 1.99 rows where `dedup` sends 6.5 on average.

The sizes of both exchanges follow from one table, which all ranks gather: how many rows, routes and
targets every rank has for every rank and for every node. So there is one read on the host per pass,
as with the others. Costs P · (P + M) · 24 bytes per chunk.

While the experts compute one chunk, the next one's rows travel between the ranks and the one after
that between the nodes.

Legend: P ranks = M nodes · G ranks of a node, c chunks, U source rows, T target rows, N routes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.addresses import ROUTES, ROWS
from ...kernels.sends import count_sends
from ...model.execution.recompute import save_combine, save_decision
from ...model.moe import Dispatched, DispatchedChunk, PendingRows
from ...model.routing import Routes
from ..symmetric.interface import RowOutbox
from .alltoall import AllToAllDispatcher
from .base import ExpertParallelDispatcher, Setup
from .dedup import read_sizes
from .dedup_hop import DedupAllToAll, DedupChunk, ExchangeSizes
from .exchange import AllGather, Communicator, Pending
from .expert_map import ExpertMap, ExpertPlaces
from .symmetric import start_exchange


@dataclass(frozen=True)
class _BothExchanges:
    """A pass under way: the inter exchange, and those intra exchanges that were started."""

    expert_map: ExpertMap
    inter: DedupAllToAll
    inter_chunks: list[DedupChunk]
    intra: Communicator
    intra_sizes: list[ExchangeSizes]  # of every chunk
    num_slots: int  # of this rank
    started: dict[int, "_IntraChunk"]  # by chunk
    outbox: RowOutbox | None

    def intra_chunk(self, number: int) -> "_IntraChunk":
        """Returns a chunk of its intra exchange; the first call waits for its rows from other nodes
        and starts it.
        """
        if number not in self.started:
            by_memory = self.outbox is not None
            start = self._start_by_memory if by_memory else self._start_by_collectives
            self.started[number] = start(number)
        return self.started[number]

    def _start_by_collectives(self, number: int) -> "_IntraChunk":
        x_UD, routes = self.inter_chunks[number].x_UD, self.inter_chunks[number].routes
        exchange = DedupAllToAll(
            self.intra,
            routes,
            self.expert_map.places_in_node(x_UD.device, self.intra.num_ranks),
            num_sources=len(x_UD),
            num_slots=self.num_slots,
        )
        [chunk] = exchange.dispatch(x_UD, self.intra_sizes[number])
        return _IntraChunk(chunk, exchange.combine)

    def _start_by_memory(self, number: int) -> "_IntraChunk":
        assert self.outbox is not None
        x_UD, routes = self.inter_chunks[number].x_UD, self.inter_chunks[number].routes
        exchange = start_exchange(
            self.outbox,
            self.intra.counters,
            x_UD,
            routes,
            places=self.expert_map.places_in_node(x_UD.device, self.intra.num_ranks),
            num_slots=self.num_slots,
        )
        return _IntraChunk(exchange.chunks[0], exchange.combine)


@dataclass(frozen=True)
class _IntraChunk:
    """A chunk inside the node, and what adds up the outputs of its experts."""

    chunk: DispatchedChunk
    combine: Callable[[Sequence[PendingRows]], Tensor]


@dataclass(frozen=True)
class _Chunk:
    """A chunk after its intra exchange; asking for it starts that of the next chunk, too."""

    exchanges: _BothExchanges
    number: int

    @property
    def x_UD(self) -> Tensor:
        """Waits for the distinct rows."""
        return self._started().chunk.x_UD

    @property
    def routes(self) -> Routes:
        """Waits for the routes that read them."""
        return self._started().chunk.routes

    def send_back(self, y_TD: Tensor) -> PendingRows:
        """Starts to send the outputs back inside the node."""
        return self._started().chunk.send_back(y_TD)

    def _started(self) -> _IntraChunk:
        chunk = self.exchanges.intra_chunk(self.number)
        if self.number + 1 < len(self.exchanges.inter_chunks):
            self.exchanges.intra_chunk(self.number + 1)
        return chunk


@dataclass(frozen=True)
class _Dispatched:
    """A pass under way, as the sparse layer sees it."""

    chunks: Sequence[_Chunk]
    exchanges: _BothExchanges

    def combine(self, outputs: Sequence[PendingRows]) -> Tensor:
        """Adds up outputs inside the nodes, sends the sums back and adds them up in the order of
        nodes, (num_targets, D). Collective.
        """
        between_nodes = []
        for number, pending in enumerate(outputs):
            sums_TD = self.exchanges.intra_chunk(number).combine([pending])
            between_nodes.append(self.exchanges.inter_chunks[number].send_back(sums_TD))
        return save_combine(self.exchanges.inter.combine(between_nodes))


class HierarchicalDispatcher(ExpertParallelDispatcher):
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
        self._one_per_route = AllToAllDispatcher(setup)
        self.inter = setup.communicator(setup.nodes.inter)
        self.intra = setup.communicator(setup.nodes.intra)
        self.outbox = setup.outbox
        if self.inter.num_ranks * self.intra.num_ranks != self.communicator.num_ranks:
            raise ValueError(
                f"{self.inter.num_ranks} nodes × {self.intra.num_ranks} ranks are not the EP "
                f"group's {self.communicator.num_ranks}"
            )

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts to send the distinct rows between nodes, and the routes that read them.
        Collective.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        if routes.per_expert:
            return self._one_per_route.dispatch(x_UD, routes)
        expert_map = self.setup.begin(x_UD, routes, [self.communicator, self.inter, self.intra])
        num_chunks, device = self.setup.overlap_chunks, x_UD.device
        inter = DedupAllToAll(
            self.inter,
            routes,
            expert_map.places_on_nodes(device, self.intra.num_ranks),
            num_sources=len(x_UD),
            num_slots=expert_map.num_slots,
            num_chunks=num_chunks,
            rows_per_token=self.setup.rows_per_token(routes, len(x_UD)),
        )
        sizes, intra_sizes = save_decision(
            lambda: self._exchange_sizes(inter, expert_map.places(device))
        )
        chunks = inter.dispatch(x_UD, sizes)
        self._count(sizes, intra_sizes)
        own = expert_map.slots_P[self.communicator.rank]
        if self.outbox is not None:
            self.outbox.check(self.intra.checking)
        exchanges = _BothExchanges(
            expert_map, inter, chunks, self.intra, intra_sizes, own, {}, self.outbox
        )
        return _Dispatched([_Chunk(exchanges, number) for number in range(num_chunks)], exchanges)

    def _count(self, sizes: ExchangeSizes, intra_sizes: Sequence[ExchangeSizes]) -> None:
        self.setup.counters.add(
            rows_sent=sum(row[ROWS] for each in (sizes, *intra_sizes) for row in each.sent),
            routes_served=sum(row[ROUTES] for each in intra_sizes for row in each.received),
        )

    def _exchange_sizes(
        self, inter: DedupAllToAll, places: ExpertPlaces
    ) -> tuple[ExchangeSizes, list[ExchangeSizes]]:
        """Exchanges counts and reads them on the host; the routes are written down meanwhile.

        Returns:
            The sizes of the inter exchange, and of every chunk's intra exchange.
        """
        pending = self._start_counts(inter, places)
        inter.prepare()
        return self._read_sizes(inter, self.setup.counters.wait(pending))

    def _start_counts(self, inter: DedupAllToAll, places: ExpertPlaces) -> Pending:
        """Starts to gather the table of all ranks' counts."""
        by_rank = replace(
            inter.addresses,
            rank_E=places.rank_E,
            slot_E=places.slot_E,
            num_ranks=self.communicator.num_ranks,
        )
        counts = torch.cat((count_sends(by_rank).counts_V3, inter.counts_V3))
        return AllGather(self.communicator.group).start(counts)

    def _read_sizes(
        self, inter: DedupAllToAll, gathered: Tensor
    ) -> tuple[ExchangeSizes, list[ExchangeSizes]]:
        num_nodes, node_size = self.inter.num_ranks, self.intra.num_ranks
        here, local = self.inter.rank, self.intra.rank
        by_rows = inter.num_chunks * self.communicator.num_ranks
        gathered = gathered.view(num_nodes, node_size, -1, 3)  # of source node and source rank
        by_rank = gathered[:, :, :by_rows].reshape(
            num_nodes, node_size, inter.num_chunks, num_nodes, node_size, 3
        )
        by_node = gathered[:, local, by_rows:].reshape(num_nodes, inter.num_chunks, num_nodes, 3)
        inter_received = by_node[:, :, here].transpose(0, 1).reshape(-1, 3)
        # What reaches this node through its rank i, whatever node it comes from, goes on from rank
        # i.
        intra_sent = by_rank[:, local, :, here].sum(0)
        intra_received = by_rank[:, :, :, here, local].sum(0).transpose(0, 1).contiguous()
        tables = [table for pair in zip(intra_sent, intra_received, strict=True) for table in pair]
        sizes, *intra_sizes = read_sizes(
            self.setup.counters, inter.counts_V3, inter_received, *tables
        )
        return sizes, intra_sizes
