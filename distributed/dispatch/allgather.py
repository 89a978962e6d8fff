"""Gathers every row on every rank, and reduce-scatters the experts' outputs.

The simplest dispatcher, and therefore the oracle for the others. It is also the fastest if nearly
every rank serves every row (K ≥ P).

Flow of one sparse layer and pass:
  1. all-gather each rank's numbers of rows, targets and routes (per destination), and read them on
     the host;
  2. all-gather all rows and routes, padded to the largest number;
  3. this rank's experts compute their routes, in order of source rank;
  4. reduce-scatter the sums of outputs over the ranks.

Cost per rank and direction: (P − 1) · U rows of the fullest rank, whatever the routing. The
backward runs steps 4 and 2 in reverse.

Routes with `per_expert` are sent one row per route (alltoall.py): all counts are known, and no rank
receives rows that it does not need.

Legend: U source rows, T target rows, N routes (of the fullest rank), P ranks, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.execution.recompute import save_combine, save_decision
from ...model.layers import on_device
from ...model.moe import Dispatched
from ...model.routing import Routes
from .alltoall import RowSharingDispatcher
from .exchange import AllGather, AsyncCollective, Communicator
from .expert_map import ExpertMap


@dataclass(frozen=True)
class _GatheredRows:
    """The rows and routes of all ranks in flight."""

    communicator: Communicator
    expert_map: ExpertMap
    rows: AsyncCollective
    weights: AsyncCollective
    addresses: AsyncCollective  # (P, N, 3): source row, slot, target row; slot −1: no route
    num_routes: int  # for this rank's experts
    num_rows: int  # of the fullest rank
    most_targets: int  # of the fullest rank
    num_targets: int  # of this rank

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows of all ranks."""
        return self.rows.wait()

    @property
    def routes(self) -> Routes:
        """Waits for the routes and selects those of this rank's experts.

        Row u of rank p becomes row p · U + u; targets are numbered likewise.
        """
        addresses_PN3 = self.addresses.wait()
        source_N, slot_N, target_N = addresses_PN3.flatten(0, 1).unbind(1)
        tables = self.expert_map.tables(slot_N.device)
        mine_N = (tables.rank_S[slot_N.clamp(min=0)] == self.communicator.rank) & (slot_N >= 0)
        chosen = torch.nonzero_static(mine_N, size=self.num_routes).squeeze(1)
        rank_N = chosen // max(1, addresses_PN3.shape[1])
        return Routes(
            source_N[chosen] + rank_N * self.num_rows,
            tables.local_S[slot_N[chosen]],
            self.weights.wait()[chosen],
            target_N[chosen] + rank_N * self.most_targets,
            self.expert_map.slots_P[self.communicator.rank],
            self.most_targets * self.communicator.num_ranks,
            per_source=0,
            per_target=0,
        )

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sums the outputs over all ranks and returns this rank's, (num_targets, D). Collective."""
        sums_TD = self.communicator.reduce_scatter(y_TD).wait()
        return save_combine(sums_TD[: self.num_targets])


class AllGatherDispatcher(RowSharingDispatcher):
    """Sends every row to every rank; equal to `LocalDispatcher` up to the order of sums."""

    def dispatch_shared(self, x_UD: Tensor, routes: Routes, expert_map: ExpertMap) -> Dispatched:
        """Starts sending every row and route to all ranks. Collective."""
        tables, slot_N = expert_map.tables(x_UD.device), expert_map.slots_of(routes.expert_N)
        sizes = save_decision(lambda: self._sizes(x_UD, routes, tables.rank_S[slot_N]))
        num_rows, most_targets, num_routes = (max(row[i] for row in sizes) for i in range(3))
        served = sum(row[3 + self.communicator.rank] for row in sizes)
        self.setup.counters.add(
            rows_sent=len(x_UD) * self.communicator.num_ranks, routes_served=served
        )
        addresses_N3 = torch.stack((routes.source_N, slot_N, routes.target_N), 1)
        padding = (0, 0, 0, num_routes - len(addresses_N3))
        addresses_N3 = F.pad(addresses_N3, padding, value=-1)
        return _GatheredRows(
            self.communicator,
            expert_map,
            rows=self.communicator.all_gather(_padded(x_UD, num_rows)),
            weights=self.communicator.all_gather(_padded(routes.weight_N, num_routes)),
            addresses=self.communicator.all_gather(addresses_N3[None], counted=False),
            num_routes=served,
            num_rows=num_rows,
            most_targets=most_targets,
            num_targets=routes.num_targets,
        )

    def _sizes(self, x_UD: Tensor, routes: Routes, rank_N: Tensor) -> list[list[int]]:
        """Reads each rank's numbers of rows, targets, routes, and routes per destination."""
        sizes = torch.tensor([len(x_UD), routes.num_targets, len(rank_N)])
        here = on_device(sizes, rank_N.device)
        served_P = torch.zeros(self.communicator.num_ranks, dtype=torch.int64, device=rank_N.device)
        served_P.scatter_add_(0, rank_N, torch.ones_like(rank_N))
        counters = self.setup.counters
        pending = AllGather(self.communicator.group).start(torch.cat((here, served_P))[None])
        return counters.read(counters.wait(pending))


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, num_rows - len(rows)))
