"""Routers' choices for the tests of `kernels.router`: the steps that it replaces, and what recorded
runs of the official code asked of their routers.
"""

from dataclasses import dataclass

import pytest
import torch
from golden import load_golden
from torch import Tensor

from moebius.model.routers.sigmoid import SigmoidRouter

GATES = ("sigmoid", "softmax", "softmax_of_chosen")
RECORDED = (
    "moeut_tiny_g2",
    "moeut_tiny_noshare",
    "train_tiny_moeut_train",
    "train_tiny_moeut_preln",
    "train_tiny_sigma_moe",
)


def step_by_step(
    x_TD: Tensor, weight_ED: Tensor, *, top_k: int, gate: str, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, experts and gates by torch's operations, under autograd."""
    logits_THA = (x_TD @ weight_ED.T).unflatten(1, (heads, -1))
    chosen_THK, place_THK = logits_THA.topk(top_k, dim=-1)
    experts_THK = place_THK + torch.arange(heads)[:, None] * logits_THA.shape[2]
    if gate == "sigmoid":
        return logits_THA, experts_THK, torch.sigmoid(chosen_THK)
    if gate == "softmax":
        return logits_THA, experts_THK, logits_THA.softmax(-1).gather(-1, place_THK)
    return logits_THA, experts_THK, chosen_THK.softmax(-1)


@dataclass(frozen=True)
class Asked:
    """What one router was given in one depth step, and what it chose."""

    x_TD: Tensor
    weight_ED: Tensor
    top_k: int
    heads: int
    experts_THK: Tensor


def recorded_choices(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """All routers' choices in a recorded run, made in float32 by torch's operations."""
    golden, found = load_golden(name), list[Asked]()
    model = golden.model(backend="reference")
    choose = SigmoidRouter.choose_per_head

    def note(router: SigmoidRouter, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts_THK, weights_THK, logits_THA = choose(router, x_TD)
        given = (x_TD.detach(), router.weight.detach(), router.config.top_k, router.num_heads)
        found.append(Asked(*given, experts_THK))
        return experts_THK, weights_THK, logits_THA

    monkeypatch.setattr(SigmoidRouter, "choose_per_head", note)
    model(golden["tokens"][:, :-1])
    return found
