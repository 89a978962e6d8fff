"""The all-to-all dispatcher equals one rank bitwise on real processes, also for adversarial routings.

One world runs many cases, because starting it costs more than they do.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from dispatch_scenes import (
    EXPERTS,
    SCENES,
    WIDTH,
    Bank,
    Scene,
    bank,
    forward_backward,
    merge_for,
    parts,
    results_of,
)
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.dedup import DedupDispatcher
from moebius.distributed.dispatch.exchange import AllToAll, Pending
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.process.process import start_process
from moebius.model.moe import LocalDispatcher, SparseLayer
from moebius.model.routing import (
    Routes,
    slot_routes,
)


@dataclass(frozen=True)
class Passed:
    """A scene, and the dtypes of the experts and of the rows: in bfloat16 training the residual
    stream is float32, the experts' weights are not.
    """

    scene: Scene
    experts: torch.dtype
    rows: torch.dtype

    def on(self, layer: SparseLayer, rank: int, ranks: int) -> dict[str, Tensor]:
        x, experts, weights, grad = merge_for(parts(self.scene, self.rows), ranks)[rank]
        return forward_backward(layer, x, experts, weights, grad.to(self.experts))


def on_ranks(cases: list[Passed]) -> list[dict[str, Tensor]]:
    found = []
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        share = EXPERTS // process.world_size
        for case in cases:
            layer = SparseLayer(bank(case.experts, process.rank * share, share))  # pyright: ignore[reportArgumentType]
            layer.dispatcher = make_dispatcher("alltoall", mesh.ep_group)
            found.append(case.on(layer, process.rank, process.world_size))
    return found


def one_group(world_size: int, process) -> Mesh:
    return build_mesh(plan_layout(MeshConfig(ep=world_size), world_size), process)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def compare_with_one_rank(world_size: int, cases: list[Passed]) -> None:
    by_rank = run_ranks(on_ranks, world_size, cases)
    for case, *results in zip(cases, *by_rank, strict=True):
        expected = case.on(SparseLayer(bank(case.experts)), 0, 1)  # pyright: ignore[reportArgumentType]
        for key, value in expected.items():
            joined = torch.cat([result[key] for result in results])
            assert torch.equal(joined, value), (case, key, (joined - value).abs().max())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_alltoall_equals_one_rank_bitwise(world_size: int) -> None:
    dtypes = DTYPES if world_size == 4 else DTYPES[:1]
    cases = [Passed(scene, dtype, dtype) for scene in SCENES.values() for dtype in dtypes]
    cases.append(Passed(SCENES["uneven"], torch.bfloat16, torch.float32))
    compare_with_one_rank(world_size, cases)


def test_one_expert_per_rank_on_eight_ranks_is_bitwise_too() -> None:
    scene = Scene((5, 0, 7, 3, 9, 1, 4, 6))
    compare_with_one_rank(8, [Passed(scene, dtype, dtype) for dtype in DTYPES])


PER_EXPERT = 3  # rows of every rank for every expert


@dataclass(frozen=True)
class EqualScene:
    """Routes of known counts: a mixture's slots, or expert choice, where a rank's row may have many
    routes or none.
    """

    kind: str
    dtype: torch.dtype
    activation: str
    bias: bool

    def bank(self, first: int = 0, count: int = EXPERTS) -> Bank:
        return bank(self.dtype, first, count, activation=self.activation, bias=self.bias)


def equal_parts(scene: EqualScene, num_ranks: int) -> list[tuple[Tensor, Tensor, Routes, Tensor]]:
    """Per rank: rows, gate weights, routes (with other weights) and the gradient of the output."""
    return [equal_part(scene, rank) for rank in range(num_ranks)]


def equal_part(scene: EqualScene, rank: int) -> tuple[Tensor, Tensor, Routes, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    num_routes = EXPERTS * PER_EXPERT
    routes = slot_routes(num_routes, num_experts=EXPERTS, device=torch.device("cpu"))
    rows = num_routes
    if scene.kind == "expert choice":
        rows = 6 + rank  # ranks need not have equally many rows, only equally many routes
        chosen = (
            torch.rand(EXPERTS, rows - 1, generator=generator).argsort(-1)[:, :PER_EXPERT].flatten()
        )
        routes = Routes(
            chosen,
            routes.expert_N,
            routes.weight_N,
            chosen,
            EXPERTS,
            rows,
            per_source=0,
            per_target=0,
            per_expert=PER_EXPERT,
        )
    x, grad = (torch.randn(rows, WIDTH, generator=generator).to(scene.dtype) for _ in range(2))
    return x, torch.rand(num_routes, generator=generator), routes, grad


def equal_forward_backward(
    scenes: list[EqualScene],
) -> list[tuple[dict[str, Tensor], list[tuple[torch.dtype, bool]]]]:
    """This rank's results, and of every exchange its rows' dtype and whether its splits are uneven."""
    found = []
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        share = EXPERTS // process.world_size
        banks = [scene.bank(process.rank * share, share) for scene in scenes]
        own = [equal_part(scene, process.rank) for scene in scenes]
        exchanges = record_exchanges()
        forbid_reading_counts()
        for experts, (x, weights, routes, grad) in zip(banks, own, strict=True):
            layer = SparseLayer(experts)  # pyright: ignore[reportArgumentType]
            layer.dispatcher = make_dispatcher("alltoall", mesh.ep_group)
            x, weights = x.requires_grad_(), weights.requires_grad_()
            exchanges.clear()
            results = results_of(layer, layer(x, routes.with_weights(weights)), x, weights, grad)
            found.append((results, list(exchanges)))
    return found


def record_exchanges() -> list[tuple[torch.dtype, bool]]:
    """Wraps the collective for the rest of this process's life, which is a test's."""
    seen: list[tuple[torch.dtype, bool]] = []
    start = AllToAll.start

    def recorded(self: AllToAll, rows: Tensor) -> Pending:
        seen.append((rows.dtype, len({*self.sent, *self.received}) > 1))
        return start(self, rows)

    AllToAll.start = recorded
    return seen


def forbid_reading_counts() -> None:
    def refuse(*_args, **_options) -> None:
        raise AssertionError("counts are read or sorted")

    torch.argsort = torch.sort = torch.bincount = refuse
    Tensor.tolist = Tensor.item = refuse  # pyright: ignore[reportAttributeAccessIssue]


def merged(parts: list[tuple[Tensor, Tensor, Routes, Tensor]]) -> Routes:
    """All ranks' routes as those of one: (expert, source rank, position); their weights are
    positions in the joined ones.
    """
    first = [0]
    for x, _, _, _ in parts:
        first.append(first[-1] + len(x))

    def by_expert(values: list[Tensor]) -> Tensor:
        return torch.stack([value.view(EXPERTS, PER_EXPERT) for value in values], 1).flatten()

    num_routes = EXPERTS * PER_EXPERT
    return Routes(
        by_expert([part[2].source_N + start for part, start in zip(parts, first, strict=False)]),
        by_expert([part[2].expert_N for part in parts]),
        by_expert([torch.arange(num_routes) + rank * num_routes for rank in range(len(parts))]),
        by_expert([part[2].target_N + start for part, start in zip(parts, first, strict=False)]),
        EXPERTS,
        first[-1],
        per_source=0,
        per_target=0,
        per_expert=PER_EXPERT * len(parts),
    )


def on_one_rank(scene: EqualScene, num_ranks: int, *, counted: bool) -> dict[str, Tensor]:
    """The same rows, all here, through the local dispatcher."""
    parts = equal_parts(scene, num_ranks)
    xs, all_weights, _, grads = zip(*parts, strict=True)
    x, weights, grad = torch.cat(xs), torch.cat(all_weights), torch.cat(grads)
    routes = merged(parts)
    if counted:
        routes = replace(routes, per_expert=0)
    layer = SparseLayer(scene.bank())  # pyright: ignore[reportArgumentType]
    assert isinstance(layer.dispatcher, LocalDispatcher)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    return results_of(
        layer, layer(x, routes.with_weights(weights[routes.weight_N])), x, weights, grad
    )


EQUAL_SCENES = [
    EqualScene(kind, dtype, activation, bias)
    for kind in ("slots", "expert choice")
    for activation, bias in (("relu", False), ("swiglu", True))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_known_counts_travel_unasked_and_equal_one_rank_bitwise(world_size: int) -> None:
    by_rank = run_ranks(equal_forward_backward, world_size, EQUAL_SCENES)
    for scene, *ranks in zip(EQUAL_SCENES, *by_rank, strict=True):
        for counted in (False, True):
            for key, value in on_one_rank(scene, world_size, counted=counted).items():
                joined = torch.cat([results[key] for results, _ in ranks])
                assert torch.equal(joined, value), (
                    scene,
                    key,
                    counted,
                    (joined - value).abs().max(),
                )
        # Forward: rows, gate weights, answers. Backward: the same in the other direction. Never a
        # count, never uneven splits.
        rows, gates = (scene.dtype, False), (torch.float32, False)
        for _, exchanges in ranks:
            assert exchanges[:3] == [rows, gates, rows]
            assert sorted(exchanges[3:], key=str) == sorted([rows, gates, rows], key=str)


def wrong_count() -> str:
    with start_process("cpu", timeout_s=20) as process:
        dispatcher = make_dispatcher("alltoall", one_group(process.world_size, process).ep_group)
        routes = slot_routes(16, num_experts=EXPERTS, device=torch.device("cpu"))
        with pytest.raises(ValueError, match="per_expert=3 does not fit 16 routes over 8 experts"):
            dispatcher.dispatch(torch.zeros(16, WIDTH), replace(routes, per_expert=3))
        return "refused"


def test_a_count_that_is_not_theirs_is_refused_before_anything_is_sent() -> None:
    assert run_ranks(wrong_count, 2) == ["refused", "refused"]


def local_on_two_ranks() -> str:
    with start_process("cpu", timeout_s=20) as process:
        mesh = one_group(process.world_size, process)
        assert isinstance(make_dispatcher("auto", mesh.ep_group), DedupDispatcher)
        assert isinstance(make_dispatcher("auto", mesh.groups["dp_replicate"]), LocalDispatcher)
        with pytest.raises(ValueError, match=r'mesh.dispatcher="local" with mesh.ep=2'):
            make_dispatcher("local", mesh.ep_group)
        return "refused"


def test_a_local_dispatcher_for_several_ranks_is_refused() -> None:
    assert run_ranks(local_on_two_ranks, 2) == ["refused", "refused"]
