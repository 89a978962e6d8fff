"""The Triton backend against the reference in float64: values and all gradients, in Triton's
interpreter.

Its memory is poisoned (conftest.py). Tiles have 16 rows here, so small cases have several, and
ragged ones.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import Case, make_routes
from torch import Tensor
from triton_cases import (
    CASES,
    as_sorted,
    check,
    equal_counts,
    expected_linear,
    expected_mlp,
    head_routes,
    make_bank,
    our_linear,
    our_mlp,
    with_unused,
)

from moebius.kernels.activations import ACTIVATIONS
from moebius.kernels.calls import LinearCall, MLPBank, MLPCall, MLPGradients
from moebius.kernels.triton import backend as ours
from moebius.kernels.triton import weight_gradients as triton_weight_gradients


def slow(*values: object) -> Any:
    """Returns these parameters for a test of `make test-all` alone: the interpreter takes its time."""
    return pytest.param(*values, marks=pytest.mark.slow)


def present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def check_mlp(
    case: Case, activation: str, biased: bool, options: ours.Options = ours.DEFAULT
) -> None:
    generator = torch.Generator().manual_seed(1)
    routes, bank = make_routes(case, generator), make_bank(case, activation, biased, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    check(our_mlp(grad, x, bank, routes, options), expected_mlp(grad, x, bank, routes))


@pytest.mark.parametrize(
    "name", [slow(name) if name == "width of the 44M model" else name for name in CASES]
)
def test_mlp_equals_the_reference(name: str) -> None:
    check_mlp(CASES[name], "relu", biased=False)


@pytest.mark.slow
@pytest.mark.parametrize("biased", [slow(False), True])  # without: above, with one activation
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_and_without_biases(activation: str, biased: bool) -> None:
    check_mlp(Case(21, 20, 39, 4, 2), activation, biased)


OPTIONS = [ours.Options(fused=True), ours.Options(scatter_add=True), ours.Options(True, True, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "activation"),
    [
        (options, activation) if number == place else slow(options, activation)
        for number, options in enumerate(OPTIONS)
        for place, activation in enumerate(("relu", "gelu", "swiglu"))
    ],
)
def test_opt_in_kernels_equal_the_reference(options: ours.Options, activation: str) -> None:
    check_mlp(Case(21, 20, 39, 4, 2), activation, biased=True, options=options)
    check_mlp(CASES["no token"], activation, biased=True, options=options)


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(
    tokens=st.integers(0, 30),
    width=st.integers(1, 40),
    hidden=st.integers(1, 36),
    experts=st.integers(1, 7),
    share=st.floats(0, 1),
    activation=st.sampled_from(ACTIVATIONS),
    biased=st.booleans(),
    fused=st.booleans(),
)
def test_any_shape(
    tokens: int,
    width: int,
    hidden: int,
    experts: int,
    share: float,
    activation: str,
    biased: bool,
    fused: bool,
) -> None:
    case = Case(tokens, width, hidden, experts, max(1, round(share * experts)))
    check_mlp(case, activation, biased, ours.Options(fused=fused))


@pytest.mark.parametrize("name", ["random", slow("one expert takes all"), slow("odd widths")])
@pytest.mark.parametrize("options", [ours.DEFAULT, slow(ours.Options(scatter_add=True))])
def test_unused_places_of_a_list_change_nothing(name: str, options: ours.Options) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    routes, bank = make_routes(case, generator), make_bank(case, "gelu", True, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    count = len(routes.expert_N)
    listed = with_unused(routes, len(x), 37)
    found = {**our_mlp(grad, x, bank, listed, options)}
    found["gate"] = present(found["gate"])[:count]
    check(found, expected_mlp(grad, x, bank, routes))
    for d_out in (5, 40):  # the gate's gradient is taken on the narrow side
        w = torch.randn(case.experts, case.d_in, d_out, generator=generator)
        grad = torch.randn(case.tokens, d_out, generator=generator)
        found = {**our_linear(grad, x, w, listed, options)}
        found["gate"] = present(found["gate"])[:count]
        check(found, expected_linear(grad, x, w, routes))


def test_routes_that_stand_in_expert_order() -> None:
    generator = torch.Generator().manual_seed(6)
    case, routes = Case(13, 12, 7, 4, 1), equal_counts(generator)
    bank = make_bank(case, "relu", True, generator)
    x, grad = (torch.randn(13, 12, generator=generator) for _ in range(2))
    check(our_mlp(grad, x, bank, routes), expected_mlp(grad, x, bank, routes))
    w = bank.w_up_EDW @ bank.w_down_EFO
    check(our_linear(grad, x, w, routes), expected_linear(grad, x, w, routes))


WIDTHS = {
    "narrow output": (41, 8),
    "narrow input": (8, 41),
    "square": (20, 20),
    "two tiles": (82, 50),
}


def check_linear(
    direction: str, widths: tuple[int, int], options: ours.Options, *, ruled: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes = head_routes(direction, 13, generator)
    x = torch.randn(13 if direction == "token to head" else 39, widths[0], generator=generator)
    w = torch.randn(routes.num_experts, *widths, generator=generator)
    grad = torch.randn(routes.num_targets, widths[1], generator=generator)
    given = routes if ruled else replace(routes, per_source=0, per_target=0)
    check(our_linear(grad, x, w, given, options), expected_linear(grad, x, w, routes))


@pytest.mark.parametrize(
    ("direction", "name"),
    [
        slow(direction, name)
        if name
        in ("two tiles", "narrow input" if direction == "token to head" else "narrow output")
        else (direction, name)
        for direction in ("token to head", "head to token")
        for name in WIDTHS
    ],
)
def test_linear_equals_the_reference(direction: str, name: str) -> None:
    check_linear(direction, WIDTHS[name], ours.DEFAULT, ruled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [ours.DEFAULT, ours.Options(scatter_add=True)], ids=["stored", "scattered"]
)
@pytest.mark.parametrize("name", ["narrow output", "narrow input"])
def test_linear_by_an_index(name: str, options: ours.Options) -> None:
    check_linear("head to token", WIDTHS[name], options, ruled=False)


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
def test_linear_without_a_token(widths: tuple[int, int]) -> None:
    routes = head_routes("token to head", 0, torch.Generator().manual_seed(2))
    found = our_linear(
        torch.zeros(0, widths[1]), torch.zeros(0, widths[0]), torch.randn(12, *widths), routes
    )
    assert all(value is not None and not value.any() for value in found.values())


@pytest.mark.slow
def test_two_runs_are_equal_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(7)
    case = CASES["odd widths"]
    routes, bank = make_routes(case, generator), make_bank(case, "swiglu", True, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    first, second = (our_mlp(grad, x, bank, routes) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(present(value), present(second[name]))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have several chunks of rows already at toy size."""
    monkeypatch.setattr(triton_weight_gradients, "_LEAST_CHUNK", 8)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "name", ["one expert takes all", "the last expert takes all", "random", "one expert"]
)
def test_an_expert_with_many_rows_is_done_in_chunks(name: str) -> None:
    check_mlp(CASES[name], "relu", biased=False)


