"""The router as one operation against its steps, in torch without Triton."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from router_cases import GATES, step_by_step
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels.fused import router as kernel
from moebius.kernels.fused.router import Gate, Routed, can_route, route_top_k
from moebius.model.balance import choice_sums
from moebius.model.execution.recompute import run_recomputed
from moebius.model.initialise import uniform
from moebius.model.routers import router as routers
from moebius.model.routers import sigmoid
from moebius.model.routers.router import Choice
from moebius.model.routers.sigmoid import SigmoidConfig, SigmoidRouter
from moebius.model.routing import Routing, token_routes

FLOAT64 = torch.float64


def leaves(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("parts", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("gate", GATES)
def test_values_and_gradients_are_those_of_the_steps(
    gate: Gate, heads: int, parts: tuple[int, ...]
) -> None:
    """`parts`: which results have a gradient, the logits, the gates or both."""
    x, weight = leaves((7, 12), (15, 12))
    found = route_top_k(x, weight, top_k=3, gate=gate, heads=heads)[:3]
    exact = [tensor.detach().to(FLOAT64).requires_grad_() for tensor in (x, weight)]
    expected = step_by_step(exact[0], exact[1], top_k=3, gate=gate, heads=heads)
    assert torch.equal(found[1], expected[1])
    grads = [torch.randn(found[part].shape) for part in parts]
    ours = torch.autograd.grad([found[part] for part in parts], [x, weight], grads)
    theirs = torch.autograd.grad(
        [expected[part] for part in parts], exact, [grad.to(FLOAT64) for grad in grads]
    )
    pairs = zip((found[0], found[2], *ours), (expected[0], expected[2], *theirs), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine.to(FLOAT64), other, rtol=1e-5, atol=1e-5)


def routed_and_gradients(x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, ...]:
    """All results, and the gradients of rows and weights given each logit's value as its gradient."""
    x, weight = x_TD.clone().requires_grad_(), weight_ED.clone().requires_grad_()
    found = route_top_k(x, weight, top_k=2, gate="sigmoid", heads=3)
    grads = torch.autograd.grad([found[0], found[2]], [x, weight], [found[0].detach(), found[2]])
    return *(one.detach() for one in found[:3]), *grads


@pytest.mark.skipif(not kernel._has_brgemm(), reason="no micro-kernels on this CPU")
def test_on_a_cpu_neither_neighbours_nor_threads_change_a_bit(
    on_threads: Callable[[int], None],
) -> None:
    x, weight = (one.detach() for one in leaves((203, 29), (45, 29)))
    on_threads(1)
    *rows, grad_weight = routed_and_gradients(x, weight)
    for part in (slice(0, 1), slice(5, 70), slice(130, 203)):
        for mine, all_rows in zip(routed_and_gradients(x[part], weight)[:-1], rows, strict=True):
            assert torch.equal(mine, all_rows[part])
    for threads in (2, 3):
        on_threads(threads)
        for mine, one in zip(routed_and_gradients(x, weight), (*rows, grad_weight), strict=True):
            assert torch.equal(mine, one)


def test_no_row_is_routed_nowhere() -> None:
    x, weight = leaves((0, 12), (15, 12))
    logits, experts, gates, _ = route_top_k(x, weight, top_k=2, gate="sigmoid", heads=3)
    assert (logits.shape, experts.shape, gates.shape) == ((0, 3, 5), (0, 3, 2), (0, 3, 2))
    assert torch.autograd.grad(gates.sum(), weight)[0].abs().max() == 0


@pytest.mark.parametrize(("heads", "top_k"), [(4, 1), (3, 6), (1, 0), (0, 1)])
def test_numbers_that_do_not_fit_are_refused(heads: int, top_k: int) -> None:
    x, weight = leaves((7, 12), (15, 12))
    with pytest.raises(ValueError, match=rf"top_k={top_k} of each of heads={heads} .* 15 experts"):
        route_top_k(x, weight, top_k=top_k, gate="sigmoid", heads=heads)
    with pytest.raises(ValueError, match="gate='relu' is unknown: choose sigmoid, softmax"):
        route_top_k(x, weight, top_k=1, gate=cast(Gate, "relu"))


