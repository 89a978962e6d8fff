"""A sparse feed-forward as an obvious loop over rows, and a small layer to compare it with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import Initializers, initialise
from moebius.model.moe import SparseFeedForward

WIDTH = 16
Gates = list[tuple[int, Tensor]]  # of one row: (expert, gate weight), first choice first


def make_layer(
    router: Any,
    *,
    num_experts: int = 8,
    skew: float = 0.0,
    d_expert: int = 12,
    seed: int = 0,
) -> Any:
    """Builds a float64 layer. With `skew` similar rows choose the same experts."""
    config = ModelConfig(
        d_model=WIDTH,
        feed_forward=ExpertsConfig(
            num_experts=num_experts, d_expert=d_expert, router=router, allow_future_leak=True
        ),
    )
    layer = SparseFeedForward(
        config, Initializers("paper", WIDTH, 2, 0.1, False), backend="auto"
    ).double()
    initialise(layer, seed)
    with torch.no_grad():
        for parameter in layer.router.parameters():
            if skew and parameter.dim() == 2:
                generator = torch.Generator().manual_seed(seed + 1)
                parameter += skew * torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
    return layer


def make_router(kind: str, *, num_experts: int = 8, **fields: Any) -> Any:
    """Builds the router of a float64 layer, before its first step."""
    router = make_layer({"kind": kind} | fields, num_experts=num_experts).router
    router.before_step(0)
    return router


def rows(batch: int, positions: int, *, common: float = 0.0, seed: int = 0) -> Tensor:
    """Returns (B, S, D) float64 random rows with a common component."""
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(batch, positions, WIDTH, generator=generator, dtype=torch.float64)
    return x_BSD + common * torch.randn(WIDTH, generator=generator, dtype=torch.float64)


def slow_layer(layer: Any, x_BSD: Tensor, served: Iterable[tuple[int, int, Tensor]]) -> Tensor:
    """Computes Σ of weight · W_downᵀ relu(W_upᵀ x) over (row, expert, weight)."""
    w_up, w_down = layer.sparse.experts.w_up, layer.sparse.experts.w_down
    answers = [
        torch.zeros(x_BSD.shape[2], dtype=x_BSD.dtype)
        for _ in range(x_BSD.shape[0] * x_BSD.shape[1])
    ]
    for row, expert, weight in served:
        x_D = x_BSD.flatten(0, 1)[row]
        answers[row] = answers[row] + weight * ((x_D @ w_up[expert]).relu() @ w_down[expert])
    return torch.stack(answers).view_as(x_BSD)


def serve(
    gates: list[Gates], order: list[tuple[int, int]], capacity: int
) -> list[tuple[int, int, Tensor]]:
    """Returns who finds a place: (row, choice) ask in order, and an expert refuses beyond
    `capacity`.
    """
    taken: dict[int, int] = {}
    served = []
    for row, choice in order:
        expert, weight = gates[row][choice]
        if taken.get(expert, 0) < capacity:
            taken[expert] = taken.get(expert, 0) + 1
            served.append((row, expert, weight))
    return served


def all_served(gates: list[Gates]) -> list[tuple[int, int, Tensor]]:
    """Serves all gates."""
    return [(row, expert, weight) for row, own in enumerate(gates) for expert, weight in own]


def assert_same(layer: Any, x_BSD: Tensor, slow: Callable[[Tensor], Tensor]) -> None:
    """Compares outputs, and the gradients of the input and of every parameter."""
    x_BSD = x_BSD.clone().requires_grad_()
    ours, theirs = layer(x_BSD, x_BSD)[0], slow(x_BSD)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert theirs.abs().max() > 0
    direction = torch.randn(
        x_BSD.shape, generator=torch.Generator().manual_seed(5), dtype=x_BSD.dtype
    )
    wanted = {"input": x_BSD} | dict(layer.named_parameters())
    found = [
        torch.autograd.grad((y * direction).sum(), list(wanted.values())) for y in (ours, theirs)
    ]
    for name, our, their in zip(wanted, *found, strict=True):
        torch.testing.assert_close(
            our, their, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert their.abs().max() > 0, name
