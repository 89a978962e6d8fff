"""X-MoE's cosine router, as in the paper and as released: scores and gates against the formulas."""

import math
from typing import Any

import pytest
import torch
from routing_oracle import (
    Gates,
    all_served,
    assert_same,
    make_layer,
    make_router,
    rows,
    slow_layer,
)
from torch import Tensor

from moebius.model.balance import RunningSum
from moebius.model.initialise import initialise, normal
from moebius.model.routers.cosine import CosineConfig, CosineRouter, finite


def slow_scores(router: Any, x_D: Tensor) -> list[Tensor]:
    """Of one row: cosines, or the released code's product of a row as it is and an expert of unit
    norm.
    """
    z = torch.stack([(w * x_D).sum() for w in router.projection])
    length = (z * z).sum().sqrt() if router.config.behaviour == "paper" else 1.0
    return [(z * e).sum() / length / (e * e).sum().sqrt() for e in router.expert_embedding]


def slow_gates(layer: Any, x_BSD: Tensor) -> list[Gates]:
    router, found = layer.router, []
    for x_D in x_BSD.flatten(0, 1):
        s = slow_scores(router, x_D)
        if router.log_temperature is not None:
            s = [value / router.log_temperature.exp()[0] for value in s]
        best = sorted(range(len(s)), key=lambda e: -s[e].item())[: router.config.top_k]
        total = sum(value.exp() for value in s)
        gates = [
            1 / (1 + (-s[e]).exp()) if router.config.gate == "sigmoid" else s[e].exp() / total
            for e in best
        ]
        if router.config.behaviour == "torchscale" and len(best) > 1:
            gates = [gate / sum(gates) for gate in gates]
        found.append(list(zip(best, gates, strict=True)))
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gate": "sigmoid"},
        {"top_k": 2, "d_routing": 6, "initial_temperature": 0.5},
        {"behaviour": "torchscale"},
        {"behaviour": "torchscale", "top_k": 2},
    ],
)
def test_the_gate_equals_a_loop_over_rows(fields: dict[str, Any]) -> None:
    """Evaluation mode: in training the released code's second expert is asked at random."""
    layer = make_layer({"kind": "cosine"} | fields).eval()
    assert_same(layer, rows(3, 5), lambda x: slow_layer(layer, x, all_served(slow_gates(layer, x))))


def test_the_temperature_starts_where_the_paper_fixes_the_loss_and_learns() -> None:
    for gate, temperature in (("softmax", 0.3), ("sigmoid", 0.07)):
        router = make_router("cosine", gate=gate)
        assert router.log_temperature is not None
        assert router.log_temperature.exp().item() == pytest.approx(temperature)
        choice = router.choose(rows(2, 3).flatten(0, 1))
        (gradient,) = torch.autograd.grad(choice.weights_TK.sum(), router.log_temperature)
        assert gradient.abs() > 1e-3
    assert make_router("cosine", initial_temperature=2.0).log_temperature.item() == pytest.approx(
        math.log(2)
    )


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.3), ({"gate": "sigmoid"}, 0.07), ({"balance_temperature": 1.5}, 1.5)],
)
def test_the_balancing_loss_has_a_fixed_temperature(
    fields: dict[str, Any], temperature: float
) -> None:
    """E/T·Σ_e n_e·Σ_t softmax(s_t/τ₀)_e, which the learned temperature does not enter."""
    router, x_TD = make_router("cosine", **fields), rows(4, 5).flatten(0, 1)
    with torch.no_grad():
        router.log_temperature += 1.0
    routing = router(x_TD, batch_size=4)
    (loss,) = router.losses(router.statistics(routing, 4), RunningSum())
    s_TE = torch.stack([torch.stack(slow_scores(router, x_D)) for x_D in x_TD])
    n_E = torch.bincount(s_TE.argmax(1), minlength=8)
    expected = 8 / 20 * (n_E * (s_TE / temperature).softmax(1).mean(0)).sum()
    torch.testing.assert_close(loss.value_B.mean(), expected)
    assert torch.autograd.grad(expected, router.projection, retain_graph=True)[0].abs().max() > 0
    assert torch.autograd.grad(loss.value_B.mean(), router.log_temperature, allow_unused=True) == (
        None,
    )


# The released code's behaviour


def test_released_sizes_and_starting_values() -> None:
    for num_experts in (8, 64):
        router = CosineRouter(
            CosineConfig(behaviour="torchscale"), 24, num_experts, init=normal(1.0)
        )
        initialise(router, 0)
        e = router.expert_embedding.detach()
        assert e.shape == (num_experts, 16)
        gram = e @ e.T if num_experts < 16 else e.T @ e
        torch.testing.assert_close(gram, 0.32**2 * torch.eye(len(gram)), rtol=0, atol=1e-5)
        assert router.projection.shape == (16, 24)
        assert 0.9 * 24**-0.5 < router.projection.abs().max() <= 24**-0.5
        assert set(dict(router.named_parameters())) == {"projection", "expert_embedding"}
    assert make_router("cosine", num_experts=10).expert_embedding.shape == (10, 5)


def test_expert_embeddings_are_rescaled_once_a_step_and_a_second_time_changes_no_bit() -> None:
    router = make_router("cosine", num_experts=32, behaviour="torchscale").float()
    for seed in range(20):
        with torch.no_grad():
            router.expert_embedding += 0.3 * torch.randn(
                32, 16, generator=torch.Generator().manual_seed(seed)
            )
        direction = router.expert_embedding.detach() / router.expert_embedding.detach().norm(
            dim=1, keepdim=True
        )
        router.before_step(seed)
        once = router.expert_embedding.detach().clone()
        torch.testing.assert_close(once, 1.5 * direction)
        router.before_step(seed)
        assert torch.equal(once, router.expert_embedding)


def test_scores_that_are_no_numbers_become_the_smallest() -> None:
    scores = torch.tensor([[1.0, math.nan], [-3.0, math.inf], [-math.inf, 2.0]])
    assert finite(scores).tolist() == [[1.0, -3.0], [-3.0, -3.0], [-3.0, 2.0]]
    router = make_router("cosine", behaviour="torchscale")
    x_TD = rows(1, 4).flatten(0, 1)
    clean = router.choose(x_TD).logits_TE
    logits = router.choose(
        torch.cat((x_TD, torch.full((1, 16), math.inf, dtype=torch.float64)))
    ).logits_TE
    torch.testing.assert_close(logits, torch.cat((clean, clean.min().expand(1, 8))))


def test_released_gates_force_a_random_second_expert_in_training() -> None:
    torch.manual_seed(0)
    router, x_TD = make_router("cosine", behaviour="torchscale", top_k=2), rows(8, 64).flatten(0, 1)
    routes = router(x_TD, batch_size=8).routes
    second_T = router.choose(x_TD).weights_TK[:, 1]
    asked = len(routes.expert_N) - len(x_TD)
    assert asked == pytest.approx((2 * second_T).clamp_max(1).sum().item(), rel=0.1)
    assert asked < 0.95 * len(x_TD)
    assert len(router.eval()(x_TD, batch_size=8).routes.expert_N) == 2 * len(x_TD)
    assert not router.config.promises.dropless
    assert make_router("cosine", top_k=2).config.promises.dropless
