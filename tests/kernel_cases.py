"""Routings that nobody would choose, and how a backend of the operations is compared with the reference:
values and all gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moebius.kernels.activations import ACTIVATIONS, GATES
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.model.routing import (
    Routes,
    head_to_token_routes,
    slot_routes,
    token_routes,
    token_to_head_routes,
)

BIASES = {
    "no bias": (),
    "bias up": ("b_up_EF",),
    "bias down": ("b_down_EO",),
    "both biases": ("b_up_EF", "b_down_EO"),
}


@dataclass(frozen=True)
class Case:
    """Shapes and a routing."""

    tokens: int
    d_in: int
    d_hidden: int
    experts: int
    top_k: int
    choice: str = "random"


CASES = {
    "random": Case(37, 12, 7, 5, 2),
    "empty experts": Case(6, 8, 4, 23, 2),
    "one expert takes all": Case(70, 8, 4, 6, 1, choice="zero"),
    "the last expert takes all": Case(70, 8, 4, 6, 1, choice="last"),
    "one token": Case(1, 8, 4, 6, 3),
    "no token": Case(0, 8, 4, 6, 3),
    "one expert": Case(19, 8, 4, 1, 1),
    "all experts": Case(11, 8, 4, 5, 5),
    "odd widths": Case(130, 41, 13, 9, 4),
    "width of the 44M model": Case(40, 412, 82, 6, 2),
}


def make_routes(case: Case, generator: torch.Generator) -> Routes:
    """Every token through its experts."""
    weights = torch.rand(case.tokens, case.top_k, generator=generator)
    return token_routes(_choose(case, generator), weights, num_experts=case.experts)


def _choose(case: Case, generator: torch.Generator) -> Tensor:
    if case.choice == "zero":
        return torch.zeros(case.tokens, case.top_k, dtype=torch.int64)
    if case.choice == "last":
        return torch.full((case.tokens, case.top_k), case.experts - 1)
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    return scores.argsort(-1)[:, : case.top_k]


def head_routes(direction: str, generator: torch.Generator) -> tuple[Routes, int]:
    """29 tokens and 3 heads, 2 of 5 experts each: SwitchHead's two directions; and the number of
    source rows.
    """
    tokens, heads, top_k, per_head = 29, 3, 2, 5
    choice = torch.rand(tokens, heads, per_head, generator=generator).argsort(-1)[..., :top_k]
    experts = choice + torch.arange(heads)[:, None] * per_head
    weights = torch.rand(tokens, heads, top_k, generator=generator)
    into_heads = direction == "token to head"
    make = token_to_head_routes if into_heads else head_to_token_routes
    return make(
        experts, weights, num_experts=heads * per_head
    ), tokens if into_heads else tokens * heads


def irregular(routes: Routes) -> Routes:
    """The same routes without the rule that says which rows they belong to."""
    return Routes(
        routes.source_N,
        routes.expert_N,
        routes.weight_N,
        routes.target_N,
        routes.num_experts,
        routes.num_targets,
        0,
        0,
    )


def equal_counts(kind: str) -> tuple[Routes, int]:
    """Routes of 5 experts with 6 each, in the order of their experts; and the number of source
    rows.
    """
    if kind == "slots":
        return slot_routes(30, num_experts=5, device=torch.device("cpu")), 30
    generator = torch.Generator().manual_seed(14)
    weights = torch.rand(30, generator=generator)
    if kind == "two slots of a row":
        rows = torch.arange(15).repeat_interleave(2)
        return Routes(rows, torch.arange(30) // 6, weights, rows, 5, 15, 2, 2, per_expert=6), 15
    chosen = (
        torch.rand(5, 11, generator=generator).argsort(-1)[:, :6].flatten() % 9
    )  # some rows are not chosen
    return Routes(chosen, torch.arange(30) // 6, weights, chosen, 5, 11, 0, 0, per_expert=6), 11


@dataclass(frozen=True)
class Perceptrons:
    """Which operation call: an activation, and the biases that `weights` has after w_up and w_down."""

    activation: str
    biases: tuple[str, ...] = ()

    def __call__(self, x: Tensor, w_up: Tensor, w_down: Tensor, *rest, backend: str) -> Tensor:
        *biases, routes = rest
        named = dict(zip(self.biases, biases, strict=True))
        return routed_mlp(
            x, w_up, w_down, routes, activation=self.activation, backend=backend, **named
        )

    def weights(self, case: Case, generator: torch.Generator) -> list[Tensor]:
        """Of a bank whose output is one column wider than its input."""
        columns = case.d_hidden * (2 if self.activation in GATES else 1)
        shapes = {"b_up_EF": (columns,), "b_down_EO": (case.d_in + 1,)}
        all_shapes = [
            (case.d_in, columns),
            (case.d_hidden, case.d_in + 1),
            *(shapes[name] for name in self.biases),
        ]
        return [torch.randn(case.experts, *shape, generator=generator) for shape in all_shapes]


def away_from_the_kink(
    x: Tensor, weights: Sequence[Tensor], operation: Perceptrons
) -> tuple[Tensor, list[Tensor]]:
    """Positive inputs and columns of one sign: rounding then never flips a ReLU, which would be no
    error of the kernel.
    """
    w_up, *rest = weights
    signs = torch.ones(w_up.shape[2])
    signs[::3] = -1
    x, w_up = x.abs() + 0.1, (w_up.abs() + 0.1) * signs.to(w_up.dtype)
    if "b_up_EF" in operation.biases:
        rest[1] = rest[1].abs() * w_up[:, 0].sign()
    return x, [w_up, *rest]


def values_and_gradients(
    operation: Callable[..., Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    routes: Routes,
    grad: Tensor,
    backend: str,
) -> list[Tensor]:
    """The output, and the gradients of x, the weights and the gate weights."""
    leaves = [value.detach().clone().requires_grad_() for value in (x, *weights, routes.weight_N)]
    y = operation(*leaves[:-1], routes.with_weights(leaves[-1]), backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def expected_and_grad(
    operation: Callable[..., Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    routes: Routes,
    grad: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The reference's output and gradients in float64, and the gradient of the output that they are
    for: of small whole numbers, if there is none.
    """
    exact = [value.double() for value in (x, *weights)]
    if grad is None:
        d_out = weights[1 if len(weights) > 1 else 0].shape[2]
        generator = torch.Generator().manual_seed(5)
        grad = torch.randint(-3, 4, (routes.num_targets, d_out), generator=generator).to(x.dtype)
    routes = routes.with_weights(routes.weight_N.double())
    return values_and_gradients(operation, exact[0], exact[1:], routes, grad, "reference"), grad


