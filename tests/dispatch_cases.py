"""Expert layers for dispatcher tests: adversarial scenes, one rank's rows and routes of every kind,
banks with fixed weights, and results of one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moebius.distributed.dispatch.base import NodeGroups, build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.dispatch.table import needs_outbox
from moebius.distributed.process.process import Process, start_process
from moebius.distributed.symmetric.outbox import Outbox, open_outbox
from moebius.kernels.functional import routed_mlp
from moebius.model.moe import Dispatcher, SparseLayer
from moebius.model.routing import (
    Routes,
    head_to_token_routes,
    slot_routes,
    token_routes,
    token_to_head_routes,
)

WIDTH, HIDDEN, EXPERTS, TOP_K = 24, 20, 8, 3
HEADS = 2
PER_NODE = 2  # pretended: ranks 0 and 1 on one node, 2 and 3 on the next


@dataclass(frozen=True)
class Scene:
    """How many tokens every rank has, and how they choose."""

    tokens: tuple[int, ...]
    choice: str = "random"


SCENES = {
    "even": Scene((16, 16, 16, 16)),
    "uneven": Scene((5, 31, 1, 12)),
    "a rank without tokens": Scene((9, 0, 7, 3)),
    "only one rank has tokens": Scene((0, 0, 13, 0)),
    "one token in all": Scene((0, 1, 0, 0)),
    "no token at all": Scene((0, 0, 0, 0)),
    "all to one expert": Scene((6, 9, 4, 8), choice="first"),
    "all to the last rank": Scene((6, 9, 4, 8), choice="last rank"),
    "nothing for rank 0": Scene((6, 9, 4, 8), choice="not rank 0"),
}


def choose(scene: Scene, tokens: int, generator: torch.Generator) -> Tensor:
    """(tokens, TOP_K) experts; choices by rank are those of four ranks."""
    if scene.choice == "first":
        return torch.zeros(tokens, TOP_K, dtype=torch.int64)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if scene.choice == "last rank":
        scores[:, : EXPERTS - 2] = -1
        return scores.argsort(-1, descending=True)[:, :2].repeat(1, 2)[:, :TOP_K]
    if scene.choice == "not rank 0":
        scores[:, :2] = -1
    return scores.argsort(-1, descending=True)[:, :TOP_K]


class Bank(nn.Module):
    """Perceptrons with the fixed weights of experts `first` and following."""

    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None

    def __init__(
        self, dtype: torch.dtype, first: int, count: int, *, activation: str, bias: bool
    ) -> None:
        super().__init__()
        self.dtype, self.activation = dtype, activation
        columns = 2 * HIDDEN if activation == "swiglu" else HIDDEN
        generator = torch.Generator().manual_seed(12)
        shapes = {"w_up": (WIDTH, columns), "w_down": (HIDDEN, WIDTH)}
        for name, shape in (shapes | {"b_up": (columns,), "b_down": (WIDTH,)}).items():
            full = torch.randn(EXPERTS, *shape, generator=generator).to(dtype)
            own = nn.Parameter(full[first : first + count].clone())
            self.register_parameter(name, own if bias or name.startswith("w") else None)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        return routed_mlp(
            x,
            self.w_up,
            self.w_down,
            routes,
            activation=self.activation,
            b_up_EF=self.b_up,
            b_down_EO=self.b_down,
            backend="segments",
        )


def bank_layer(
    dtype: torch.dtype, first: int = 0, count: int = EXPERTS, *, activation="relu", bias=False
) -> SparseLayer:
    """A layer of experts `first` and following, on one rank."""
    return SparseLayer(Bank(dtype, first, count, activation=activation, bias=bias))  # pyright: ignore[reportArgumentType]


def run_pass(
    dispatcher: Dispatcher,
    x: Tensor,
    routes: Routes,
    experts: Callable[[Tensor, Routes], Tensor],
) -> Tensor:
    """Dispatches, lets experts compute, and combines, as a sparse layer does."""
    dispatched = dispatcher.dispatch(x, routes)
    return dispatched.combine(experts(dispatched.x_UD, dispatched.routes))


def echo(x: Tensor, routes: Routes) -> Tensor:
    """Experts that answer the row that they are asked about."""
    gated = x[routes.source_N] * routes.weight_N[:, None]
    return x.new_zeros(routes.num_targets, x.shape[1]).index_add(0, routes.target_N, gated)


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
    if kind in ("head to token", "token to head"):
        make = head_to_token_routes if kind == "head to token" else token_to_head_routes
        by_head = torch.stack((experts, (experts + 3) % EXPERTS), 1)
        routes = make(by_head, torch.rand(by_head.shape, generator=generator), num_experts=EXPERTS)
    elif kind == "expert choice":
        # equally many routes on every rank, of any number of rows
        scores = torch.rand(EXPERTS, tokens + 3, generator=generator)
        chosen_N = scores.argsort(-1)[:, :2].flatten()
        routes = replace(
            slot_routes(len(chosen_N), num_experts=EXPERTS, device=torch.device("cpu")),
            source_N=chosen_N,
            target_N=chosen_N,
            weight_N=torch.rand(len(chosen_N), generator=generator),
            num_targets=tokens + 3,
            per_source=0,
            per_target=0,
        )
    else:
        routes = token_routes(experts, weights, num_experts=EXPERTS)
    if kind == "dropped":
        routes = routes.kept(torch.rand(len(routes.expert_N), generator=generator) < 0.6)
    if kind == "irregular":
        routes = shuffled(replace(routes, per_source=0, per_target=0), generator)
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


def scene_case(
    scene: str | Scene, kind: str, rank: int, dtype: torch.dtype = torch.float32
) -> Case:
    scene = SCENES[scene] if isinstance(scene, str) else scene
    generator = torch.Generator().manual_seed(11 + rank)
    return case(kind, choose(scene, scene.tokens[rank], generator), 100 + rank, dtype)


def joined(cases: Sequence[Case]) -> Case:
    """All ranks' rows and routes as those of one rank, in the order of the ranks."""
    routes = [given.routes for given in cases]
    first_source = accumulate((len(given.x) for given in cases), initial=0)
    first_target = accumulate((own.num_targets for own in routes), initial=0)
    source_N, target_N = (
        torch.cat([getattr(own, name) + n for own, n in zip(routes, first, strict=False)])
        for name, first in (("source_N", first_source), ("target_N", first_target))
    )
    whole = replace(
        routes[0],
        source_N=source_N,
        target_N=target_N,
        expert_N=torch.cat([own.expert_N for own in routes]),
        weight_N=torch.cat([own.weight_N for own in routes]),
        num_targets=sum(own.num_targets for own in routes),
        per_expert=0,
        equal_blocks=0,
    )
    x, grad = (torch.cat([getattr(given, name) for given in cases]) for name in ("x", "grad"))
    return Case(x, whole, grad)


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
    results = [run_layer(bank_layer(dtype), given) for given in cases]
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
    layer = bank_layer(dtype, process.rank * share, share)
    layer.dispatcher = dispatcher
    return layer


def placed_layer(expert_map: ExpertMap, rank: int) -> SparseLayer:
    """A rank's slots of the bank, by the table."""
    experts = [expert_map.expert_S[slot] for slot in expert_map.own_slots(rank)]
    whole, own = bank_layer(torch.float32), bank_layer(torch.float32, 0, len(experts))
    with torch.no_grad():
        for parameter, full in zip(own.parameters(), whole.parameters(), strict=True):
            parameter.copy_(full[experts])
    return own


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