def test_gradients_are_added_to_what_is_there() -> None:
    generator = torch.Generator().manual_seed(8)
    case = CASES["empty experts"]
    routes, bank = (
        as_sorted(make_routes(case, generator)),
        make_bank(case, "relu", False, generator),
    )
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    _, saved = ours.mlp_forward(x, bank, routes)
    into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
    ours.mlp_backward(grad, x, bank, routes, saved, into)
    once = into.w_up_EDW.clone(), into.w_down_EFO.clone()
    ours.mlp_backward(grad, x, bank, routes, saved, into)
    assert torch.equal(into.w_up_EDW, 2 * once[0])
    assert torch.equal(into.w_down_EFO, 2 * once[1])
    transposed = torch.zeros_like(bank.w_up_EDW).mT.contiguous().mT  # not contiguous
    ours.mlp_backward(grad, x, bank, routes, saved, MLPGradients(transposed, into.w_down_EFO))
    assert torch.equal(transposed, once[0])


@pytest.mark.parametrize(
    ("activation", "chunked"),
    [
        ("relu", True),
        slow("gelu", False),
        slow("geglu", True),
        slow("relu", False),
        slow("gelu", True),
        slow("geglu", False),
    ],
)
def test_deferred_weight_gradients_are_the_sum_of_all_calls(
    activation: str, chunked: bool, request: pytest.FixtureRequest
) -> None:
    if chunked:
        request.getfixturevalue("small_chunks")
    generator = torch.Generator().manual_seed(9)
    case = Case(15, 12, 7, 5, 2)
    bank, calls = make_bank(case, activation, False, generator), []
    total = {
        "w_up": torch.zeros_like(bank.w_up_EDW).double(),
        "w_down": torch.zeros_like(bank.w_down_EFO).double(),
    }
    for tokens in (15, 0, 22):  # each call has routes of its own
        routes = make_routes(replace(case, tokens=tokens), generator)
        x, grad = (torch.randn(tokens, case.d_in, generator=generator) for _ in range(2))
        places = as_sorted(routes)
        _, saved = ours.mlp_forward(x, bank, places)
        *rows, d_z = ours.mlp_backward_rows(grad, x, bank, places, saved)
        calls.append(MLPCall(grad, x, places, saved, d_z, bank))
        expected = expected_mlp(grad, x, bank, routes)
        check(
            dict(zip(("x", "gate"), rows[:2], strict=True)),
            {name: expected[name] for name in ("x", "gate")},
        )
        for name, value in total.items():
            value += present(expected[name])
    check(dict(zip(("w_up", "w_down"), ours.mlp_weight_gradients(calls), strict=True)), total)


@pytest.mark.slow
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
        _, saved = ours.linear_forward(x, w, places)
        grad_x, gate = ours.linear_backward_rows(grad, x, w, places, saved)
        calls.append(LinearCall(grad, x, places, w))
        expected = expected_linear(grad, x, w, routes)
        check({"x": grad_x, "gate": gate}, {name: expected[name] for name in ("x", "gate")})
        total += present(expected["w"])
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
    )
    check(our_mlp(grad, x, strided, routes), expected_mlp(grad, x, bank, routes))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.bfloat16, "interpreter computes bfloat16 wrongly"),
        (torch.float64, "the weights are torch.float64: choose"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(dtype: torch.dtype, message: str) -> None:
    generator = torch.Generator().manual_seed(12)
    case = CASES["one token"]
    routes, bank = (
        as_sorted(make_routes(case, generator)),
        make_bank(case, "relu", False, generator),
    )
    x = torch.randn(case.tokens, case.d_in).to(dtype)
    with pytest.raises(ValueError, match=message):
        ours.mlp_forward(
            x,
            MLPBank(bank.w_up_EDW.to(dtype), bank.w_down_EFO.to(dtype), None, None, "relu"),
            routes,
        )
    with pytest.raises(ValueError, match=message):
        ours.linear_forward(x, bank.w_up_EDW.to(dtype), routes)
