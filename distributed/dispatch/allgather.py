"""Every row to every rank: each computes what its experts have to say to it, and the answers are
summed on the way home.

The simplest of the dispatchers, and so the oracle of the others; also the best where nearly every
rank serves every row (K ≥ P).

Flow of one sparse layer and pass:
  1. gather from all ranks how many rows, targets and routes (per destination) they have, and read
     it on the host;
  2. gather all rows and all routes, padded to the largest number;
  3. the experts of this rank answer their routes: of all, those that are theirs, in order of source
     rank;
  4. reduce-scatter the sums of answers over the ranks.

Cost per rank and direction: (P − 1) · U rows of the fullest rank, whatever the routing. The
backward does 4 and 2 in reverse.

Routes with `per_expert` go one row per route (dispatch_alltoall.py): counts known to all, and no
copies for those who want none. There are no chunks.

Legend: U source rows, T target rows, N routes (of the fullest rank), P ranks, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.moe import Sent
from ...model.recompute import save_combine, save_decision
from ...model.routing import Routes
from .alltoall import AllToAllDispatcher
from .exchange import AllGather, AsyncCollective, Communicator, Counters
from .expert_map import ExpertMap
from .setup import Setup


@dataclass(frozen=True)
class _Part:
    """All ranks' rows and routes under way."""

    communicator: Communicator
    expert_map: ExpertMap
    rows: AsyncCollective
    weights: AsyncCollective
    marks: AsyncCollective  # of (P, N, 3): source row, slot, target row; slot −1 where there is no route
    counters: Counters
    num_routes: int  # of those, how many are for this rank
    num_rows: int  # of the fullest rank
    num_targets: int  # of the fullest rank

    @property
    def x_UD(self) -> Tensor:
        return self.rows.wait()

    @property
    def routes(self) -> Routes:
        """Those of this rank's experts; row u of rank p is row p · U + u, and so are targets."""
        marks_PN3 = self.marks.wait()
        source_N, slot_N, target_N = marks_PN3.flatten(0, 1).unbind(1)
        tables = self.expert_map.tables(slot_N.device)
        mine_N = (tables.rank_S[slot_N.clamp(min=0)] == self.communicator.rank) & (slot_N >= 0)
        chosen = torch.nonzero_static(mine_N, size=self.num_routes).squeeze(1)
        rank_N = chosen // max(1, marks_PN3.shape[1])
        return Routes(
            source_N[chosen] + rank_N * self.num_rows,
            tables.local_S[slot_N[chosen]],
            self.weights.wait()[chosen],
            target_N[chosen] + rank_N * self.num_targets,
            self.expert_map.slots_P[self.communicator.rank],
            self.num_targets * self.communicator.num_ranks,
            per_source=0,
            per_target=0,
        )

    def answer(self, y_UD: Tensor) -> AsyncCollective:
        return self.communicator.reduce_scatter(y_UD)


class AllGatherDispatcher:
    """Every row to every rank; equal to `LocalDispatcher` up to the order of sums."""

    def __init__(self, setup: Setup) -> None:
        if setup.overlap_chunks > 1:
            raise ValueError(
                f"the allgather dispatcher has no chunks (overlap_chunks={setup.overlap_chunks}): "
                "choose alltoall, dedup or "
                "hierarchical, or overlap_chunks=1"
            )
        self.setup, self._known = setup, AllToAllDispatcher(setup)
        self.communicator = self._known.communicator

    def stats(self) -> Counters:
        """What this dispatcher has done so far."""
        return self.setup.counters.copy()

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective. Returns all ranks' rows, and the routes of this rank's experts.

        Raises:
            ValueError: the routes' `per_expert` is not theirs, or the ranks cannot share their
                experts.
        """
        if routes.per_expert:
            return self._known.dispatch(x_UD, routes)
        expert_map, counters = (
            self.setup.begin(x_UD, routes, [self.communicator]),
            self.setup.counters,
        )
        tables, slot_N = expert_map.tables(x_UD.device), expert_map.slots_of(routes.expert_N)
        sizes = save_decision(lambda: self._sizes(x_UD, routes, tables.rank_S[slot_N]))
        num_rows, num_targets, num_routes = (max(row[i] for row in sizes) for i in range(3))
        served = sum(row[3 + self.communicator.rank] for row in sizes)
        rows = self.communicator.all_gather(_padded(x_UD, num_rows))
        weights = self.communicator.all_gather(_padded(routes.weight_N, num_routes))
        said_N3 = torch.stack((routes.source_N, slot_N, routes.target_N), 1)
        said_N3 = F.pad(said_N3, (0, 0, 0, num_routes - len(said_N3)), value=-1)
        marks = AsyncCollective(said_N3[None], AllGather(self.communicator.group), counters)
        counters.add(rows_sent=len(x_UD) * self.communicator.num_ranks, routes_served=served)
        part = _Part(
            self.communicator,
            expert_map,
            rows,
            weights,
            marks,
            counters,
            served,
            num_rows,
            num_targets,
        )
        return Sent([part], routes.num_targets)

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """Collective. (num_targets, D) at home: the sum over all ranks."""
        if not isinstance(sent.way_home, int):
            return self._known.combine(y, sent)
        [collective] = sent.answers(y)
        return save_combine(collective.wait()[: sent.way_home])

    def _sizes(self, x_UD: Tensor, routes: Routes, rank_N: Tensor) -> list[list[int]]:
        """Of every rank: rows, targets, routes, and the routes of every destination."""
        mine = torch.cat(
            (
                rank_N.new_tensor([len(x_UD), routes.num_targets, len(rank_N)]),
                self._per_rank(rank_N),
            )
        )
        told = AllGather(self.communicator.group).start(mine[None])
        return self.setup.counters.read(self.setup.counters.wait(told))

    def _per_rank(self, rank_N: Tensor) -> Tensor:
        counts = torch.zeros(self.communicator.num_ranks, dtype=torch.int64, device=rank_N.device)
        return counts.scatter_add_(0, rank_N, torch.ones_like(rank_N))


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, num_rows - len(rows)))
