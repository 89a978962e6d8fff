"""The Triton backend against the reference in float64: values and all gradients, in Triton's interpreter.

Its memory is poisoned (conftest.py). Tiles have 16 rows here, so small cases have several, and ragged ones.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebius.kernels import reference, triton_weight_gradients
from moebius.kernels import triton_routed as ours
from moebius.kernels.activations import ACTIVATIONS, columns_of
from moebius.kernels.operands import LinearCall, MLPBank, MLPCall, MLPGradients, SortedRoutes
from moebius.kernels.triton_routing import sort_routes
from moebius.model.routing import Routes, head_to_token_routes, token_routes, token_to_head_routes

TOLERANCE = 1e-5


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
    "odd widths": Case(33, 41, 39, 4, 2),
    "width of the 44M model": Case(5, 412, 82, 2, 1),
}


def make_routes(case: Case, generator: torch.Generator) -> Routes:
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    chosen = scores.argsort(-1)[:, : case.top_k]
    if case.choice != "random":
        chosen = torch.full((case.tokens, case.top_k), 0 if case.choice == "first" else case.experts - 1)
    weights = torch.rand(case.tokens, case.top_k, generator=generator)
    return token_routes(chosen, weights, num_experts=case.experts)


def as_sorted(routes: Routes) -> SortedRoutes:
    if routes.per_expert:
        order_N, place_N = None, None
        starts_E1 = torch.arange(routes.num_experts + 1, dtype=torch.int32) * routes.per_expert
    else:
        order_N, place_N, starts_E1 = sort_routes(routes.expert_N, routes.num_experts)
    return SortedRoutes(
        routes.weight_N, order_N, place_N, starts_E1,
        None if routes.per_source else routes.source_N, None if routes.per_target else routes.target_N,
        routes.num_targets, routes.per_source, routes.per_target, routes.per_expert,
    )  # fmt: skip


def make_bank(case: Case, activation: str, biased: bool, generator: torch.Generator) -> MLPBank:
    columns = columns_of(case.d_hidden, activation)
    b_up = torch.randn(case.experts, columns, generator=generator) if biased else None
    b_down = torch.randn(case.experts, case.d_in, generator=generator) if biased else None
    w_up = torch.randn(case.experts, case.d_in, columns, generator=generator)
    return MLPBank(
        w_up, torch.randn(case.experts, case.d_hidden, case.d_in, generator=generator), b_up, b_down, activation
    )  # fmt: skip


Values = dict[str, Tensor | None]


def expected_mlp(grad: Tensor, x: Tensor, bank: MLPBank, routes: Routes) -> Values:
    """In float64, by autograd."""
    given = {"x": x, "w_up": bank.w_up_EDW, "w_down": bank.w_down_EFO, "b_up": bank.b_up_EW, "b_down": bank.b_down_EO}
    leaves = {
        name: t.double().requires_grad_() for name, t in (given | {"gate": routes.weight_N}).items() if t is not None
    }
    exact = MLPBank(leaves["w_up"], leaves["w_down"], leaves.get("b_up"), leaves.get("b_down"), bank.activation)
    y = reference.routed_mlp(leaves["x"], exact, routes.with_weights(leaves["gate"]))
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad.double()), strict=True)) | {
        "y": y.detach()
    }


def our_mlp(grad: Tensor, x: Tensor, bank: MLPBank, routes: Routes, options: ours.Options = ours.DEFAULT) -> Values:
    places = as_sorted(routes)
    y, kept = ours.mlp_forward(x, bank, places, options=options)
    into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
    grad_x, gate, b_up, b_down = ours.mlp_backward(grad, x, bank, places, kept, into, options=options)
    gradients = {
        "x": grad_x,
        "w_up": into.w_up_EDW,
        "w_down": into.w_down_EFO,
        "gate": gate,
        "b_up": b_up,
        "b_down": b_down,
    }
    return {"y": y, **gradients}


def check(found: Values, expected: Values) -> None:
    assert {name for name, value in found.items() if value is not None} == set(expected)
    for name, value in expected.items():
        mine = found[name]
        assert mine is not None
        assert value is not None
        assert mine.shape == value.shape, name
        size = value.norm()
        error = ((mine.double() - value).norm() / (size if size > 0 else 1)).item()
        assert error < TOLERANCE, (name, error)


def check_mlp(case: Case, activation: str, biased: bool, options: ours.Options = ours.DEFAULT) -> None:
    generator = torch.Generator().manual_seed(1)
    routes, bank = make_routes(case, generator), make_bank(case, activation, biased, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    check(our_mlp(grad, x, bank, routes, options), expected_mlp(grad, x, bank, routes))


@pytest.mark.parametrize("name", CASES)
def test_mlp_equals_the_reference(name: str) -> None:
    check_mlp(CASES[name], "relu", biased=False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_and_without_biases(activation: str, biased: bool) -> None:
    check_mlp(Case(21, 20, 39, 4, 2), activation, biased)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize(
    "options", [ours.Options(fused=True), ours.Options(scatter_add=True), ours.Options(True, True, True)]
)
def test_opt_in_kernels_equal_the_reference(options: ours.Options, activation: str) -> None:
    check_mlp(Case(21, 20, 39, 4, 2), activation, biased=True, options=options)
    check_mlp(CASES["no token"], activation, biased=True, options=options)


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(
    tokens=st.integers(0, 30), width=st.integers(1, 40), hidden=st.integers(1, 36), experts=st.integers(1, 7),
    share=st.floats(0, 1), activation=st.sampled_from(ACTIVATIONS), biased=st.booleans(), fused=st.booleans(),
)  # fmt: skip
def test_any_shape(
    tokens: int, width: int, hidden: int, experts: int, share: float, activation: str, biased: bool, fused: bool
) -> None:
    case = Case(tokens, width, hidden, experts, max(1, round(share * experts)))
    check_mlp(case, activation, biased, ours.Options(fused=fused))


def equal_counts(generator: torch.Generator) -> Routes:
    """Experts that choose: each as many tokens, and the routes stand in their order."""
    experts, each, tokens = 4, 9, 13
    tokens_N = torch.stack([torch.randperm(tokens, generator=generator)[:each] for _ in range(experts)]).flatten()
    return Routes(
        tokens_N, torch.arange(experts).repeat_interleave(each), torch.rand(experts * each, generator=generator), tokens_N,
        num_experts=experts, num_targets=tokens, per_source=0, per_target=0, per_expert=each,
    )  # fmt: skip


def test_routes_that_stand_in_expert_order() -> None:
    generator = torch.Generator().manual_seed(6)
    case, routes = Case(13, 12, 7, 4, 1), equal_counts(generator)
    bank = make_bank(case, "relu", True, generator)
    x, grad = (torch.randn(13, 12, generator=generator) for _ in range(2))
    check(our_mlp(grad, x, bank, routes), expected_mlp(grad, x, bank, routes))
    w = bank.w_up_EDW @ bank.w_down_EFO
    check(our_linear(grad, x, w, routes), expected_linear(grad, x, w, routes))


def expected_linear(grad: Tensor, x: Tensor, w: Tensor, routes: Routes) -> Values:
    leaves = {name: t.double().requires_grad_() for name, t in {"x": x, "w": w, "gate": routes.weight_N}.items()}
    y = reference.routed_linear(leaves["x"], leaves["w"], routes.with_weights(leaves["gate"]))
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad.double()), strict=True)) | {
        "y": y.detach()
    }


def our_linear(grad: Tensor, x: Tensor, w: Tensor, routes: Routes, options: ours.Options = ours.DEFAULT) -> Values:
    places, into = as_sorted(routes), torch.zeros_like(w)
    y, kept = ours.linear_forward(x, w, places, options=options)
    grad_x, gate = ours.linear_backward(grad, x, w, places, kept, into, options=options)
    return {"y": y, "x": grad_x, "w": into, "gate": gate}


def head_routes(direction: str, tokens: int, generator: torch.Generator) -> Routes:
    heads, top_k, per_head = 3, 2, 4
    choice = torch.rand(tokens, heads, per_head, generator=generator).argsort(-1)[..., :top_k]
    weights = torch.rand(tokens, heads, top_k, generator=generator)
    make = token_to_head_routes if direction == "token to head" else head_to_token_routes
    return make(choice + torch.arange(heads)[:, None] * per_head, weights, num_experts=heads * per_head)


WIDTHS = {"narrow output": (41, 8), "narrow input": (8, 41), "square": (20, 20), "two tiles": (82, 50)}


def check_linear(direction: str, widths: tuple[int, int], options: ours.Options, *, ruled: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    routes = head_routes(direction, 13, generator)
    x = torch.randn(13 if direction == "token to head" else 39, widths[0], generator=generator)
    w = torch.randn(routes.num_experts, *widths, generator=generator)
    grad = torch.randn(routes.num_targets, widths[1], generator=generator)
    given = routes if ruled else replace(routes, per_source=0, per_target=0)
    check(our_linear(grad, x, w, given, options), expected_linear(grad, x, w, routes))


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(direction: str, name: str) -> None:
    check_linear(direction, WIDTHS[name], ours.DEFAULT, ruled=True)


@pytest.mark.parametrize("options", [ours.DEFAULT, ours.Options(scatter_add=True)], ids=["stored", "scattered"])
@pytest.mark.parametrize("name", ["narrow output", "narrow input"])
def test_linear_by_an_index(name: str, options: ours.Options) -> None:
    check_linear("head to token", WIDTHS[name], options, ruled=False)


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
def test_linear_without_a_token(widths: tuple[int, int]) -> None:
    routes = head_routes("token to head", 0, torch.Generator().manual_seed(2))
    found = our_linear(torch.zeros(0, widths[1]), torch.zeros(0, widths[0]), torch.randn(12, *widths), routes)
    assert all(value is not None and not value.any() for value in found.values())


def test_two_runs_are_equal_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(7)
    case = CASES["odd widths"]
    routes, bank = make_routes(case, generator), make_bank(case, "swiglu", True, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    first, second = (our_mlp(grad, x, bank, routes) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have several chunks of rows already at toy size."""
    monkeypatch.setattr(triton_weight_gradients, "_LEAST_CHUNK", 8)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["one expert takes all", "the last expert takes all", "random", "one expert"])
