"""The base class of dispatchers and their setup: group, expert map, checks and counters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


@dataclass(frozen=True)
class NodeGroups:
    """A rank's groups for exchanges between and inside nodes.

    The i-th inter group consists of the i-th rank of every node's intra group.
    """

    inter: dist.ProcessGroup  # one rank of every node, in node order
    intra: dist.ProcessGroup  # the EP group's ranks of this node


@dataclass(frozen=True)
class Setup:
    """A dispatcher's settings and counters; all ranks of the group must use the same settings.

    Every `check_every`-th pass compares the counts of all ranks and verifies every row (0: never).
    `expert_map` None means equal contiguous blocks of every bank.
    """

    group: dist.ProcessGroup
    check_every: int = 0
    ranks_per_node: int | None = None
    expert_map: ExpertMap | None = None
    nodes: NodeGroups | None = None
    outbox: Outbox | None = None  # of this rank, for dispatchers that use shared memory
    counters: Counters = field(default_factory=Counters)
    name: str = ""  # of the dispatcher
    why: str = ""  # the reason for choosing it

    def communicator(self, group: dist.ProcessGroup) -> Communicator:
        """Returns a communicator over `group` that counts in this setup's counters."""
        nodes = nodes_of(dist.get_process_group_ranks(group), self.ranks_per_node)
        return Communicator(group, self.group, self.counters, nodes)


class ExpertParallelDispatcher(ABC):
    """Base class of dispatchers over the ranks of an EP group."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.communicator = setup.communicator(setup.group)
        self.communicators = [self.communicator]  # all that it uses

    @abstractmethod
    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts sending every row to the ranks of its experts; implements `Dispatcher`."""

    def begin(self, x_UD: Tensor, routes: Routes) -> ExpertMap:
        """Begins a pass: counts it, and checks the routes every `check_every` passes.

        Returns:
            The slot of every expert as seen from this rank.
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

    def with_expert_map(self, expert_map: ExpertMap) -> Self:
        """Returns this dispatcher with a new expert map and the same counters."""
        return type(self)(replace(self.setup, expert_map=expert_map))


def check_routes(x_UD: Tensor, routes: Routes, group: dist.ProcessGroup) -> None:
    """Checks that no rank has a route out of range. Collective.

    Raises:
        ValueError: on all ranks; lists the faults of each.
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
    """Creates this rank's groups between and inside the nodes of an EP group. Collective.

    Raises:
        ValueError: the group's nodes have different numbers of its ranks.
    """
    by_node: dict[int, list[int]] = {}
    ranks = dist.get_process_group_ranks(group)
    for rank, node in zip(ranks, nodes_of(ranks, ranks_per_node), strict=True):
        by_node.setdefault(node, []).append(rank)
    blocks = list(by_node.values())
    if len({len(block) for block in blocks}) > 1:
        raise ValueError(
            "the hierarchical dispatcher needs equally many ranks of an EP group on each node; the ranks "
            f"{ranks} with {ranks_per_node} ranks per node give {[len(block) for block in blocks]}"
        )
    columns = [list(column) for column in zip(*blocks, strict=True)]
    return NodeGroups(
        inter=_own_group("tokens between nodes", columns, timeout_s),
        intra=_own_group("tokens inside a node", blocks, timeout_s),
    )


def nodes_of(ranks: Sequence[int], ranks_per_node: int | None) -> tuple[int, ...]:
    """Returns the node of every rank; `ranks_per_node` None means a single node."""
    return tuple(0 if ranks_per_node is None else rank // ranks_per_node for rank in ranks)


def _own_group(name: str, tables: Sequence[list[int]], timeout_s: float) -> dist.ProcessGroup:
    """Creates this rank's group among `tables`, which partition the ranks."""
    [own] = [table for table in tables if dist.get_rank() in table]
    return new_group(f"{name}, ranks {own}", own, timeout_s)
