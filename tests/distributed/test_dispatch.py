"""The all-to-all dispatcher against one rank, on real processes: bitwise, for routings that nobody would choose too."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch import AllToAllDispatcher, make_dispatcher
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.process import start_process
from moebius.model.experts import ExpertMLPs
from moebius.model.moe import LocalDispatcher, SparseLayer
from moebius.model.routing import Routes, head_to_token_routes, token_routes, token_to_head_routes

WIDTH, HIDDEN, EXPERTS, TOP_K = 24, 20, 8, 3


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


def choose(scene: Scene, tokens: int, ranks: int, generator: torch.Generator) -> Tensor:
    """(tokens, TOP_K) experts; the rank-based choices speak of EP = `ranks` = 4, and stay what they are for others."""
    if scene.choice == "first":
        return torch.zeros(tokens, TOP_K, dtype=torch.int64)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if scene.choice == "last rank":
        scores[:, : EXPERTS - 2] = -1
        return scores.argsort(-1, descending=True)[:, :2].repeat(1, 2)[:, :TOP_K]
    if scene.choice == "not rank 0":
        scores[:, :2] = -1
    return scores.argsort(-1, descending=True)[:, :TOP_K]


def parts(scene: Scene, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per rank: rows, experts, gate weights and the gradient of the output."""
    generator = torch.Generator().manual_seed(11)
    out = []
    for tokens in scene.tokens:
        x = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
        experts = choose(scene, tokens, 4, generator)
        weights = torch.rand(tokens, TOP_K, generator=generator)
        out.append((x, experts, weights, torch.randn(tokens, WIDTH, generator=generator).to(dtype)))
    return out


def bank(dtype: torch.dtype, first: int = 0, count: int = EXPERTS) -> ExpertMLPs:
    generator = torch.Generator().manual_seed(12)
    experts = ExpertMLPs(EXPERTS, WIDTH, HIDDEN, backend="segments")
    for parameter in experts.parameters():
        full = torch.randn(parameter.shape, generator=generator).to(dtype)
        parameter.data = full[first : first + count].clone()
    return experts


