"""A dispatcher of one's own: one row per route, sorted by rank and by nothing else.
docs/extend.md explains it part by part.

    python -m torch.distributed.run --nproc-per-node 2 examples/add_a_dispatcher.py

compares it with one rank that has all experts: outputs and gradients.

Legend: U source rows, T target rows, N routes, P ranks, D width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moebius.distributed.dispatch.base import ExpertParallelDispatcher
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.exchange import AllToAll, AsyncCollective
from moebius.distributed.dispatch.table import DISPATCHERS, DispatcherEntry, SendingPattern
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.process.process import start_process
from moebius.model.execution.recompute import save_combine, save_decision
from moebius.model.moe import Dispatcher, LocalDispatcher
from moebius.model.routing import Routes, token_routes

# The dispatcher -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortedPass:
    """A pass under way: one route for every row that comes."""

    dispatcher: "SortedDispatcher"
    routes_sent: Routes  # in the order in which their rows were sent
    sent_P: list[int]
    received_P: list[int]
    rows: AsyncCollective
    weights: AsyncCollective
    slots: AsyncCollective
    num_slots: int  # the experts of this rank

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows."""
        return self.rows.wait()

    @property
    def routes(self) -> Routes:
        """Waits for gate weights and slots; route n reads row n."""
        weight_N, slot_N = self.weights.wait(), self.slots.wait()
        row_N = torch.arange(len(slot_N), device=slot_N.device)
        return Routes(row_N, slot_N, weight_N, row_N, self.num_slots, len(row_N), 1, 1)

    def combine(self, y_TD: Tensor) -> Tensor:
        """Sends the outputs back, to every rank as many rows as it sent, and adds up what comes
        home, (num_targets, D). Collective.
        """
        all_to_all = self.dispatcher.communicator.all_to_all
        pending = all_to_all(y_TD, self.received_P, self.sent_P, is_combine=True)
        rows_ND, routes = pending.wait(), self.routes_sent
        sums_TD = rows_ND.new_zeros(routes.num_targets, rows_ND.shape[1])
        return save_combine(sums_TD.index_add(0, routes.target_N, rows_ND))


class SortedDispatcher(ExpertParallelDispatcher):
    """Sends one row per route, in the order of ranks."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> SortedPass:
        """Starts to send every row to the rank of its expert. Collective."""
        expert_map = self.begin(x_UD, routes)
        tables, slot_N = expert_map.tables(x_UD.device), expert_map.slots_of(routes.expert_N)
        rank_N = tables.rank_S[slot_N]
        sent_P, received_P = save_decision(lambda: self._exchange_counts(rank_N))
        self.setup.counters.add(rows_sent=sum(sent_P), routes_served=sum(received_P))
        order_N = rank_N.argsort(stable=True)

        def send(values: Tensor) -> AsyncCollective:
            return self.communicator.all_to_all(values, sent_P, received_P)

        return SortedPass(
            self,
            replace(routes, target_N=routes.target_N[order_N]),
            sent_P,
            received_P,
            rows=send(x_UD[routes.source_N[order_N]]),
            weights=send(routes.weight_N[order_N]),
            slots=send(tables.local_S[slot_N[order_N]]),
            num_slots=expert_map.slots_P[self.communicator.rank],
        )

    def _exchange_counts(self, rank_N: Tensor) -> tuple[list[int], list[int]]:
        """Tells every rank how many rows to expect, and reads both sides on the host."""
        num_ranks, counters = self.communicator.num_ranks, self.setup.counters
        sent_P = rank_N.new_zeros(num_ranks).index_add(0, rank_N, torch.ones_like(rank_N))
        one_each = [1] * num_ranks
        pending = AllToAll(self.communicator.group, one_each, one_each).start(sent_P)
        sent, received = counters.read(torch.stack((sent_P, counters.wait(pending))))
        return sent, received


DISPATCHERS["sorted"] = DispatcherEntry(
    SortedDispatcher, "one row per route", SendingPattern(row_per_route=True)
)

# Trying it ------------------------------------------------------------------------------------------------------------

NUM_EXPERTS, TOP_K, TOKENS, WIDTH = 8, 3, 16, 4


def run_pass(
    dispatcher: Dispatcher, x_TD: Tensor, routes: Routes, weight_EDD: Tensor
) -> tuple[Tensor, Tensor]:
    """Lets experts, which are matrices here, compute a pass.

    Returns:
        The outputs, and the gradient of the rows where each output counts by its own square.
    """
    x_TD = x_TD.clone().requires_grad_()
    dispatched = dispatcher.dispatch(x_TD, routes)
    x_UD, its = dispatched.x_UD, dispatched.routes
    products_ND = torch.einsum("nd,ndo->no", x_UD[its.source_N], weight_EDD[its.expert_N])
    weighed_ND = products_ND * its.weight_N[:, None]
    zeros_TD = x_TD.new_zeros(its.num_targets, WIDTH)
    y_TD = dispatched.combine(zeros_TD.index_add(0, its.target_N, weighed_ND))
    [grad_TD] = torch.autograd.grad(y_TD.square().sum(), x_TD)
    return y_TD.detach(), grad_TD


def largest_difference() -> float:
    """Returns by how much outputs and gradients differ from one rank's, at most."""
    with start_process("cpu", timeout_s=60) as process:
        mesh = build_mesh(
            plan_layout(MeshConfig(ep=process.world_size), process.world_size), process
        )
        weight_EDD = torch.randn(
            NUM_EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)
        )
        generator = torch.Generator().manual_seed(1 + process.rank)
        x_TD = torch.randn(TOKENS + process.rank, WIDTH, generator=generator)
        scores_TE = torch.rand(len(x_TD), NUM_EXPERTS, generator=generator)
        gates = scores_TE.topk(TOP_K)
        routes = token_routes(gates.indices, gates.values, num_experts=NUM_EXPERTS)
        dispatcher = make_dispatcher("sorted", mesh.ep_group, check_every=1)
        own = weight_EDD.chunk(process.world_size)[process.rank]
        pairs = zip(
            run_pass(dispatcher, x_TD, routes, own),
            run_pass(LocalDispatcher(), x_TD, routes, weight_EDD),
            strict=True,
        )
        return max((ours - local).abs().max().item() for ours, local in pairs)


def main() -> None:
    """Prints what every rank found."""
    print(f"largest difference from one rank: {largest_difference():.1e}", flush=True)


if __name__ == "__main__":
    main()
