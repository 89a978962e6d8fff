"""Two hops: one row per node, then inside the node one row per rank; answers are summed inside the
node before they go back.

Rank i of a node speaks to rank i of the others (the inter hop), and what comes in is spread among
the ranks of the own node (the intra hop), both as in dispatch_dedup.py. So between nodes exactly Σ
over rows of the distinct nodes that serve them travel, which is what the slow links carry; for 8
experts per token on 2 nodes of 8 ranks 1.99 rows where `dedup` sends 6.5 on average.

The sizes of both hops follow from one table, which all ranks gather: how many rows, routes and
targets every rank has for every rank and for every node. So there is one read on the host per pass,
as with the others. Costs P · (P + M) · 24 bytes per chunk.

While the experts answer one chunk, the next one's rows travel between the ranks and the one after
that between the nodes.

Legend: P ranks = M nodes · G ranks of a node, c chunks, U source rows, T target rows, N routes.
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
from .dedup import count_rows, read_sizes, routes_of
from .dedup_hop import ROUTES, DedupAllToAll, DedupChunk, ExchangeSizes, SendPlan, count_of, mask_of
from .exchange import AllGather, AsyncCollective, Communicator, Counters, Pending
from .expert_map import ExpertMap
from .setup import Setup


@dataclass(frozen=True)
class _Pass:
    """What a pass knows of both hops."""

    expert_map: ExpertMap
    exchange: DedupAllToAll
    chunks: list[DedupChunk]
    inner_sizes: list[ExchangeSizes]  # of every chunk
    intra: Communicator
    inner: dict[int, tuple[DedupAllToAll, DedupChunk]]  # by chunk, as they are launched

    def enter(self, chunk: int) -> tuple[DedupAllToAll, DedupChunk]:
        """Launches a chunk's intra hop (once); waits for its inter hop."""
        if chunk not in self.inner:
            came = self.chunks[chunk].wait()
            tables = self.expert_map.tables(came.x_UD.device)
            destination_N = tables.rank_S[came.slot_N] % self.intra.num_ranks
            exchange = DedupAllToAll(
                self.intra,
                SendPlan(
                    came.source_N,
                    came.target_N,
                    destination_N,
                    tables.local_S[came.slot_N],
                    came.weight_N,
                    len(came.x_UD),
                    came.num_targets,
                ),
            )
            [inner] = exchange.launch(came.x_UD, self.inner_sizes[chunk])
            self.inner[chunk] = (exchange, inner)
        return self.inner[chunk]


@dataclass(frozen=True)
class _Part:
    """A chunk at the end of its intra hop. To ask for it launches the next chunk's intra hop, too."""

    under_way: _Pass
    chunk: int
    num_slots: int

    @property
    def _arrived(self) -> DedupChunk:
        _, inner = self.under_way.enter(self.chunk)
        if self.chunk + 1 < len(self.under_way.chunks):
            self.under_way.enter(self.chunk + 1)
        return inner

    @property
    def x_UD(self) -> Tensor:
        return self._arrived.rows.wait()

    @property
    def routes(self) -> Routes:
        return routes_of(self._arrived.wait(), self.num_slots)

    def answer(self, y_UD: Tensor) -> AsyncCollective:
        return self._arrived.answer(y_UD)


