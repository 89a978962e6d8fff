"""Chooses a dispatcher by trying those that can run here: what `mesh.dispatcher=auto` means.

Where all ranks of an EP group are on one node, their rows can go through its memory (`symmetric`)
instead of through collectives (`dedup`). Both give the same bits, so a run may change from one to
the other wherever it starts. Which is faster depends on the machine, and takes some milliseconds to
find out: a few passes of each by turns, and the slowest rank counts.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.moe import Dispatcher
from ...model.routing import Routes, token_routes
from ..symmetric.interface import RowOutbox
from ..symmetric.outbox import Outbox, open_outbox
from .base import NodeGroups, nodes_of
from .choose import make_dispatcher
from .exchange import gathered
from .table import AUTO, DEFAULT, SHARED_MEMORY, needs_outbox, resolved_dispatcher

_TOKENS, _TOP_K, _WIDTH = 256, 4, 128  # 128 KiB of float32 rows
_PASSES = 4  # of each, the first of which is not counted


@dataclass(frozen=True)
class Choice:
    """A dispatcher's name, the memory that it wants, and why it was chosen."""

    name: str
    outbox: RowOutbox | None = None
    why: str = ""


def choose_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    ranks_per_node: int | None,
    timeout_s: float,
) -> Choice:
    """Returns what `name` means for this group, also where it is "auto". Collective.

    Raises:
        ValueError: on all ranks: there is no such dispatcher, or these ranks cannot share memory and
            the dispatcher wants that.
    """
    wanted = resolved_dispatcher(name, group.size())
    if name != AUTO or wanted != DEFAULT:
        if not needs_outbox(wanted):
            return Choice(wanted)
        outbox = _outbox_of(group, device, ranks_per_node, timeout_s)
        if isinstance(outbox, str):
            raise ValueError(
                f'mesh.dispatcher="{wanted}" cannot be had: {outbox}; use "{DEFAULT}", or "{AUTO}"'
            )
        return Choice(wanted, outbox)
    outbox = _outbox_of(group, device, ranks_per_node, timeout_s)
    if isinstance(outbox, str):
        return Choice(DEFAULT, why=f"no memory is shared: {outbox}")
    return _faster(group, outbox)


def memory_inside(
    nodes: NodeGroups, *, device: torch.device, timeout_s: float
) -> tuple[Outbox | None, str]:
    """Opens memory for the ranks of this node, where a dispatcher has a way of its own inside nodes;
    and says why there is none. Collective.
    """
    if nodes.intra.size() == 1:
        return None, ""
    found = _outbox_of(nodes.intra, device, None, timeout_s)
    if isinstance(found, str):
        return None, f"collectives inside nodes: {found}"
    return found, "shared memory inside nodes"


def _outbox_of(
    group: dist.ProcessGroup, device: torch.device, ranks_per_node: int | None, timeout_s: float
) -> Outbox | str:
    """Opens this rank's outbox, or says why it has none: the same on every rank. Collective."""
    if device.type != "cpu":
        return f"it is for the CPUs of one node, and the rows are on {device.type}"
    if dist.get_backend(group) != "gloo":
        return f"the group is of {dist.get_backend(group)}, not of processes over gloo"
    if reason := _several_nodes(group, ranks_per_node):
        return reason
    return open_outbox(group, timeout_s=timeout_s)


def _several_nodes(group: dist.ProcessGroup, ranks_per_node: int | None) -> str | None:
    nodes = set(nodes_of(dist.get_process_group_ranks(group), ranks_per_node))
    return "the ranks are on several nodes" if len(nodes) > 1 else None


def _faster(group: dist.ProcessGroup, outbox: Outbox) -> Choice:
    """Times the dispatchers by turns. Collective."""
    x, routes = _work(group)
    candidates = {
        DEFAULT: make_dispatcher(DEFAULT, group),
        SHARED_MEMORY: make_dispatcher(SHARED_MEMORY, group, outbox=outbox),
    }
    spent_s = dict.fromkeys(candidates, 0.0)
    for number in range(_PASSES):
        for name, dispatcher in candidates.items():
            began_s = time.perf_counter()
            _pass(dispatcher, x, routes)
            spent_s[name] += time.perf_counter() - began_s if number else 0.0
    own = torch.tensor([spent_s[name] for name in candidates], dtype=torch.float64)
    slowest_s = gathered(own, group).amax(0).div(_PASSES - 1).tolist()
    by_memory, by_collectives = slowest_s[1], slowest_s[0]
    why = (
        f"a pass of {_TOKENS} rows of {4 * _WIDTH} bytes and back takes "
        f"{by_memory * 1e3:.1f} ms through the node's memory, {by_collectives * 1e3:.1f} ms through "
        "collectives"
    )
    if by_memory < by_collectives:
        return Choice(SHARED_MEMORY, outbox, why)
    outbox.close()
    return Choice(DEFAULT, why=why)


def _work(group: dist.ProcessGroup) -> tuple[Tensor, Routes]:
    """Returns rows, and routes to experts of which every rank has equally many."""
    num_experts = _TOP_K * group.size()
    generator = torch.Generator().manual_seed(group.rank())
    scores = torch.rand(_TOKENS, num_experts, generator=generator)
    experts = scores.topk(_TOP_K).indices
    weights = torch.rand(_TOKENS, _TOP_K, generator=generator)
    x = torch.rand(_TOKENS, _WIDTH, generator=generator, requires_grad=True)
    return x, token_routes(experts, weights, num_experts=num_experts)


def _pass(dispatcher: Dispatcher, x: Tensor, routes: Routes) -> None:
    """Runs rows to experts that do little, and back; then their gradients."""
    with torch.enable_grad():
        dispatched = dispatcher.dispatch(x, routes)
        answers = []
        for chunk in dispatched.chunks:
            rows, own = chunk.x_UD, chunk.routes
            gated = rows[own.source_N] * own.weight_N[:, None]
            zeros = rows.new_zeros(own.num_targets, rows.shape[1])
            answers.append(chunk.send_back(zeros.index_add(0, own.target_N, gated)))
        torch.autograd.grad(dispatched.combine(answers).sum(), x)
