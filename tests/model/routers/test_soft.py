"""Soft MoE: values and gradients against a loop, its degenerate case, and that it looks ahead
within a sequence only.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parts import layers
from routing_oracle import assert_same
from sparse_layer import expert, make_layer, make_model, rows
from torch import Tensor

from moebius.model.routing import Mixture

SOFT = {"kind": "soft_moe", "slots_per_expert": 2}


def loop(layer: Any, x_BSD: Tensor) -> Tensor:
    """One sequence, one slot and one token at a time."""
    slots, out = layer.router.weight, []
    for x_SD in x_BSD:
        logits = torch.stack(
            [
                torch.stack(
                    [layer.router.scale[0] * F.cosine_similarity(x, slot, dim=0) for slot in slots]
                )
                for x in x_SD
            ]
        )
        answers = []
        for n in range(len(slots)):
            dispatch = logits[:, n].softmax(0)
            answers.append(
                expert(
                    layer,
                    n // 2,
                    torch.stack([w * x for w, x in zip(dispatch, x_SD, strict=True)]).sum(0),
                )
            )
        for token in logits:
            combine = token.softmax(0)
            out.append(
                torch.stack([w * answer for w, answer in zip(combine, answers, strict=True)]).sum(0)
            )
    return torch.stack(out).view_as(x_BSD)


@pytest.mark.parametrize(
    "length", [5, 20]
)  # fewer tokens than slots (12), and more: the scale is on the smaller side
def test_values_and_gradients_are_those_of_a_loop(length: int) -> None:
    layer = make_layer(SOFT)
    with torch.no_grad():
        layer.router.scale.fill_(3.0)
    assert_same(layer, rows(2, length), lambda x_BSD: loop(layer, x_BSD))


def test_a_slot_for_every_token_makes_it_one_hot() -> None:
    """P = 1, E = tokens, Φ column i = token i, a huge scale: output i is expert i's answer to token
    i.
    """
    layer = make_layer({"kind": "soft_moe", "slots_per_expert": 1})
    x_BSD = torch.randn(1, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.router.weight.copy_(7 * x_BSD[0])  # only the direction counts
        layer.router.scale.fill_(1e6)
        y_BSD, routing = layer(x_BSD, x_BSD)
        plan = routing.plan
        assert isinstance(plan, Mixture)
        for weights in (plan.merge_GMP, plan.emit_GMP):
            torch.testing.assert_close(weights[0], torch.eye(6, dtype=torch.float64))
        expected = torch.stack([expert(layer, i, x_BSD[0, i]) for i in range(6)])
    torch.testing.assert_close(y_BSD[0], expected)


def test_it_starts_with_unit_scale_and_lecun_slots() -> None:
    router = layers(make_model(SOFT, {"d_model": 256}, num_experts=32))[0].feed_forward.router
    assert router.scale.item() == 1.0
    assert router.weight.shape == (64, 256)
    assert router.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
