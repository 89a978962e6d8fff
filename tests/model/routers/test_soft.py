"""Soft MoE: values and gradients against a loop, and where it starts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parts import layers
from routing_oracle import assert_same
from sparse_layer import expert, make_layer, make_model, rows
from torch import Tensor

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


def test_it_starts_with_unit_scale_and_lecun_slots() -> None:
    router = layers(make_model(SOFT, {"d_model": 256}, num_experts=32))[0].feed_forward.router
    assert router.scale.item() == 1.0
    assert router.weight.shape == (64, 256)
    assert router.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
