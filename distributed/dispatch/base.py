"""What every dispatcher is built from: its group, where the experts live, how it checks, and what it
counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.execution.recompute import recomputing
from ...model.moe import Dispatched
from ...model.routing import Routes
from ..mesh import new_group
from ..symmetric.outbox import Outbox
from .exchange import Communicator, Counters, gathered
from .expert_map import ExpertMap, contiguous_map

_equal_rows: ContextVar[bool] = ContextVar("equal_rows", default=False)


@contextmanager
def equal_rows() -> Iterator[None]:
    """Promises that all ranks of an EP group give every sparse layer equally many rows, none of them padding.

    A dispatcher then knows sizes that it would otherwise exchange.
    """
    token = _equal_rows.set(True)
    try:
        yield
    finally:
        _equal_rows.reset(token)


def rows_are_equal() -> bool:
    """Returns whether `equal_rows` is promised here."""
    return _equal_rows.get()


@dataclass(frozen=True)
class NodeGroups:
    """Holds a rank's groups for an exchange between nodes and one inside them.

    Rank i of every node's intra group is in the i-th inter group.
    """

    inter: dist.ProcessGroup  # one rank of every node, in order of nodes
    intra: dist.ProcessGroup  # the EP group's ranks of this node


@dataclass(frozen=True)
class Setup:
    """Holds one dispatcher's settings and counters; every rank of the group must choose the same.

    `check_every` n: every n-th pass compares the counts of all ranks and verifies every row that
    travels (1: each; 0: never). `expert_map` None: equal contiguous blocks of every bank.
    """

    group: dist.ProcessGroup
    check_every: int = 0
    ranks_per_node: int | None = None
    expert_map: ExpertMap | None = None
    nodes: NodeGroups | None = None
    outbox: Outbox | None = None  # of this rank, for dispatchers that exchange through memory
    counters: Counters = field(default_factory=Counters)
    name: str = ""  # of the dispatcher
    why: str = ""  # it was chosen

    def __post_init__(self) -> None:
        if self.check_every < 0:
            raise ValueError(f"check_every={self.check_every} must be at least 0")
        if self.expert_map is not None and len(self.expert_map.slots_P) != self.group.size():
            raise ValueError(
                f"an expert map for {len(self.expert_map.slots_P)} ranks, but the group has "
                f"{self.group.size()}"
            )

    def communicator(self, group: dist.ProcessGroup) -> Communicator:
        """Exchanges over that group, counted here."""
        nodes = nodes_of(dist.get_process_group_ranks(group), self.ranks_per_node)
        return Communicator(group, self.group, self.counters, nodes)


class ExpertParallelDispatcher(ABC):
    """Moves rows over the ranks of an EP group: what all such dispatchers have in common."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.communicator = setup.communicator(setup.group)
        self.communicators = [self.communicator]  # all over which it exchanges

    @abstractmethod
    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts to send every row to the ranks of its experts, as `Dispatcher` says."""

    def begin(self, x_UD: Tensor, routes: Routes) -> ExpertMap:
        """Begins a pass: counts it, and checks it if its turn has come.

        Returns:
            The slot of every expert, as this rank sees them.
        """
        setup, recomputed = self.setup, recomputing()
        setup.counters.begin_pass(len(routes.expert_N), recomputed=recomputed)
        due = setup.check_every > 0 and setup.counters.passes % setup.check_every == 0
        checking = due and not recomputed
        for communicator in self.communicators:
            communicator.checking = checking
        if checking:
            check_routes(x_UD, routes, setup.group)
        expert_map = setup.expert_map
        if expert_map is None:
            expert_map = contiguous_map(routes.num_experts, setup.group.size())
        return expert_map.seen_from(setup.group.rank())

    def stats(self) -> Counters:
        """Returns what this dispatcher has sent and served so far."""
        return self.setup.counters

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
    """Makes the one group that this rank is in; the tables divide the ranks."""
    [own] = [table for table in tables if dist.get_rank() in table]
    return new_group(f"{name}, ranks {own}", own, timeout_s)
