"""Expert layers for dispatcher tests: adversarial scenes, banks with fixed weights, one-rank results."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebius.kernels.functional import routed_mlp
from moebius.model.moe import Dispatcher, SparseLayer
from moebius.model.routing import Routes, token_routes

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
    """(tokens, TOP_K) experts; the rank-based choices speak of EP = `ranks` = 4, and stay what they
    are for others.
    """
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
        shapes = {
            "w_up": (WIDTH, columns),
            "w_down": (HIDDEN, WIDTH),
            "b_up": (columns,),
            "b_down": (WIDTH,),
        }
        for name, shape in shapes.items():
            full = torch.randn(EXPERTS, *shape, generator=generator).to(dtype)
            wanted = bias or name.startswith("w")
            self.register_parameter(
                name, nn.Parameter(full[first : first + count].clone()) if wanted else None
            )

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


def bank(
    dtype: torch.dtype, first: int = 0, count: int = EXPERTS, *, activation="relu", bias=False
) -> Bank:
    return Bank(dtype, first, count, activation=activation, bias=bias)


def run_pass(
    dispatcher: Dispatcher,
    x: Tensor,
    routes: Routes,
    experts: Callable[[Tensor, Routes], Tensor],
) -> Tensor:
    """Dispatches, lets experts compute, and combines, as a sparse layer does."""
    dispatched = dispatcher.dispatch(x, routes)
    return dispatched.combine(experts(dispatched.x_UD, dispatched.routes))


def forward_backward(
    layer: SparseLayer, x: Tensor, experts: Tensor, weights: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = layer(x, token_routes(experts, weights, num_experts=EXPERTS))
    return results_of(layer, y, x, weights, grad)


def results_of(
    layer: SparseLayer, y: Tensor, x: Tensor, weights: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    """The output and all gradients."""
    y.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    parameters = {name: parameter.grad for name, parameter in layer.experts.named_parameters()}
    results = {"y": y.detach(), "x": x.grad, "gates": weights.grad, **parameters}
    return {name: value for name, value in results.items() if value is not None}


def merge_for(ranks: list[tuple[Tensor, ...]], world_size: int) -> list[tuple[Tensor, ...]]:
    """Neighbouring parts joined, so that 1 or 2 ranks see the rows of 4 in the same order."""
    share = len(ranks) // world_size
    groups = [ranks[i : i + share] for i in range(0, len(ranks), share)]
    return [tuple(torch.cat(columns) for columns in zip(*group, strict=True)) for group in groups]
