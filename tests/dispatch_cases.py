"""One rank's rows and routes of every kind and scene, and a layer's results, for dispatcher tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from dispatch_scenes import EXPERTS, SCENES, WIDTH, bank, choose
from torch import Tensor

from moebius.distributed.dispatch.base import NodeGroups, build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.dispatch.table import needs_outbox
from moebius.distributed.process.process import Process, start_process
from moebius.distributed.symmetric.outbox import Outbox, open_outbox
from moebius.model.moe import Dispatcher, SparseLayer
from moebius.model.routing import (
    Routes,
    head_to_token_routes,
    slot_routes,
    token_routes,
    token_to_head_routes,
)

HEADS = 2
PER_NODE = 2  # pretended: ranks 0 and 1 on one node, 2 and 3 on the next


@dataclass(frozen=True)
class Case:
    """One rank's rows, routes and gradient of the answers."""

    x: Tensor
    routes: Routes
    grad: Tensor


def case(kind: str, experts: Tensor, seed: int, dtype: torch.dtype = torch.float32) -> Case:
    """The routes of that kind for tokens that choose `experts` (T, K)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(experts)
    weights = torch.rand(experts.shape, generator=generator)
    if kind == "head to token" or kind == "token to head":
        make = head_to_token_routes if kind == "head to token" else token_to_head_routes
        by_head = torch.stack((experts, (experts + 3) % EXPERTS), 1)
        routes = make(by_head, torch.rand(by_head.shape, generator=generator), num_experts=EXPERTS)
    elif kind == "expert choice":
        per_expert = 2
        rows = tokens + 3  # equally many routes on every rank, of any number of rows
        chosen = (
            torch.rand(EXPERTS, rows, generator=generator).argsort(-1)[:, :per_expert].flatten()
        )
        slots = slot_routes(EXPERTS * per_expert, num_experts=EXPERTS, device=torch.device("cpu"))
        weights = torch.rand(len(chosen), generator=generator)
        routes = replace(
            slots,
            source_N=chosen,
            target_N=chosen,
            weight_N=weights,
            num_targets=rows,
            per_source=0,
            per_target=0,
        )
    else:
        routes = token_routes(experts, weights, num_experts=EXPERTS)
    if kind in ("dropped", "irregular"):
        keep = torch.rand(len(routes.expert_N), generator=generator) < (
            0.6 if kind == "dropped" else 2
        )
        routes = routes.kept(keep)
    if kind == "irregular":
        routes = shuffled(routes, generator)
    num_sources = {"head to token": tokens * HEADS, "expert choice": tokens + 3}.get(kind, tokens)
    x = torch.randn(num_sources, WIDTH, generator=generator).to(dtype)
    grad = torch.randn(routes.num_targets, WIDTH, generator=generator).to(dtype)
    return Case(x, routes, grad)


def shuffled(routes: Routes, generator: torch.Generator) -> Routes:
    """In another order, and to other targets: neither belongs to the other's token."""
    order = torch.randperm(len(routes.expert_N), generator=generator)
    target = torch.randint(max(1, routes.num_targets), (len(order),), generator=generator)
    return replace(
        routes,
        source_N=routes.source_N[order],
        expert_N=routes.expert_N[order],
        weight_N=routes.weight_N[order],
        target_N=target,
    )


KINDS = ("token", "token to head", "head to token", "dropped", "irregular", "expert choice")


def scene_case(name: str, kind: str, rank: int, dtype: torch.dtype = torch.float32) -> Case:
    scene = SCENES[name]
    generator = torch.Generator().manual_seed(11 + rank)
    return case(kind, choose(scene, scene.tokens[rank], 4, generator), 100 + rank, dtype)


def run_layer(layer: SparseLayer, given: Case) -> dict[str, Tensor]:
    """The output and all gradients."""
    layer.zero_grad(set_to_none=True)
    x, weights = given.x.clone().requires_grad_(), given.routes.weight_N.clone().requires_grad_()
    y = layer(x, given.routes.with_weights(weights))
    y.backward(given.grad)
    assert x.grad is not None and weights.grad is not None  # noqa: PT018 - one fact: there is a graph
    grads = {name: parameter.grad for name, parameter in layer.experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "gates": weights.grad, **grads}  # pyright: ignore[reportReturnType]


def local_results(cases: list[Case], dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Of every rank's case on one rank; the experts' gradients summed over them, the same for all."""
    results = [run_layer(SparseLayer(bank(dtype)), given) for given in cases]  # pyright: ignore[reportArgumentType]
    for name in ("w_up", "w_down"):
        total = torch.stack([result[name] for result in results]).sum(0)
        for result in results:
            result[name] = total
    return results


@contextmanager
def world(timeout_s: float = 20) -> Iterator[tuple[Process, dist.ProcessGroup, NodeGroups]]:
    with start_process("cpu", timeout_s=timeout_s) as process:
        size = process.world_size
        assert dist.group.WORLD is not None
        nodes = build_node_groups(
            dist.group.WORLD, PER_NODE if size == 4 else 1, timeout_s=timeout_s
        )
        yield process, dist.group.WORLD, nodes


def dispatcher_of(
    name: str, group: dist.ProcessGroup, nodes: NodeGroups, **options: Any
) -> Dispatcher:
    if "outbox" not in options:
        options["outbox"] = outbox_for(name, group)
    return make_dispatcher(
        name,
        group,
        nodes=nodes if name == "hierarchical" else None,
        ranks_per_node=PER_NODE,
        **options,
    )


def outbox_for(name: str, group: dist.ProcessGroup) -> Outbox | None:
    """Opens one where the dispatcher wants it. Collective."""
    if not needs_outbox(name):
        return None
    found = open_outbox(group, timeout_s=20)
    assert isinstance(found, Outbox), found
    return found


def own_layer(
    process: Process, dispatcher: Dispatcher, dtype: torch.dtype = torch.float32
) -> SparseLayer:
    share = EXPERTS // process.world_size
    layer = SparseLayer(bank(dtype, process.rank * share, share))  # pyright: ignore[reportArgumentType]
    layer.dispatcher = dispatcher
    return layer


def placed_layer(expert_map: ExpertMap, rank: int) -> SparseLayer:
    """A rank's slots of the bank, by the table."""
    experts = [expert_map.expert_S[slot] for slot in expert_map.own_slots(rank)]
    whole, own = bank(torch.float32), bank(torch.float32, 0, len(experts))
    with torch.no_grad():
        for parameter, full in zip(own.parameters(), whole.parameters(), strict=True):
            parameter.copy_(full[experts])
    return SparseLayer(own)  # pyright: ignore[reportArgumentType]


def worst(result: dict[str, Tensor], expected: dict[str, Tensor], rank: int, size: int) -> float:
    """The largest difference of a tensor, relative to the largest value of the whole."""
    share = EXPERTS // size
    found = 0.0
    for name, value in result.items():
        whole = expected[name]
        theirs = whole[rank * share : (rank + 1) * share] if name.startswith("w_") else whole
        assert value.shape == theirs.shape, (name, value.shape, theirs.shape)
        if value.numel():
            found = max(found, ((value - theirs).abs().max() / (whole.abs().max() + 1e-30)).item())
    return found