def forward_backward(
    layer: SparseLayer, x: Tensor, experts: Tensor, weights: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = layer(x, token_routes(experts, weights, num_experts=EXPERTS))
    y.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    w_up, w_down = layer.experts.w_up.grad, layer.experts.w_down.grad
    return {"y": y.detach(), "x": x.grad, "gates": weights.grad, "w_up": w_up, "w_down": w_down}


def on_ranks(scene: Scene, dtype: torch.dtype) -> dict[str, Tensor]:
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        share = EXPERTS // process.world_size
        layer = SparseLayer(bank(dtype, process.rank * share, share))
        layer.dispatcher = make_dispatcher("alltoall", mesh.ep_group)
        own = merge_for(parts(scene, dtype), process.world_size)[process.rank]
        return forward_backward(layer, *own)


def one_group(world_size: int, process) -> Mesh:
    return build_mesh(plan_layout(MeshConfig(ep=world_size), world_size), process)


def merge_for(ranks: list[tuple[Tensor, ...]], world_size: int) -> list[tuple[Tensor, ...]]:
    """Neighbouring parts joined, so that 1 or 2 ranks see the rows of 4 in the same order."""
    share = len(ranks) // world_size
    groups = [ranks[i : i + share] for i in range(0, len(ranks), share)]
    return [tuple(torch.cat(columns) for columns in zip(*group, strict=True)) for group in groups]


def on_ranks_with_float32_rows(scene: Scene) -> dict[str, Tensor]:
    """As in bfloat16 training: the residual stream is float32, the experts' weights are not."""
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        share = EXPERTS // process.world_size
        layer = SparseLayer(bank(torch.bfloat16, process.rank * share, share))
        layer.dispatcher = make_dispatcher("auto", mesh.ep_group)
        x, experts, weights, grad = merge_for(parts(scene, torch.float32), process.world_size)[process.rank]
        return forward_backward(layer, x, experts, weights, grad.bfloat16())


def test_float32_rows_and_bfloat16_experts_are_bitwise_too() -> None:
    [expected] = run_ranks(on_ranks_with_float32_rows, 1, SCENES["uneven"])
    results = run_ranks(on_ranks_with_float32_rows, 4, SCENES["uneven"])
    for key, value in expected.items():
        assert torch.equal(torch.cat([result[key] for result in results]), value), key


# Every scene on 1, 2 and 4 ranks; the other precisions on the widest world.
COMBINATIONS = [(name, world, torch.float32) for name in SCENES for world in (1, 2, 4)] + [
    (name, 4, dtype) for name in SCENES for dtype in (torch.bfloat16, torch.float64)
]


@pytest.mark.parametrize(("name", "world_size", "dtype"), COMBINATIONS, ids=str)
def test_alltoall_equals_one_rank_bitwise(name: str, world_size: int, dtype: torch.dtype) -> None:
    scene = SCENES[name]
    expected = forward_backward(SparseLayer(bank(dtype)), *merge_for(parts(scene, dtype), 1)[0])
    results = run_ranks(on_ranks, world_size, scene, dtype)
    for key, value in expected.items():
        joined = torch.cat([result[key] for result in results])
        assert torch.equal(joined, value), (key, (joined - value).abs().max())


def identity_round_trip(kind: str) -> tuple[Tensor, Tensor]:
    """combine(dispatch(x)) with experts that answer their row, and the sum of weights that it must be."""
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        generator = torch.Generator().manual_seed(process.rank)
        tokens, heads, top_k = 7 + process.rank, 2, 2
        choice = torch.rand(tokens, heads, EXPERTS // heads, generator=generator).argsort(-1)[..., :top_k]
        experts = choice + torch.arange(heads)[:, None] * (EXPERTS // heads)
        weights = torch.rand(tokens, heads, top_k, generator=generator)
        routes = ROUTES[kind](experts, weights)
        rows = int(routes.source_N.max()) + 1
        x = torch.randn(rows, 5, generator=generator)
        dispatcher = AllToAllDispatcher(mesh.ep_group)
        sent = dispatcher.dispatch(x, routes)
        y = dispatcher.combine(sent.x_UD * sent.routes.weight_N[:, None], sent)
        expected = torch.zeros(routes.num_targets, 5)
        for n in range(len(routes.source_N)):
            expected[routes.target_N[n]] += routes.weight_N[n] * x[routes.source_N[n]]
        return y, expected


ROUTES = {
    "token": lambda e, w: token_routes(e.flatten(1), w.flatten(1), num_experts=EXPERTS),
    "token to head": lambda e, w: token_to_head_routes(e, w, num_experts=EXPERTS),
    "head to token": lambda e, w: head_to_token_routes(e, w, num_experts=EXPERTS),
    "irregular": lambda e, w: without_rule(head_to_token_routes(e, w, num_experts=EXPERTS)),
}


def without_rule(routes: Routes) -> Routes:
    shuffled = torch.randperm(len(routes.source_N), generator=torch.Generator().manual_seed(3))
    return Routes(
        routes.source_N[shuffled], routes.expert_N[shuffled], routes.weight_N[shuffled], routes.target_N[shuffled],
        routes.num_experts, routes.num_targets, 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ROUTES)
def test_every_row_comes_home_weighted_and_added_up(kind: str) -> None:
    for y, expected in run_ranks(identity_round_trip, 2, kind):
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def row_conservation() -> list[tuple[int, int, int]]:
    """(source rank, route, expert) of every row that arrived here."""
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        experts = choose(SCENES["uneven"], 10 + process.rank, 4, torch.Generator().manual_seed(process.rank))
        marks = torch.stack((torch.full((len(experts),), float(process.rank)), torch.arange(len(experts)).double()), 1)
        sent = AllToAllDispatcher(mesh.ep_group).dispatch(
            marks, token_routes(experts, torch.ones(experts.shape), num_experts=EXPERTS)
        )
        share = EXPERTS // process.world_size
        local = (sent.routes.expert_N + process.rank * share).tolist()
        return [(int(a), int(b), e) for (a, b), e in zip(sent.x_UD.tolist(), local, strict=True)]


def test_every_route_arrives_once_and_at_the_right_expert() -> None:
    arrived = sorted(row for rank in run_ranks(row_conservation, 4) for row in rank)
    expected = sorted(
        (rank, token, expert)
        for rank in range(4)
        for token, chosen in enumerate(
            choose(SCENES["uneven"], 10 + rank, 4, torch.Generator().manual_seed(rank)).tolist()
        )
        for expert in chosen
    )
    assert arrived == expected


def local_on_two_ranks() -> str:
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        assert isinstance(make_dispatcher("auto", mesh.ep_group), AllToAllDispatcher)
        assert isinstance(make_dispatcher("auto", mesh.dp_replicate_group), LocalDispatcher)
        with pytest.raises(ValueError, match=r'mesh.dispatcher="local" with mesh.ep=2'):
            make_dispatcher("local", mesh.ep_group)
        return "refused"


def test_a_local_dispatcher_for_several_ranks_is_refused() -> None:
    assert run_ranks(local_on_two_ranks, 2) == ["refused", "refused"]
