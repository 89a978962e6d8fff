"""Cases for tests of `kernels.fused.router`: the steps that it replaces, and router inputs of recorded
runs of the official code.
"""

from dataclasses import dataclass

import pytest
import torch
from golden import load_golden
from torch import Tensor

from moebius.kernels.fused.router import MOST_EXPERTS, Routed
from moebius.model.routers.sigmoid import SigmoidRouter

GATES = ("sigmoid", "softmax", "softmax_of_chosen")
RECORDED = (
    "moeut_tiny_g2",
    "moeut_tiny_noshare",
    "train_tiny_moeut_train",
    "train_tiny_moeut_preln",
    "train_tiny_sigma_moe",
)


# tokens, width, heads, experts of a head, top_k: of a GPU's tests
ROUTERS = [
    (20_000, 1024, 1, 387, 16),
    (3000, 412, 1, 155, 12),
    (17_000, 412, 10, 5, 2),
    (100, 64, 1, MOST_EXPERTS, 24),
    (1, 8, 1, 4, 1),
    (0, 8, 1, 4, 1),
]


def gates_of(logits_THA: Tensor, chosen_THK: Tensor, gate: str) -> Tensor:
    """The gates of chosen logits, by torch."""
    if gate == "sigmoid":
        return chosen_THK.sigmoid()
    if gate == "softmax":
        return (chosen_THK - logits_THA.logsumexp(-1, keepdim=True)).exp()
    return chosen_THK.softmax(-1)


def step_by_step(
    x_TD: Tensor, weight_ED: Tensor, *, top_k: int, gate: str, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, experts and gates by torch's operations, under autograd."""
    logits_THA = (x_TD @ weight_ED.T).unflatten(1, (heads, -1))
    chosen_THK, place_THK = logits_THA.topk(top_k, dim=-1)
    experts_THK = place_THK + torch.arange(heads)[:, None] * logits_THA.shape[2]
    return logits_THA, experts_THK, gates_of(logits_THA, chosen_THK, gate)


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

    def note(router: SigmoidRouter, x_TD: Tensor) -> Routed:
        chosen = choose(router, x_TD)
        given = (x_TD.detach(), router.weight.detach(), router.config.top_k, router.num_heads)
        found.append(Asked(*given, chosen.experts_THK))
        return chosen

    monkeypatch.setattr(SigmoidRouter, "choose_per_head", note)
    model(golden["tokens"][:, :-1])
    return found
