"""What every dispatcher is built from: its group, how it cuts and checks, where the experts live,
and what it counts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.addresses import ROUTES, ROWS, TARGETS
from ...model.execution.recompute import recomputing
from ...model.moe import Dispatched
from ...model.routing import Routes
from ..symmetric.interface import RowOutbox
from .exchange import Communicator, Counters, gathered
from .expert_map import ExpertMap, contiguous_map
from .room import RouteRoom

_equal_rows: ContextVar[bool] = ContextVar("equal_rows", default=False)


@contextmanager
def equal_rows() -> Iterator[None]:
    """Promises that until it is left all ranks of an EP group give every sparse layer equally many
    rows, none of them padding: so what follows from that needs no exchange.
    """
    token = _equal_rows.set(True)
    try:
        yield
    finally:
        _equal_rows.reset(token)


@dataclass(frozen=True)
class NodeGroups:
    """A rank's groups for an exchange between nodes and one inside them. Rank i of every node's intra group is in the i-th
    inter group.
    """

    inter: dist.ProcessGroup  # one rank of every node, in order of nodes
    intra: dist.ProcessGroup  # the EP group's ranks of this node


@dataclass(frozen=True)
class Setup:
    """One dispatcher's settings and counters; every rank of the group must choose the same.

    `check_every` n: every n-th pass compares the counts of all ranks and verifies every row that
    travels (1: each; 0: never). `expert_map` None: equal contiguous blocks of every bank.
    """

    group: dist.ProcessGroup
    overlap_chunks: int = 1
    check_every: int = 0
    ranks_per_node: int | None = None
    expert_map: ExpertMap | None = None
    nodes: NodeGroups | None = None
    outbox: RowOutbox | None = None  # of this rank, for dispatchers that exchange through memory
    counters: Counters = field(default_factory=Counters)
    room: RouteRoom = field(default_factory=RouteRoom)
    name: str = ""  # of the dispatcher
    why: str = ""  # it was chosen

    def __post_init__(self) -> None:
        if self.overlap_chunks < 1 or self.check_every < 0:
            raise ValueError(
                f"overlap_chunks={self.overlap_chunks} must be at least 1, "
                f"check_every={self.check_every} at least 0"
            )
        if self.expert_map is not None and len(self.expert_map.slots_P) != self.group.size():
            raise ValueError(
                f"an expert map for {len(self.expert_map.slots_P)} ranks, but the group has "
                f"{self.group.size()}"
            )

    def communicator(self, group: dist.ProcessGroup) -> Communicator:
        """Exchanges over that group, counted here."""
        nodes = nodes_of(dist.get_process_group_ranks(group), self.ranks_per_node)
        return Communicator(group, self.group, self.counters, nodes)

    def begin(
        self, x_UD: Tensor, routes: Routes, communicators: Sequence[Communicator]
    ) -> ExpertMap:
        """Begins a pass: counts it, checks it if its turn has come.

        Returns:
            The slot of every expert, as this rank sees them.
        """
        recomputed = recomputing()
        self.counters.begin_pass(len(routes.expert_N), recomputed=recomputed)
        checking = (
            self.check_every > 0 and self.counters.passes % self.check_every == 0 and not recomputed
        )
        for communicator in communicators:
            communicator.checking = checking
        if checking:
            check_routes(x_UD, routes, self.group)
        expert_map = self.expert_map
        if expert_map is None:
            expert_map = contiguous_map(routes.num_experts, self.group.size())
        return expert_map.seen_from(self.group.rank())

    def counts_of_token(
        self, routes: Routes, num_sources: int, expert_map: ExpertMap
    ) -> list[int] | None:
        """Returns how many rows, routes and target rows of every token go to every rank, where that
        is the same for all: every rank serves equally many heads, each with experts of its own, and
        all ranks have equally many rows. None where it is not so, or not known.
        """
        heads, num_ranks = routes.equal_blocks, self.group.size()
        is_known = heads > 0 and heads % num_ranks == 0 and expert_map.is_even
        if not (is_known and _equal_rows.get()):
            return None
        rows_per_token = self.rows_per_token(routes, num_sources)
        num_tokens = max(1, num_sources // rows_per_token)
        counts = [0, 0, 0]
        counts[ROWS] = -(-rows_per_token // num_ranks)  # one row, or those of its heads
        counts[ROUTES] = len(routes.expert_N) // num_tokens // num_ranks
        counts[TARGETS] = -(-(routes.num_targets // num_tokens) // num_ranks)
        return counts

    @staticmethod
    def sends_equally(routes: Routes) -> bool:
        """Returns whether every rank is known to have as many routes: those of a choice per row, of
        rows of which all ranks promise to have as many.
        """
        return _equal_rows.get() and routes.per_source > 0 and not routes.per_expert

    @staticmethod
    def rows_per_token(routes: Routes, num_sources: int) -> int:
        """Returns how many neighbouring source rows are one token's, which no chunks part.

        A token is a block of source rows and the block of target rows that belongs to it: as many
        as divide both numbers. So no row travels in two chunks.
        """
        return max(1, num_sources // max(1, math.gcd(num_sources, routes.num_targets)))


class ExpertParallelDispatcher(ABC):
    """A dispatcher over the ranks of an EP group: what all of them have in common."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.communicator = setup, setup.communicator(setup.group)

    @abstractmethod
    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts to send every row to the ranks of its experts, as `Dispatcher` says."""

    def stats(self) -> Counters:
        """Returns what this dispatcher has sent and served so far."""
        return self.setup.counters.read_all()

    def with_expert_map(self, expert_map: ExpertMap) -> Self:
        """Returns the same dispatcher for experts that have moved; its counters go on."""
        return type(self)(replace(self.setup, expert_map=expert_map))


def check_routes(x_UD: Tensor, routes: Routes, group: dist.ProcessGroup) -> None:
    """Checks that no rank has a route out of range. Collective.

    Raises:
        ValueError: on all ranks, with what each of them has.
    """
    bounds = {
        "expert": (routes.expert_N, routes.num_experts),
        "source row": (routes.source_N, len(x_UD)),
    }
    bounds["target row"] = (routes.target_N, routes.num_targets)
    mine = torch.stack([((index < 0) | (index >= end)).sum() for index, end in bounds.values()])
    ranks = dist.get_process_group_ranks(group)
    faults = [
        f"rank {rank} has {count} routes whose {name} does not exist"
        for rank, row in zip(ranks, gathered(mine, group).tolist(), strict=True)
        for name, count in zip(bounds, row, strict=True)
        if count
    ]
    if faults:
        raise ValueError(f"routes out of range: {'; '.join(faults)} ({routes.num_experts} experts)")


def build_node_groups(
    group: dist.ProcessGroup, ranks_per_node: int | None, *, timeout_s: float
) -> NodeGroups:
    """Makes this rank's groups between and inside the nodes of an EP group. Collective.

    Raises:
        ValueError: the group has not equally many ranks on each of its nodes.
    """
    by_node: dict[int, list[int]] = {}
    ranks = dist.get_process_group_ranks(group)
    for rank, node in zip(ranks, nodes_of(ranks, ranks_per_node), strict=True):
        by_node.setdefault(node, []).append(rank)
    blocks = list(by_node.values())
    if len({len(block) for block in blocks}) > 1:
        raise ValueError(
            "the hierarchical dispatcher wants equally many ranks of an EP group on each node; of "
            f"{ranks} "
            f"with {ranks_per_node} ranks per node there are {[len(block) for block in blocks]}"
        )
    columns = [list(column) for column in zip(*blocks, strict=True)]
    return NodeGroups(
        inter=_own_group("tokens between nodes", columns, timeout_s),
        intra=_own_group("tokens inside a node", blocks, timeout_s),
    )


def nodes_of(ranks: Sequence[int], ranks_per_node: int | None) -> tuple[int, ...]:
    """Returns the node of every rank; all are on one where `ranks_per_node` is None."""
    return tuple(0 if ranks_per_node is None else rank // ranks_per_node for rank in ranks)


def _own_group(name: str, tables: Sequence[list[int]], timeout_s: float) -> dist.ProcessGroup:
    """Makes the one group that this rank is in; the tables part the ranks, so nobody waits in a
    circle.
    """
    [own] = [table for table in tables if dist.get_rank() in table]
    group = dist.new_group(
        own,
        timeout=timedelta(seconds=timeout_s),
        group_desc=f"{name}, ranks {own}",
        use_local_synchronization=True,
    )
    if not isinstance(group, dist.ProcessGroup):
        raise AssertionError(f"rank {dist.get_rank()} is not in its own group {name}: {own}")
    return group
