"""Adversarial routings, and the comparison of a backend with the reference: values and all gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moebius.kernels import custom_op
from moebius.kernels.functional import routed_mlp
from moebius.kernels.reference import columns_of
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
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Operation = Callable[..., Tensor]


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
    "one expert takes all": Case(70, 8, 4, 6, 1, choice="first"),
    "the last expert takes all": Case(70, 8, 4, 6, 1, choice="last"),
    "one token": Case(1, 8, 4, 6, 3),
    "no token": Case(0, 8, 4, 6, 3),
    "one expert": Case(19, 8, 4, 1, 1),
    "all experts": Case(11, 8, 4, 5, 5),
    "odd widths": Case(130, 41, 13, 9, 4),
    "width of the 44M model": Case(40, 412, 82, 6, 2),
}


# Routes -------------------------------------------------------------------------------------------


def make_routes(case: Case, generator: torch.Generator) -> Routes:
    """Every token through its experts."""
    weights = torch.rand(case.tokens, case.top_k, generator=generator)
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    choices = {
        "random": scores.argsort(-1)[:, : case.top_k],
        "first": torch.zeros(case.tokens, case.top_k, dtype=torch.int64),
        "last": torch.full((case.tokens, case.top_k), case.experts - 1),
    }
    return token_routes(choices[case.choice], weights, num_experts=case.experts)


def head_routes(
    direction: str, generator: torch.Generator, *, tokens: int = 29
) -> tuple[Routes, int]:
    """SwitchHead's two directions, 3 heads and 2 of 5 experts each; and the number of source rows."""
    heads, top_k, per_head = 3, 2, 5
    choice = torch.rand(tokens, heads, per_head, generator=generator).argsort(-1)[..., :top_k]
    experts = choice + torch.arange(heads)[:, None] * per_head
    weights = torch.rand(tokens, heads, top_k, generator=generator)
    into_heads = direction == "token to head"
    make = token_to_head_routes if into_heads else head_to_token_routes
    routes = make(experts, weights, num_experts=heads * per_head)
    return routes, tokens if into_heads else tokens * heads


def irregular(routes: Routes) -> Routes:
    """The same routes with explicit indices instead of rules."""
    return replace(routes, per_source=0, per_target=0)


def equal_counts(kind: str) -> tuple[Routes, int]:
    """Routes of 5 experts with 6 each, in their order; and the number of source rows."""
    if kind == "slots":
        return slot_routes(30, num_experts=5, device=torch.device("cpu")), 30
    generator = torch.Generator().manual_seed(14)
    weights, experts = torch.rand(30, generator=generator), torch.arange(30) // 6
    if kind == "two slots of a row":
        rows = torch.arange(15).repeat_interleave(2)
        return Routes(rows, experts, weights, rows, 5, 15, 2, 2, per_expert=6), 15
    # of a row's number modulo 9: some rows are not chosen
    chosen = torch.rand(5, 11, generator=generator).argsort(-1)[:, :6].flatten() % 9
    return Routes(chosen, experts, weights, chosen, 5, 11, 0, 0, per_expert=6), 11


def on_device(routes: Routes, device: str) -> Routes:
    """The same routes there."""
    moved = {name: each.to(device) for name, each in vars(routes).items() if torch.is_tensor(each)}
    return replace(routes, **moved)


# Calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Perceptrons:
    """An operation: an activation, and the biases that `weights` has after w_up and w_down."""

    activation: str
    biases: tuple[str, ...] = ()

    def __call__(self, x: Tensor, w_up: Tensor, w_down: Tensor, *rest: Any, backend: str) -> Tensor:
        *biases, routes = rest
        named = dict(zip(self.biases, biases, strict=True))
        return routed_mlp(
            x, w_up, w_down, routes, activation=self.activation, backend=backend, **named
        )

    def weights(self, case: Case, generator: torch.Generator) -> list[Tensor]:
        """Of a bank whose output is one column wider than its input."""
        columns = columns_of(case.d_hidden, self.activation)
        shapes = [(case.d_in, columns), (case.d_hidden, case.d_in + 1)]
        shapes += [(columns,) if name == "b_up_EF" else (case.d_in + 1,) for name in self.biases]
        return [torch.randn(case.experts, *shape, generator=generator) for shape in shapes]


def clamped_swiglu(gate: Tensor, content: Tensor) -> Tensor:
    """gpt-oss's activation, by the formula of its own class."""
    gate, content = gate.clamp(max=7.0), content.clamp(min=-7.0, max=7.0)
    return (content + 1) * (gate * torch.sigmoid(1.702 * gate))


def gpt_oss_call(case: Case | str) -> tuple[Operation, Tensor, list[Tensor], Routes]:
    """gpt-oss's experts; whole numbers put many gates and contents exactly on their bounds."""
    _, x, (w_up, w_down, b_up, b_down), routes = make_call(case, "clamped_swiglu", "both biases")
    x, w_up, b_up = (2 * x).round(), w_up.round(), b_up.round()
    z = x @ w_up + b_up[:, None]
    assert (z[..., ::2] == 7).any()
    assert (z[..., 1::2].abs() == 7).any()
    return gpt_oss, x, [w_up, w_down, b_up, b_down], routes


