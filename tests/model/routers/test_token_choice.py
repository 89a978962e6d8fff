"""Softmax token choice with and without a capacity: values, gradients, who is refused, what leaks,
conventions of losses.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from routing_oracle import (
    WIDTH,
    Gates,
    all_served,
    assert_same,
    make_layer,
    make_router,
    rows,
    serve,
    slow_layer,
)
from torch import Tensor

from moebius.model.balance import RunningSum, choice_sums
from moebius.model.routers.capacity import expert_capacity, has_place, row_capacity

B, S, E = 8, 6, 8  # the toy of the table of leaks
ORDERS = ("position_major", "token_major", "slot_major", "priority")


# Values and gradients


def slow_gates(layer: Any, x_BSD: Tensor, *, top_k: int, renormalise: bool) -> list[Gates]:
    """Softmax over the experts, row by row."""
    found = []
    for x_D in x_BSD.flatten(0, 1):
        p = torch.stack([(x_D @ w).exp() for w in layer.router.weight])
        p = p / p.sum()
        best = sorted(range(len(p)), key=lambda e: -p[e].item())[:top_k]
        total = sum(p[e] for e in best) if renormalise else 1.0
        found.append([(e, p[e] / total) for e in best])
    return found


def slow_order(
    gates: list[Gates], name: str, largest: list[float], batch: int
) -> list[tuple[int, int]]:
    """(row, choice) in the order of asking, as the module describes it."""
    length, every = (
        len(gates) // batch,
        [(row, choice) for row in range(len(gates)) for choice in range(len(gates[0]))],
    )
    keys = {
        "position_major": lambda pair: (pair[0] % length, pair[0] // length, pair[1]),
        "token_major": lambda pair: pair,
        "slot_major": lambda pair: (pair[1], pair[0]),
        "priority": lambda pair: (pair[1], -largest[pair[0]], pair[0]),
    }
    return sorted(every, key=keys[name])


@pytest.mark.parametrize(("top_k", "renormalise"), [(1, False), (2, True), (3, False), (8, True)])
def test_dropless_equals_a_loop_over_rows(top_k: int, renormalise: bool) -> None:
    layer = make_layer(
        {"kind": "token_choice", "top_k": top_k, "renormalise": renormalise}, skew=0.5
    )

    def slow(x_BSD: Tensor) -> Tensor:
        return slow_layer(
            layer, x_BSD, all_served(slow_gates(layer, x_BSD, top_k=top_k, renormalise=renormalise))
        )

    assert_same(layer, rows(3, 4), slow)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("top_k", "renormalise"), [(1, False), (2, True)])
def test_with_a_capacity_it_equals_a_loop_over_buffers(
    order: str, top_k: int, renormalise: bool
) -> None:
    """Gate weights are not renormalised after a drop."""
    layer = make_layer(
        {
            "kind": "token_choice",
            "top_k": top_k,
            "renormalise": renormalise,
            "capacity_factor": 1.25,
            "drop_order": order,
        },
        skew=0.5,
    )
    capacity = math.ceil(1.25 * top_k * 5 * 7 / E)

    def slow(x_BSD: Tensor) -> Tensor:
        gates = slow_gates(layer, x_BSD, top_k=top_k, renormalise=renormalise)
        probabilities = slow_gates(layer, x_BSD, top_k=1, renormalise=False)
        asking = slow_order(gates, order, [own[0][1].item() for own in probabilities], batch=5)
        served = serve(gates, asking, capacity)
        assert 0.3 * len(asking) < len(served) < 0.95 * len(asking)
        return slow_layer(layer, x_BSD, served)

    assert_same(layer, rows(5, 7, common=1.0), slow)


# Capacity


@pytest.mark.parametrize(
    ("factor", "rows", "top_k", "experts", "by_routes", "by_rows"),
    [
        (1.0, 64, 2, 16, 8, 8),
        (1.0, 65, 2, 16, 9, 10),
        (1.0, 1, 2, 16, 1, 2),
        (2.0, 64, 2, 16, 16, 16),
        (0.1, 16, 1, 16, 1, 1),
        (1.1, 100, 1, 10, 11, 11),  # 11.000000000000002 in floating point
        (1.25, 48, 1, 8, 8, 7),
    ],
)
def test_capacities_are_rounded_exactly(
    factor: float, rows: int, top_k: int, experts: int, by_routes: int, by_rows: int
) -> None:
    """Of routes up; torchscale rounds rows up first, and then down."""
    assert expert_capacity(factor, rows * top_k, num_experts=experts) == by_routes
    assert row_capacity(factor, rows, top_k=top_k, num_experts=experts) == by_rows


@given(st.data())
def test_an_expert_serves_exactly_its_capacity_and_those_who_asked_first(
    data: st.DataObject,
) -> None:
    num_experts, capacity = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    expert = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=40))
    turn = data.draw(st.permutations(range(len(expert))))
    kept = has_place(torch.tensor(expert), torch.tensor(turn), capacity=capacity).tolist()
    for e in range(num_experts):
        in_order = [kept[route] for route in turn if expert[route] == e]
        assert sum(in_order) == min(capacity, len(in_order))
        assert in_order == sorted(in_order, reverse=True)


def test_training_and_evaluation_have_capacities_of_their_own() -> None:
    x_TD = rows(B, S, common=2.0).flatten(0, 1)
    for training, evaluation in ((0.5, None), (None, 0.5), (0.5, 2.0)):
        router = make_router(
            "token_choice", capacity_factor=training, evaluation_capacity_factor=evaluation
        )
        for factor, trains in ((training, True), (evaluation, False)):
            routing = router.train(trains)(x_TD, batch_size=B)
            assert routing.wanted_TK is not None
            wanted = torch.bincount(routing.wanted_TK.flatten(), minlength=E)
            limit = B * S if factor is None else math.ceil(factor * B * S / E)
            assert torch.equal(
                torch.bincount(routing.routes.expert_N, minlength=E), wanted.clamp_max(limit)
            )
            assert wanted.max() > math.ceil(0.5 * B * S / E)


# Randomness in training


def test_the_second_expert_is_asked_with_twice_its_share_and_takes_no_place_when_not() -> None:
    torch.manual_seed(0)
    x_TD = rows(1, 5).flatten(0, 1).repeat_interleave(4000, 0)
    options = {"top_k": 2, "renormalise": True, "second_expert": "random"}
    router = make_router("token_choice", **options)
    with torch.no_grad():
        router.weight *= 8
    routing = router(x_TD, batch_size=1)
    weights_TK = router.choose(x_TD).weights_TK
    torch.testing.assert_close(weights_TK.sum(1), torch.ones(20_000, dtype=torch.float64))
    asked_TK = torch.zeros(20_000 * 2, dtype=torch.bool)
    asked_TK[
        routing.routes.source_N * 2
        + (routing.routes.expert_N != routing.wanted_TK[routing.routes.source_N, 0])
    ] = True
    asked_TK = asked_TK.view(-1, 2)
    assert asked_TK[:, 0].all()
    rate = asked_TK[:, 1].double().view(5, 4000).mean(1)
    expected = (2 * weights_TK[::4000, 1]).clamp_max(1)
    assert expected.min() < 0.8
    torch.testing.assert_close(rate, expected, rtol=0, atol=0.03)
    assert len(router.eval()(x_TD, batch_size=1).routes.expert_N) == 40_000

    limited = make_router("token_choice", **options, capacity_factor=1.0, drop_order="token_major")
    limited.load_state_dict(router.state_dict())
    loads = []
    for each in (router.train(), limited):
        torch.manual_seed(3)
        loads.append(torch.bincount(each(x_TD, batch_size=1).routes.expert_N, minlength=E))
    wanted, served = loads
    assert torch.equal(served, wanted.clamp_max(5000))  # ⌈1 · 2 · 20000 / 8⌉
    assert wanted.max() > 5000


def test_jitter_scales_every_input_of_the_router_in_training_only() -> None:
    torch.manual_seed(0)
    router = make_router("token_choice", num_experts=2, jitter=0.25)
    x_TD = torch.eye(WIDTH, dtype=torch.float64)[:1].expand(4000, WIDTH)
    factor = router.choose(x_TD).logits_TE[:, 0] / router.weight[0, 0]
    assert 0.75 <= factor.min() < 0.76
    assert 1.24 < factor.max() <= 1.25
    assert factor.mean().item() == pytest.approx(1.0, rel=0.01)
    assert factor.var().item() == pytest.approx(0.25**2 / 3, rel=0.1)
    assert torch.equal(router.eval().choose(x_TD).logits_TE, x_TD @ router.weight.T)


@pytest.mark.parametrize("kind", ["token_choice", "deepseek", "cosine"])
def test_rows_of_low_precision_are_judged_in_float32(kind: str) -> None:
    router = make_router(kind, top_k=2).float()
    x_TD = rows(2, 3).flatten(0, 1).bfloat16()
    choice = router.choose(x_TD)
    assert choice.logits_TE.dtype == choice.weights_TK.dtype == torch.float32
    torch.testing.assert_close(choice.logits_TE, router.choose(x_TD.float()).logits_TE)


# Losses


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_published_coefficients_of_the_balancing_loss_convert(top_k: int) -> None:
    """E·Σ_e (n_e/T)·P_e over all choices, as one convention writes it, is top_k times ours."""
    router = make_router("token_choice", top_k=top_k)
    routing = router(rows(6, 4).flatten(0, 1).float(), batch_size=2)
    (loss,) = router.losses(router.statistics(routing, 2), RunningSum())
    assert (loss.name, loss.coefficient, loss.mean_over_layers) == ("load_balancing", 0.01, True)
    p_TE = routing.logits_THA[:, 0].softmax(-1)
    counts_E = torch.bincount(routing.wanted_TK.flatten(), minlength=E)
    every = E * (counts_E / len(p_TE) * p_TE.mean(0)).sum()
    torch.testing.assert_close(every, top_k * loss.value_B.mean())


def test_the_z_loss_is_the_mean_square_of_the_log_partition_function() -> None:
    router = make_router("token_choice", top_k=2, z_loss=0.001, balance=0.0)
    x_TD = rows(4, 5).flatten(0, 1)
    for scale in (1.0, 10.0):
        routing = router(scale * x_TD, batch_size=4)
        (loss,) = router.losses(router.statistics(routing, 4), RunningSum())
        assert (loss.name, loss.coefficient, loss.mean_over_layers) == ("router_z", 0.001, True)
        logits_TE = scale * x_TD @ router.weight.T
        by_hand = sum(
            math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits_TE.tolist()
        ) / len(x_TD)
        assert loss.value_B.mean().item() == pytest.approx(by_hand, rel=1e-9)


def test_statistics_count_what_was_asked_for_not_what_was_served() -> None:
    """A balancing loss that saw only the served rows would call a full expert balanced."""
    router = make_router("token_choice", capacity_factor=0.5)
    routing = router(rows(B, S, common=2.0).flatten(0, 1), batch_size=B)
    assert len(routing.routes.expert_N) < B * S
    assert choice_sums(routing, B)["load"].sum().item() == B * S


def test_the_loss_over_first_choices_is_the_published_formula() -> None:
    """E·Σ_e (n_e of first choices / T)·P_e (GShard, Switch, torchscale)."""
    x_TD = rows(B, S).flatten(0, 1)
    first, every = (
        make_router("token_choice", top_k=2, renormalise=True, balance_choices=choices)
        for choices in ("first", "all")
    )
    values = []
    for router in (first, every):
        [loss] = router.losses(router.statistics(router(x_TD, batch_size=B), B), RunningSum())
        values.append(loss.value_B.mean())
    p_TE = (x_TD @ first.weight.T).softmax(-1)
    counts_E = torch.bincount(p_TE.argmax(1), minlength=E)
    torch.testing.assert_close(values[0], E * (counts_E / (B * S) * p_TE.mean(0)).sum())
    assert not torch.allclose(values[1], values[0])