class HierarchicalDispatcher:
    """Dedup between nodes, then inside the node; equal to `LocalDispatcher` up to the order of
    sums.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.nodes is None:
            raise ValueError(
                "the hierarchical dispatcher needs the groups between and inside nodes "
                "(build_node_groups)"
            )
        self.setup, self._known = setup, AllToAllDispatcher(setup)
        self.inter, self.intra = (
            setup.communicator(setup.nodes.inter),
            setup.communicator(setup.nodes.intra),
        )
        self.communicator = self._known.communicator
        if self.inter.num_ranks * self.intra.num_ranks != self.communicator.num_ranks:
            raise ValueError(
                f"{self.inter.num_ranks} nodes × {self.intra.num_ranks} ranks are not the EP "
                f"group's {self.communicator.num_ranks}"
            )

    def stats(self) -> Counters:
        """What this dispatcher has done so far; rows of both hops."""
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
        expert_map = self.setup.begin(x_UD, routes, [self.communicator, self.inter, self.intra])
        tables, num_chunks = expert_map.tables(x_UD.device), self.setup.overlap_chunks
        slot_N = expert_map.slots_of(routes.expert_N)
        rank_N, chunk_N = tables.rank_S[slot_N], self.setup.chunk_of(routes, len(x_UD))
        destination_N = chunk_N * self.inter.num_ranks + rank_N // self.intra.num_ranks
        exchange = DedupAllToAll(
            self.inter,
            SendPlan(
                routes.source_N,
                routes.target_N,
                destination_N,
                slot_N,
                routes.weight_N,
                len(x_UD),
                routes.num_targets,
            ),
            num_chunks,
        )
        asked = save_decision(
            lambda: self._ask(exchange, chunk_N * self.communicator.num_ranks + rank_N)
        )
        exchange.plan()
        outer, inner = save_decision(lambda: self._sizes(exchange, asked))
        under_way = _Pass(expert_map, exchange, exchange.launch(x_UD, outer), inner, self.intra, {})
        for sizes in (outer, *inner):
            count_rows(self.setup.counters, sizes)
        self.setup.counters.add(
            routes_served=sum(row[ROUTES] for sizes in inner for row in sizes.received)
        )
        own = expert_map.slots_P[self.communicator.rank]
        return Sent([_Part(under_way, chunk, own) for chunk in range(num_chunks)], under_way)

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """Collective. Sums inside the nodes, then (num_targets, D) at home, added up in the order
        of nodes.
        """
        under_way = sent.way_home
        if not isinstance(under_way, _Pass):
            return self._known.combine(y, sent)
        is_combine = []
        for chunk, collective in enumerate(sent.answers(y)):
            exchange, _ = under_way.enter(chunk)
            is_combine.append(under_way.chunks[chunk].answer(exchange.collect([collective])))
        return save_combine(under_way.exchange.collect(is_combine))

    def _ask(self, exchange: DedupAllToAll, destination_N: Tensor) -> Pending:
        """The table of all ranks' counts, on its way."""
        num_destinations = exchange.num_chunks * self.communicator.num_ranks
        mine = torch.cat(
            (_counts(exchange.routes, destination_N, num_destinations), exchange.counts_V3)
        )
        return AllGather(self.communicator.group).start(mine)

    def _sizes(
        self, exchange: DedupAllToAll, asked: Pending
    ) -> tuple[ExchangeSizes, list[ExchangeSizes]]:
        """Of the inter hop, and of every chunk's intra hop."""
        num_nodes, node_size, num_chunks = (
            self.inter.num_ranks,
            self.intra.num_ranks,
            exchange.num_chunks,
        )
        here, local = self.inter.rank, self.intra.rank
        told = self.setup.counters.wait(asked).view(
            num_nodes, node_size, -1, 3
        )  # of source node and source rank
        by_rank = told[:, :, : num_chunks * self.communicator.num_ranks]
        by_rank = by_rank.reshape(num_nodes, node_size, num_chunks, num_nodes, node_size, 3)
        by_node = told[:, local, num_chunks * self.communicator.num_ranks :].reshape(
            num_nodes, num_chunks, num_nodes, 3
        )
        outer_received = by_node[:, :, here].transpose(0, 1).reshape(-1, 3)
        # What reaches this node through its rank i, whatever node it comes from, goes on from rank
        # i.
        inner_sent = by_rank[:, local, :, here].sum(0)
        inner_received = by_rank[:, :, :, here, local].sum(0).transpose(0, 1).contiguous()
        tables = [table for pair in zip(inner_sent, inner_received, strict=True) for table in pair]
        outer, *inner = read_sizes(self.setup.counters, exchange.counts_V3, outer_received, *tables)
        return outer, inner


def _counts(routes: SendPlan, destination_N: Tensor, num_destinations: int) -> Tensor:
    """Distinct rows, routes and distinct targets of every destination."""
    rows = mask_of(destination_N, routes.source_N, num_destinations, routes.num_sources).sum(1)
    targets = mask_of(destination_N, routes.target_N, num_destinations, routes.num_targets).sum(1)
    return torch.stack((rows, count_of(destination_N, num_destinations), targets), 1)
