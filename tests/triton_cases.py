"""The Triton backend's functions and the reference's, called alike: in the interpreter and on a
GPU.

Everything is on its arguments' device; gates are float32, as the operations pass them.
"""

from collections.abc import Mapping

import kernel_cases
import torch
from kernel_cases import Case
from torch import Tensor

from moebius.kernels import reference
from moebius.kernels.activations import columns_of
from moebius.kernels.calls import MLPBank, MLPGradients, SortedRoutes
from moebius.kernels.triton import backend as ours
from moebius.kernels.triton.routing import sort_routes
from moebius.model.routing import Routes, head_to_token_routes, token_to_head_routes

# Two of them smaller: the interpreter takes its time.
CASES = kernel_cases.CASES | {
    "odd widths": Case(33, 41, 39, 4, 2),
    "width of the 44M model": Case(5, 412, 82, 2, 1),
}


def as_sorted(routes: Routes) -> SortedRoutes:
    if routes.per_expert:
        order_N, place_N = None, None
        starts_E1 = (
            torch.arange(routes.num_experts + 1, dtype=torch.int32, device=routes.expert_N.device)
            * routes.per_expert
        )
    else:
        order_N, place_N, starts_E1 = sort_routes(
            routes.expert_N, routes.num_experts + routes.has_unused
        )
        starts_E1 = starts_E1[: routes.num_experts + 1]
    return SortedRoutes(
        routes.weight_N,
        order_N,
        place_N,
        starts_E1,
        None if routes.per_source else routes.source_N,
        None if routes.per_target else routes.target_N,
        routes.num_targets,
        routes.per_source,
        routes.per_target,
        routes.per_expert,
    )


def with_unused(routes: Routes, num_sources: int, count: int) -> Routes:
    """The same routes by index, and as many places after them that are unused."""

    def and_then(values_N: Tensor, unused: float) -> Tensor:
        return torch.cat((values_N, values_N.new_full((count,), unused)))

    return Routes(
        and_then(routes.source_N, num_sources),
        and_then(routes.expert_N, routes.num_experts),
        and_then(routes.weight_N, 0),
        and_then(routes.target_N, routes.num_targets),
        routes.num_experts,
        routes.num_targets,
        per_source=0,
        per_target=0,
        has_unused=True,
    )


def make_bank(case: Case, activation: str, biased: bool, generator: torch.Generator) -> MLPBank:
    columns = columns_of(case.d_hidden, activation)
    b_up = torch.randn(case.experts, columns, generator=generator) if biased else None
    b_down = torch.randn(case.experts, case.d_in, generator=generator) if biased else None
    w_up = torch.randn(case.experts, case.d_in, columns, generator=generator)
    return MLPBank(
        w_up,
        torch.randn(case.experts, case.d_hidden, case.d_in, generator=generator),
        b_up,
        b_down,
        activation,
    )


Values = Mapping[str, Tensor | None]


def expected_mlp(grad: Tensor, x: Tensor, bank: MLPBank, routes: Routes) -> Values:
    """In float64, by autograd."""
    given = {
        "x": x,
        "w_up": bank.w_up_EDW,
        "w_down": bank.w_down_EFO,
        "b_up": bank.b_up_EW,
        "b_down": bank.b_down_EO,
    }
    leaves = {
        name: t.double().requires_grad_()
        for name, t in (given | {"gate": routes.weight_N}).items()
        if t is not None
    }
    exact = MLPBank(
        leaves["w_up"], leaves["w_down"], leaves.get("b_up"), leaves.get("b_down"), bank.activation
    )
    y = reference.routed_mlp(leaves["x"], exact, routes.with_weights(leaves["gate"]))
    return dict(
        zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad.double()), strict=True)
    ) | {"y": y.detach()}


def our_mlp(
    grad: Tensor, x: Tensor, bank: MLPBank, routes: Routes, options: ours.Options = ours.DEFAULT
) -> Values:
    places = as_sorted(routes)
    y, saved = ours.mlp_forward(x, bank, places, options=options)
    into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
    grad_x, gate, b_up, b_down = ours.mlp_backward(
        grad, x, bank, places, saved, into, options=options
    )
    gradients = {
        "x": grad_x,
        "w_up": into.w_up_EDW,
        "w_down": into.w_down_EFO,
        "gate": gate,
        "b_up": b_up,
        "b_down": b_down,
    }
    return {"y": y, **gradients}


def check(found: Values, expected: Values, tolerance: float = 1e-5) -> None:
    """By relative norms."""
    assert {name for name, value in found.items() if value is not None} == set(expected)
    for name, value in expected.items():
        mine = found[name]
        assert mine is not None
        assert value is not None
        assert mine.shape == value.shape, name
        size = value.norm()
        error = ((mine.double() - value).norm() / (size if size > 0 else 1)).item()
        assert error < tolerance, (name, error)


def expected_linear(grad: Tensor, x: Tensor, w: Tensor, routes: Routes) -> Values:
    leaves = {
        name: t.double().requires_grad_()
        for name, t in {"x": x, "w": w, "gate": routes.weight_N}.items()
    }
    y = reference.routed_linear(leaves["x"], leaves["w"], routes.with_weights(leaves["gate"]))
    return dict(
        zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad.double()), strict=True)
    ) | {"y": y.detach()}


def our_linear(
    grad: Tensor, x: Tensor, w: Tensor, routes: Routes, options: ours.Options = ours.DEFAULT
) -> Values:
    places, into = as_sorted(routes), torch.zeros_like(w)
    y, saved = ours.linear_forward(x, w, places, options=options)
    grad_x, gate = ours.linear_backward(grad, x, w, places, saved, into, options=options)
    return {"y": y, "x": grad_x, "w": into, "gate": gate}


def head_routes(direction: str, tokens: int, generator: torch.Generator) -> Routes:
    heads, top_k, per_head = 3, 2, 4
    choice = torch.rand(tokens, heads, per_head, generator=generator).argsort(-1)[..., :top_k]
    weights = torch.rand(tokens, heads, top_k, generator=generator)
    make = token_to_head_routes if direction == "token to head" else head_to_token_routes
    return make(
        choice + torch.arange(heads)[:, None] * per_head, weights, num_experts=heads * per_head
    )


def equal_counts(generator: torch.Generator) -> Routes:
    """Experts that choose: each as many tokens, and the routes stand in their order."""
    experts, each, tokens = 4, 9, 13
    tokens_N = torch.stack(
        [torch.randperm(tokens, generator=generator)[:each] for _ in range(experts)]
    ).flatten()
    return Routes(
        tokens_N,
        torch.arange(experts).repeat_interleave(each),
        torch.rand(experts * each, generator=generator),
        tokens_N,
        num_experts=experts,
        num_targets=tokens,
        per_source=0,
        per_target=0,
        per_expert=each,
    )
