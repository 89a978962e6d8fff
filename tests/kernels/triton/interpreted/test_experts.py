"""The Triton backend against the reference in float64, in the interpreter: values and all gradients.

Memory is poisoned (conftest.py). Tiles have 16 rows here, so small cases have several, ragged ones.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BIASES,
    CASES,
    Case,
    Operation,
    Perceptrons,
    check,
    equal_counts,
    gpt_oss_call,
    head_routes,
    irregular,
    make_call,
    values_and_gradients,
)
from pairwise import parametrize_pairs, slow_but
from torch import Tensor

from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.reference import ACTIVATIONS
from moebius.kernels.triton import weight_gradients

# Two of them smaller: the interpreter takes its time.
SMALL = CASES | {
    "odd widths": Case(33, 41, 39, 4, 2),
    "width of the 44M model": Case(5, 412, 82, 2, 1),
}
WIDTHS = {
    "narrow output": (41, 8),
    "narrow input": (8, 41),
    "square": (20, 20),
    "two tiles": (82, 50),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", slow_but(SMALL, *(set(SMALL) - {"width of the 44M model"})))
def test_mlp_equals_the_reference(name: str) -> None:
    check(*make_call(SMALL[name], "relu", "no bias"), "triton")


@pytest.mark.sample(6)
@parametrize_pairs({"activation": ACTIVATIONS, "biases": BIASES})
def test_every_activation_with_and_without_biases(activation: str, biases: str) -> None:
    check(*make_call(Case(21, 20, 39, 4, 2), activation, biases), "triton")


def test_gpt_oss_experts_equal_a_plain_loop_over_its_own_weights() -> None:
    check(*gpt_oss_call(Case(9, 20, 19, 4, 2)), "triton")


@pytest.mark.nightly
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(
    tokens=st.integers(0, 30),
    width=st.integers(1, 40),
    hidden=st.integers(1, 36),
    experts=st.integers(1, 7),
    share=st.floats(0, 1),
    activation=st.sampled_from(ACTIVATIONS),
    biases=st.sampled_from(sorted(BIASES)),
)
def test_any_shape(
    tokens: int, width: int, hidden: int, experts: int, share: float, activation: str, biases: str
) -> None:
    case = Case(tokens, width, hidden, experts, max(1, round(share * experts)))
    check(*make_call(case, activation, biases), "triton")


@pytest.mark.parametrize(
    "kind", slow_but(["slots", "expert choice", "two slots of a row"], "slots")
)
def test_routes_that_stand_in_expert_order(kind: str) -> None:
    (routes, rows), generator = equal_counts(kind), torch.Generator().manual_seed(6)
    operation, x = Perceptrons("relu", BIASES["both biases"]), torch.randn(rows, 12)
    check(operation, x, operation.weights(Case(rows, 12, 7, 5, 1), generator), routes, "triton")
    check(routed_linear, x, [torch.randn(5, 12, 13, generator=generator)], routes, "triton")


@pytest.mark.sample(2)
@parametrize_pairs(
    {"name": WIDTHS, "direction": ["token to head", "head to token"], "ruled": [True, False]}
)
def test_linear_equals_the_reference(name: str, direction: str, ruled: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = head_routes(direction, generator, tokens=13)
    x = torch.randn(rows, WIDTHS[name][0], generator=generator)
    w = torch.randn(routes.num_experts, *WIDTHS[name], generator=generator)
    check(routed_linear, x, [w], routes if ruled else irregular(routes), "triton")


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
def test_linear_without_a_token(widths: tuple[int, int]) -> None:
    routes, _ = head_routes("token to head", torch.Generator(), tokens=0)
    w = torch.randn(routes.num_experts, *widths)
    found = values_and_gradients(
        routed_linear, torch.zeros(0, widths[0]), [w], routes, torch.zeros(0, widths[1]), "triton"
    )
    assert not any(value.any() for value in found)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have several chunks of rows already at toy size."""
    monkeypatch.setattr(weight_gradients, "_LEAST_CHUNK", 8)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "name", ["one expert takes all", "the last expert takes all", "random", "one expert"]
)
def test_an_expert_with_many_rows_is_done_in_chunks(name: str) -> None:
    check(*make_call(name, "relu", "no bias"), "triton")


@pytest.mark.sample(1)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(
    ("activation", "chosen"),
    slow_but(
        [("relu", 2), ("relu", 3), ("gelu", 2), ("clamped_swiglu", 2)],
        *[("relu", 2), ("relu", 3)],
        names=2,
    ),
)
def test_gradients_of_repeats_are_the_sum_of_all_calls(
    activation: str, chosen: int, defer: bool
) -> None:
    """Added to a buffer, or made in one product; each call has routes of its own, one of them none.

    The last call chooses `chosen` experts, the others two.
    """
    generator, case = torch.Generator().manual_seed(9), Case(15, 12, 7, 5, 2)
    w_up, w_down = Perceptrons(activation).weights(case, generator)
    leaves = [w_up, w_down[..., :12], torch.randn(5, 12, 5, generator=generator)]
    leaves += [torch.randn(5, 5, 12, generator=generator)]
    sizes = (15, 2), (0, 2), (22, chosen)
    calls = [make_call(Case(t, 12, 7, 5, k), activation, "no bias") for t, k in sizes]

    def gradients(backend: str, dtype: torch.dtype) -> list[Tensor]:
        given = [(0.3 * leaf).to(dtype).requires_grad_() for leaf in leaves]
        loss = torch.zeros((), dtype=dtype)
        with accumulate_weight_gradients():
            for _, x, _, routes in calls:
                routes = routes.with_weights(routes.weight_N.to(dtype))
                named = {"backend": backend, "defer": defer}
                x = routed_mlp(
                    x.to(dtype), given[0], given[1], routes, activation=activation, **named
                )
                for w in given[2:]:
                    x = routed_linear(x, w, routes, **named)
                loss = loss + x.square().sum()
        return list(torch.autograd.grad(loss, given))

    exact = gradients("reference", torch.float64)
    for mine, theirs in zip(gradients("triton", torch.float32), exact, strict=True):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-5


def test_rows_that_do_not_lie_well() -> None:
    """Views: strided, and starting at no multiple of 16 bytes."""
    operation, x, weights, routes = make_call(Case(9, 5, 3, 4, 2), "relu", "no bias", seed=11)
    shifted = torch.cat((x.new_zeros(1, 5), x))[1:]
    check(operation, shifted, [w.mT.contiguous().mT for w in weights], routes, "triton")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.bfloat16, "interpreter computes bfloat16 wrongly"),
        (torch.float64, "the weights are torch.float64: choose"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(dtype: torch.dtype, message: str) -> None:
    operation, x, weights, routes = make_call("one token", "relu", "no bias")
    calls: list[tuple[Operation, list[Tensor]]] = [(operation, weights)]
    calls += [(routed_linear, weights[:1])]
    for call, leaves in calls:
        with pytest.raises(ValueError, match=message):
            call(x, *(leaf.to(dtype) for leaf in leaves), routes, backend="triton")