def on_device(routes: Routes, device: str) -> Routes:
    """The same routes there."""
    names = ("source_N", "expert_N", "weight_N", "target_N")
    return replace(routes, **{name: getattr(routes, name).to(device) for name in names})


def check(
    operation: Callable[..., Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    routes: Routes,
    tolerance: float,
    backend: str,
    device: str = "cpu",
) -> None:
    """Relative norms: of the output, and of the gradients of x, every weight and the gate weights.

    Some are sums that can be near zero by cancellation, and no rounding would be small beside that: a
    gate weight's gradient is a dot product of an expert's output and `grad`, a weight's is a sum over
    routes. Their errors are measured by at least what such products of unrelated vectors have, and
    such sums where every row of `grad` has a sign of chance.
    """
    expected, grad = expected_and_grad(operation, x, weights, routes)
    signs = torch.randint(0, 2, (len(grad), 1), generator=torch.Generator().manual_seed(6)) * 2 - 1
    y, _, *of_weights, _ = expected_and_grad(operation, x, weights, routes, grad * signs)[0]
    unrelated = y.norm() * grad.double().norm() / max(y.numel(), 1) ** 0.5
    at_least = [0.0, 0.0, *(of_weight.norm().item() for of_weight in of_weights), unrelated.item()]
    own_gate = routes.weight_N.to(torch.promote_types(x.dtype, torch.float32))
    routes = on_device(routes.with_weights(own_gate), device)
    weights = [w.to(device) for w in weights]
    compare(
        values_and_gradients(operation, x.to(device), weights, routes, grad.to(device), backend),
        expected,
        tolerance,
        at_least=at_least,
    )


def check_on_a_gpu(case: Case, backend: str) -> None:
    """Both operations there in bfloat16: every activation with biases, wide and narrow outputs, with a
    rule and without.
    """
    for activation in ACTIVATIONS:
        operation, generator = (
            Perceptrons(activation, BIASES["both biases"]),
            torch.Generator().manual_seed(1),
        )
        routes, x = (
            make_routes(case, generator),
            torch.randn(case.tokens, case.d_in, generator=generator),
        )
        x, weights = away_from_the_kink(x, operation.weights(case, generator), operation)
        x, weights = x.bfloat16(), [w.bfloat16() for w in weights]
        narrow_rows = x[:, :1].repeat(1, weights[0].shape[2])
        calls = (
            (operation, x, weights),
            (routed_linear, x, weights[:1]),
            (routed_linear, narrow_rows, [weights[0].mT]),
        )
        for kind in (routes, irregular(routes)):
            for call, rows, leaves in calls:
                check(call, rows, leaves, kind, 2e-2, backend, device="cuda")


def compare(
    ours: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: float,
    *,
    at_least: Sequence[float],
) -> None:
    """`ours` against `expected`, as `values_and_gradients` returns them; `at_least`: the smallest norms
    that errors are measured by.
    """
    names = ("y", "x", *range(len(expected) - 3), "gate")
    for name, mine, theirs, least in zip(names, ours, expected, at_least, strict=True):
        assert mine.shape == theirs.shape, name
        error = relative(mine, theirs, at_least=least)
        assert error < tolerance, (name, error)


def relative(ours: Tensor, expected: Tensor, *, at_least: float = 0.0) -> float:
    """The norm of the difference by that of what is expected."""
    size = expected.double().norm().clamp(min=at_least)
    return (
        (ours.double().cpu() - expected.double().cpu()).norm() / (size if size > 0 else 1)
    ).item()
