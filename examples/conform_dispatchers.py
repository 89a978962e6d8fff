"""moebius' own dispatchers under moebius.conform, against a plain loop over rows (docs/conform.md).

    python -m moebius.conform examples/conform_dispatchers.py:dedup

Routes are given, so that rows may name an expert twice, and the gradients of gate weights are seen
as they come. The layer is what a sparse layer does: dispatch, experts, combine.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moebius.conform import Layer
from moebius.conform.loop import LoopMoE
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.kernels.functional import routed_mlp
from moebius.model.routing import token_routes

WIDTH, HIDDEN, EXPERTS, TOP_K = 24, 20, 8, 3


class Dispatched(nn.Module):
    """This rank's experts behind a dispatcher."""

    def __init__(self, group: dist.ProcessGroup, dispatcher: str) -> None:
        super().__init__()
        count = EXPERTS // group.size()
        self.dispatcher = make_dispatcher(dispatcher, group)
        self.w_up = nn.Parameter(torch.empty(count, WIDTH, HIDDEN, dtype=torch.float64))
        self.w_down = nn.Parameter(torch.empty(count, HIDDEN, WIDTH, dtype=torch.float64))

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Sends rows to their experts' ranks, computes, and adds up what comes back."""
        routes = token_routes(experts_TK, gates_TK, num_experts=EXPERTS)
        dispatched = self.dispatcher.dispatch(x_TD, routes)
        outputs = [
            chunk.send_back(routed_mlp(chunk.x_UD, self.w_up, self.w_down, chunk.routes))
            for chunk in dispatched.chunks
        ]
        return dispatched.combine(outputs)


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