def test_an_expert_with_many_rows_is_done_in_chunks(name: str) -> None:
    check_mlp(CASES[name], "relu", biased=False)


def test_gradients_are_added_to_what_is_there() -> None:
    generator = torch.Generator().manual_seed(8)
    case = CASES["empty experts"]
    routes, bank = as_sorted(make_routes(case, generator)), make_bank(case, "relu", False, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    _, kept = ours.mlp_forward(x, bank, routes)
    into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
    ours.mlp_backward(grad, x, bank, routes, kept, into)
    once = into.w_up_EDW.clone(), into.w_down_EFO.clone()
    ours.mlp_backward(grad, x, bank, routes, kept, into)
    assert torch.equal(into.w_up_EDW, 2 * once[0])
    assert torch.equal(into.w_down_EFO, 2 * once[1])
    transposed = torch.zeros_like(bank.w_up_EDW).mT.contiguous().mT  # not contiguous
    ours.mlp_backward(grad, x, bank, routes, kept, MLPGradients(transposed, into.w_down_EFO))
    assert torch.equal(transposed, once[0])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "geglu"])
def test_deferred_weight_gradients_are_the_sum_of_all_calls(
    activation: str, chunked: bool, request: pytest.FixtureRequest
) -> None:
    if chunked:
        request.getfixturevalue("small_chunks")
    generator = torch.Generator().manual_seed(9)
    case = Case(15, 12, 7, 5, 2)
    bank, calls = make_bank(case, activation, False, generator), []
    total = {"w_up": torch.zeros_like(bank.w_up_EDW).double(), "w_down": torch.zeros_like(bank.w_down_EFO).double()}
    for tokens in (15, 0, 22):  # each call has routes of its own
        routes = make_routes(replace(case, tokens=tokens), generator)
        x, grad = (torch.randn(tokens, case.d_in, generator=generator) for _ in range(2))
        places = as_sorted(routes)
        _, kept = ours.mlp_forward(x, bank, places)
        *rows, d_z = ours.mlp_backward_rows(grad, x, bank, places, kept)
        calls.append(MLPCall(grad, x, places, kept, d_z, bank))
        expected = expected_mlp(grad, x, bank, routes)
        check(dict(zip(("x", "gate"), rows[:2], strict=True)), {name: expected[name] for name in ("x", "gate")})
        for name, value in total.items():
            value += expected[name]
    check(dict(zip(("w_up", "w_down"), ours.mlp_weight_gradients(calls), strict=True)), total)


