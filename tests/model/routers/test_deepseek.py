"""DeepSeek's gate: scores, bias, groups and the sequence-wise loss against the equations."""

from typing import Any

import pytest
import torch
from parts import layers
from routing_oracle import (
    Gates,
    all_served,
    assert_same,
    make_layer,
    make_router,
    rows,
    slow_layer,
)
from sparse_layer import make_model
from torch import Tensor

from moebius.model.balance import RunningSum, add_sums

V2 = {"scores": "softmax", "group_score": "max", "renormalise": False, "bias_rate": 0.0}


def spread_bias(router: Any, seed: int = 3) -> None:
    router.selection_bias.copy_(
        0.2 * torch.randn(router.num_experts, generator=torch.Generator().manual_seed(seed))
    )


def slow_gates(layer: Any, x_BSD: Tensor) -> list[Gates]:
    """Row by row: the scores, the best groups by biased scores, the best experts of these, their
    unbiased scores as weights.
    """
    config, found = layer.router.config, []
    for x_D in x_BSD.flatten(0, 1):
        z = [x_D @ w for w in layer.router.weight]
        total = sum(value.exp() for value in z)
        s = [
            1 / (1 + (-value).exp()) if config.scores == "sigmoid" else value.exp() / total
            for value in z
        ]
        biased = [
            value.item() + b
            for value, b in zip(s, layer.router.selection_bias.tolist(), strict=True)
        ]
        members = len(s) // config.num_groups
        counted = 2 if config.group_score == "top2" else 1
        score = [
            sum(sorted(biased[g * members : (g + 1) * members], reverse=True)[:counted])
            for g in range(config.num_groups)
        ]
        groups = sorted(range(config.num_groups), key=lambda g: -score[g])[: config.kept_groups]
        allowed = [e for e in range(len(s)) if e // members in groups]
        best = sorted(allowed, key=lambda e: -biased[e])[: config.top_k]
        share = sum(s[e] for e in best) if config.renormalise else 1.0
        found.append([(e, config.route_scale * s[e] / share) for e in best])
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 4, "num_groups": 4, "kept_groups": 2, "route_scale": 2.5},
        {"top_k": 2, "num_groups": 4, "kept_groups": 1, "group_score": "max"},
        {"top_k": 3, "num_groups": 1, "kept_groups": 1},
        {"top_k": 1, "renormalise": False},
        V2 | {"top_k": 3, "num_groups": 8, "kept_groups": 3, "route_scale": 16.0},
    ],
)
def test_the_gate_equals_a_loop_over_rows(fields: dict[str, Any]) -> None:
    layer = make_layer({"kind": "deepseek"} | fields, num_experts=16, skew=0.5)
    if fields.get("bias_rate") != 0.0:
        spread_bias(layer.router)
    x_BSD = rows(3, 5, common=0.5)
    assert_same(layer, x_BSD, lambda x: slow_layer(layer, x, all_served(slow_gates(layer, x))))


def test_weights_stay_numbers_where_all_scores_underflow() -> None:
    router = make_router("deepseek", num_experts=16, top_k=3).float()
    with torch.no_grad():
        router.weight.fill_(-1.0)
    choice = router.choose(torch.full((2, 16), 50.0))
    torch.testing.assert_close(choice.weights_TK, torch.full((2, 3), 1 / 3))


def test_one_update_follows_the_sign_of_the_missing_load_until_it_is_told_to_stop() -> None:
    router = make_router("deepseek", num_experts=4, top_k=2, bias_rate=0.125, bias_until_step=2)
    for step in range(4):
        router.after_step(step, {"load": torch.tensor([5.0, 1.0, 3.0, 3.0], dtype=torch.float64)})
    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_the_model_hands_the_choices_of_all_repeats_to_the_bias() -> None:
    router = {"kind": "deepseek", "top_k": 2, "num_groups": 4, "kept_groups": 2, "bias_rate": 0.5}
    model = make_model(router, {"num_layers": 4}, num_experts=8)
    output = model(torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(0)))
    assert set(output.carried) == {"0/feed_forward/load", "1/feed_forward/load"}
    served_E = output.loads["feed_forward"].load_LN[[0, 2]].sum(0)
    assert torch.equal(output.carried["0/feed_forward/load"], served_E)
    assert served_E.sum().item() == 2 * 3 * 7 * 2
    model.after_step(0, {name: value.double() for name, value in output.carried.items()})
    bias = layers(model)[0].feed_forward.router.selection_bias
    assert torch.equal(bias, 0.5 * (served_E.double().mean() - served_E).sign().to(bias.dtype))
    assert "group.0.feed_forward.router.selection_bias" in model.state_dict()


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_the_sequence_wise_loss_counts_unbiased_preferences(scores: str) -> None:
    """α·Σ_e f_e P_e, f_e = E/(K·S)·#{t: e among the K largest s_t}, P_e = mean s_te / Σ_j s_tj; per
    sequence, over repeats.
    """
    router = make_router(
        "deepseek", num_experts=16, top_k=3, scores=scores, num_groups=4, kept_groups=2
    )
    spread_bias(router)
    repeats = [rows(3, 5, common=1.0, seed=seed) for seed in (0, 1)]
    sums = add_sums([router.statistics(router(x.flatten(0, 1), batch_size=3), 3) for x in repeats])
    (loss,) = router.losses(sums, RunningSum())
    assert (loss.name, loss.coefficient, loss.mean_over_layers) == ("load_balancing", 1e-4, True)
    expected = []
    for b in range(3):
        z = torch.cat([x[b] for x in repeats]) @ router.weight.T
        s = torch.sigmoid(z) if scores == "sigmoid" else z.exp() / z.exp().sum(1, keepdim=True)
        f = torch.zeros(16, dtype=torch.float64)
        for row in s.tolist():
            for e in sorted(range(16), key=lambda e: -row[e])[:3]:
                f[e] += 16 / (3 * len(s))
        expected.append((f * (s / s.sum(1, keepdim=True)).mean(0)).sum())
    torch.testing.assert_close(loss.value_B, torch.stack(expected))
    ours, theirs = (
        torch.autograd.grad(x.sum(), router.weight, retain_graph=True)[0]
        for x in (loss.value_B, torch.stack(expected))
    )
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(
        sums["preferred"], sums["load"]
    )  # the bias and the groups chose otherwise