def gpt_oss(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor,
    b_down: Tensor,
    routes: Routes,
    backend: str,
) -> Tensor:
    """gpt-oss's experts with its own weights, whose gates are the even columns: a plain loop over the
    routes, or the backend's operation on the columns in moebius's order.
    """
    if backend != "reference":
        w_up, b_up = (torch.cat((w[..., ::2], w[..., 1::2]), -1) for w in (w_up, b_up))
        operation = Perceptrons("clamped_swiglu", BIASES["both biases"])
        return operation(x, w_up, w_down, b_up, b_down, routes, backend=backend)
    y = [x.new_zeros(w_down.shape[2]) for _ in range(routes.num_targets)]
    for route, expert in enumerate(routes.expert_N.tolist()):
        z = x[routes.source_N[route]] @ w_up[expert] + b_up[expert]
        output = clamped_swiglu(z[::2], z[1::2]) @ w_down[expert] + b_down[expert]
        target = int(routes.target_N[route])
        y[target] = y[target] + routes.weight_N[route] * output
    return torch.stack(y)


def make_call(
    name: str | Case, activation: str, biases: str, *, seed: int = 1, kink: bool = True
) -> tuple[Perceptrons, Tensor, list[Tensor], Routes]:
    """An operation, its rows, weights and routes. Without the kink, inputs are positive and columns
    of one sign: rounding then never flips a ReLU, which would be no error of the kernel. Nor a clamp:
    every second column is far beyond its bound, the others within.
    """
    case = CASES[name] if isinstance(name, str) else name
    operation = Perceptrons(activation, BIASES[biases])
    generator = torch.Generator().manual_seed(seed)
    routes = make_routes(case, generator)
    x = torch.randn(case.tokens, case.d_in, generator=generator)
    w_up, *rest = operation.weights(case, generator)
    if not kink and activation in ("relu", "clamped_swiglu"):
        scales = torch.ones(w_up.shape[2], dtype=w_up.dtype)
        scales[::3] = -1
        if activation == "clamped_swiglu":
            scales[::2] *= 1000
            scales /= case.d_in
        x, w_up = x.abs() + 0.1, (w_up.abs() + 0.1) * scales
        if "b_up_EF" in operation.biases:
            rest[1] = rest[1].abs() * scales.sign()
    return operation, x, [w_up, *rest], routes


def values_and_gradients(
    operation: Operation,
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


def all_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Against the reference ----------------------------------------------------------------------------


def expected_and_grad(
    operation: Operation,
    x: Tensor,
    weights: Sequence[Tensor],
    routes: Routes,
    grad: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The reference's output and gradients in float64, and the output gradient that they are for
    (small integers by default).
    """
    if grad is None:
        d_out = weights[1 if len(weights) > 1 else 0].shape[2]
        generator = torch.Generator().manual_seed(5)
        grad = torch.randint(-3, 4, (routes.num_targets, d_out), generator=generator).to(x.dtype)
    exact = [value.double() for value in weights]
    routes = routes.with_weights(routes.weight_N.double())
    return values_and_gradients(operation, x.double(), exact, routes, grad, "reference"), grad


def check(
    operation: Operation,
    x: Tensor,
    weights: Sequence[Tensor],
    routes: Routes,
    backend: str,
    *,
    tolerance: float | None = None,
    device: str = "cpu",
) -> None:
    """Compares the output and the gradients of x, every weight and the gate weights, by norms.

    Some gradients are sums that cancellation can bring near zero, where any rounding looks large: a gate
    weight's is a dot product of an expert's output and `grad`, a weight's a sum over routes. Their
    errors are therefore measured against at least the size of a product of unrelated vectors, and of a
    sum with random signs.
    """
    tolerance = TOLERANCES[x.dtype] if tolerance is None else tolerance
    expected, grad = expected_and_grad(operation, x, weights, routes)
    signs = torch.randint(0, 2, (len(grad), 1), generator=torch.Generator().manual_seed(6)) * 2 - 1
    y, _, *of_weights, _ = expected_and_grad(operation, x, weights, routes, grad * signs)[0]
    unrelated = y.norm() * grad.double().norm() / max(y.numel(), 1) ** 0.5
    at_least = [0.0, 0.0, *(of_weight.norm().item() for of_weight in of_weights), unrelated.item()]
    own_gate = routes.weight_N.to(torch.promote_types(x.dtype, torch.float32))
    routes = on_device(routes.with_weights(own_gate), device)
    weights = [w.to(device) for w in weights]
    ours = values_and_gradients(operation, x.to(device), weights, routes, grad.to(device), backend)
    names = ("y", "x", *range(len(expected) - 3), "gate")
    for name, mine, theirs, least in zip(names, ours, expected, at_least, strict=True):
        assert mine.shape == theirs.shape, name
        error = relative(mine, theirs, at_least=least)
        assert error < tolerance, (name, error)


def relative(ours: Tensor, expected: Tensor, *, at_least: float = 0.0) -> float:
    """The norm of the difference by that of what is expected."""
    expected = expected.double().cpu()
    size = expected.norm().clamp(min=at_least)
    return ((ours.double().cpu() - expected).norm() / (size if size > 0 else 1)).item()


@contextmanager
def through_library() -> Iterator[None]:
    """Calls every operator as it is called where a mode of torch looks at it."""
    with mock.patch.object(custom_op, "_needs_gradient", return_value=None):
        yield