@pytest.mark.parametrize("widths", [(12, 5), (5, 12)])
def test_deferred_gradients_of_matrices_are_the_sum_of_all_calls(widths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(10)
    w, calls = torch.randn(12, *widths, generator=generator), []
    total = torch.zeros_like(w).double()
    for tokens in (9, 4):
        routes = head_routes("token to head", tokens, generator)
        x, grad = (
            torch.randn(tokens, widths[0], generator=generator),
            torch.randn(3 * tokens, widths[1], generator=generator),
        )
        places = as_sorted(routes)
        _, kept = ours.linear_forward(x, w, places)
        grad_x, gate = ours.linear_backward_rows(grad, x, w, places, kept)
        calls.append(LinearCall(grad, x, places, w))
        expected = expected_linear(grad, x, w, routes)
        check({"x": grad_x, "gate": gate}, {name: expected[name] for name in ("x", "gate")})
        total += expected["w"]
    check({"w": ours.linear_weight_gradients(calls)[0]}, {"w": total})


def test_rows_that_do_not_lie_well() -> None:
    """Views: strided, and starting at no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(11)
    case = Case(9, 5, 3, 4, 2)
    routes, bank = make_routes(case, generator), make_bank(case, "relu", False, generator)
    x = torch.randn(10, 5, generator=generator)[1:]
    grad = torch.randn(5, 9, generator=generator).T
    strided = MLPBank(
        bank.w_up_EDW.mT.contiguous().mT, bank.w_down_EFO.mT.contiguous().mT, None, None, "relu"
    )  # fmt: skip
    check(our_mlp(grad, x, strided, routes), expected_mlp(grad, x, bank, routes))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.bfloat16, "interpreter computes torch.bfloat16 wrongly"),
        (torch.float64, "the weights are torch.float64: choose"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(dtype: torch.dtype, message: str) -> None:
    generator = torch.Generator().manual_seed(12)
    case = CASES["one token"]
    routes, bank = as_sorted(make_routes(case, generator)), make_bank(case, "relu", False, generator)
    x = torch.randn(case.tokens, case.d_in).to(dtype)
    with pytest.raises(ValueError, match=message):
        ours.mlp_forward(x, MLPBank(bank.w_up_EDW.to(dtype), bank.w_down_EFO.to(dtype), None, None, "relu"), routes)
    with pytest.raises(ValueError, match=message):
        ours.linear_forward(x, bank.w_up_EDW.to(dtype), routes)