def test_it_is_traced_without_values_and_counted() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as flops:
        x, weight = torch.zeros(7, 12, requires_grad=True), torch.zeros(15, 12, requires_grad=True)
        logits, experts, gates, _ = route_top_k(x, weight, top_k=2, gate="softmax", heads=3)
        assert (logits.shape, experts.shape, gates.shape) == ((7, 3, 5), (7, 3, 2), (7, 3, 2))
        assert (experts.dtype, gates.dtype) == (torch.int64, torch.float32)
        (logits.sum() + gates.sum()).backward()
        assert weight.grad is not None
        assert flops.get_total_flops() == 3 * 2 * 7 * 12 * 15


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(
    ("backend", "rows", "weights", "experts", "heads", "can"),
    [
        ("triton", F32, F32, 1024, 1, True),
        ("triton", BF16, F32, 2, 1, True),
        ("triton", F64, F64, 2, 1, False),
        ("triton", BF16, BF16, 2, 1, False),
        ("triton", F32, F32, 1025, 1, False),
        ("triton", F32, F32, 1026, 2, True),
        ("segments", F32, F32, 2, 1, False),
        ("brgemm", F32, F32, 2, 1, None),
        ("auto", F32, F32, 2, 1, None),
        ("auto", F64, F64, 2, 1, False),
        ("auto", BF16, BF16, 2, 1, False),
    ],
)
def test_which_rows_and_backends_have_a_kernel(
    backend: str,
    rows: torch.dtype,
    weights: torch.dtype,
    experts: int,
    heads: int,
    can: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`can` None: with brgemm alone."""
    x, weight = torch.zeros(2, 4, dtype=rows), torch.zeros(experts, 4, dtype=weights)
    for has in (False, True):
        monkeypatch.setattr(kernel, "_has_brgemm", lambda has=has: has)
        monkeypatch.setattr(kernel, "reason_against", lambda device, dtype: None)
        assert can_route(backend, x, weight, heads=heads) == (has if can is None else can)
        monkeypatch.setattr(kernel, "reason_against", lambda device, dtype: "no Triton")
        assert can_route(backend, x, weight, heads=heads) == (has if can is None else False)


def sigmoid_router() -> SigmoidRouter:
    return SigmoidRouter(SigmoidConfig(top_k=2), 12, 15, init=uniform(1.0), num_heads=3)


def test_dropped_experts_are_not_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "can_route", lambda *given, heads: True)
    router = SigmoidRouter(
        SigmoidConfig(top_k=1, expert_dropout=0.9), 12, 15, init=uniform(1.0), num_heads=3
    )
    torch.nn.init.normal_(router.weight)
    x, _ = leaves((200, 12), (1, 1))
    best_THK = router.eval().choose_per_head(x).experts_THK
    assert torch.equal(
        best_THK, step_by_step(x, router.weight, top_k=1, gate="sigmoid", heads=3)[1]
    )
    assert (router.train().choose_per_head(x).experts_THK != best_THK).any()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_second_run_takes_the_first_ones_experts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "can_route", lambda *given, heads: True)
    router, seen = sigmoid_router(), list[Tensor]()
    torch.nn.init.normal_(router.weight)
    x, _ = leaves((8, 12), (1, 1))

    def step(rows: Tensor) -> tuple[Tensor, None]:
        # Rounding that differs between the runs, by far more than a kernel's would.
        found = router.choose_per_head(rows * (-1) ** len(seen))
        seen.append(found.experts_THK)
        return found.gates_THK, None

    y, _ = run_recomputed(mode, router, step, x)  # type: ignore[arg-type]
    y.sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("changes", "kind", "together"),
    [
        ({}, SigmoidRouter, True),
        ({"top_k": 3}, SigmoidRouter, False),
        ({"balance": 0.5}, SigmoidRouter, False),
        ({}, type("Own", (SigmoidRouter,), {}), False),
    ],
)
def test_only_equal_built_in_routers_share_a_kernel(
    changes: dict[str, Any],
    kind: type[SigmoidRouter],
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sigmoid, "by_triton", lambda x_TD: True)
    monkeypatch.setattr(
        SigmoidRouter, "route_in_one", lambda *_, routers, **__: asked.append(routers)
    )
    config = SigmoidConfig(top_k=2)
    first, second = (
        kind(one, 12, 15, init=uniform(1.0), num_heads=3)
        for one in (config, config.model_copy(update=changes))
    )
    for other in (second, SigmoidRouter(config, 12, 15, init=uniform(1.0))):  # of one head
        assert first.choose_beside(other, torch.zeros(4, 12)) is None
    assert asked == [2] * together


def test_sums_do_not_outlive_the_logits_that_they_sum() -> None:
    rows = torch.zeros(4, 1, 3)
    choice = Choice.of(Routed(rows, rows.long(), rows, torch.ones(2, 1, 3)))
    routes = token_routes(choice.experts_TK, choice.weights_TK, num_experts=3)
    routing = Routing(routes, rows).with_sums(choice.sums_BHA)
    assert choice_sums(routing, 2)["probability"] is choice.sums_BHA
    for changed in (
        replace(routing, logits_THA=rows + 1),
        routing.of_weighted_rows(torch.ones(4)),
        Routing(routes, rows).with_sums(replace(choice, logits_TE=rows[:, 0]).sums_BHA),
    ):
        assert changed.sums_BHA is None
        torch.testing.assert_close(
            choice_sums(changed, 2)["probability"], torch.full((2, 1, 3), 2 / 3)
        )
