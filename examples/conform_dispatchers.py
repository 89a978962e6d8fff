"""moebius' own dispatchers under moebius_conform, against a plain loop over rows (satellites/conform/README.md).

    python -m moebius_conform examples/conform_dispatchers.py:dedup

Routes are given, so that rows may name an expert twice, and the gradients of gate weights are seen
as they come. The layer is what a sparse layer does: dispatch, experts, combine.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moebius.distributed.dispatch.base import build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.table import needs_nodes, needs_outbox
from moebius.distributed.symmetric.outbox import open_outbox
from moebius.kernels.functional import routed_mlp
from moebius.model.routing import token_routes
from moebius_conform import Layer
from moebius_conform.loop import LoopMoE

WIDTH, HIDDEN, EXPERTS, TOP_K = 24, 20, 8, 3


class Dispatched(nn.Module):
    """This rank's experts behind a dispatcher."""

    def __init__(self, group: dist.ProcessGroup, dispatcher: str) -> None:
        super().__init__()
        count = EXPERTS // group.size()
        name = dispatcher if group.size() > 1 else "local"
        self.dispatcher = make_dispatcher(name, group, **_what_it_wants(name, group))
        self.w_up = nn.Parameter(torch.empty(count, WIDTH, HIDDEN, dtype=torch.float64))
        self.w_down = nn.Parameter(torch.empty(count, HIDDEN, WIDTH, dtype=torch.float64))

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Sends rows to their experts' ranks, computes, and adds up what comes back."""
        routes = token_routes(experts_TK, gates_TK, num_experts=EXPERTS)
        dispatched = self.dispatcher.dispatch(x_TD, routes)
        y_TD = routed_mlp(dispatched.x_UD, self.w_up, self.w_down, dispatched.routes)
        return dispatched.combine(y_TD)


def _what_it_wants(dispatcher: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """Memory that the ranks share, or groups between and inside nodes of two ranks. Collective."""
    if needs_outbox(dispatcher):
        outbox = open_outbox(group, timeout_s=60)
        if isinstance(outbox, str):
            raise RuntimeError(f"these ranks share no memory: {outbox}")
        return {"outbox": outbox}
    if needs_nodes(dispatcher):
        return {"nodes": build_node_groups(group, 2, timeout_s=60), "ranks_per_node": 2}
    return {}


def behind(dispatcher: str) -> Layer:
    """The layer with one of moebius' dispatchers."""
    return Layer(
        build=functools.partial(Dispatched, dispatcher=dispatcher),
        routes="given",
        width=WIDTH,
        num_experts=EXPERTS,
        top_k=TOP_K,
        reference=lambda: LoopMoE(WIDTH, HIDDEN, EXPERTS, dtype=torch.float64),
    )


allgather, alltoall, dedup = (behind(name) for name in ("allgather", "alltoall", "dedup"))
symmetric, hierarchical = (behind(name) for name in ("symmetric", "hierarchical"))
