"""How much of a router learns from its experts: "gradient reaches every logit" is true of any
softmax, and says nothing.
"""

from typing import Any

import pytest
import torch
from sparse_layer import make_layer, rows
from torch import Tensor

TRANSITION = {"kind": "transition", "sequences_per_group": 4, "switch_step": 10}


@pytest.mark.parametrize(
    ("router", "share"),
    [
        ({"kind": "sigmoid", "top_k": 2}, 2 / 6),
        ({"kind": "token_choice", "top_k": 1}, 1 / 6),
        ({"kind": "token_choice", "top_k": 2}, 2 / 6),
        ({"kind": "deepseek", "top_k": 2}, 2 / 6),
        ({"kind": "cosine", "top_k": 2}, 2 / 6),
        ({"kind": "cosine", "top_k": 2, "gate": "sigmoid"}, 2 / 6),
        ({"kind": "cosine", "top_k": 2, "behaviour": "torchscale"}, 2 / 6),
        ({"kind": "expert_choice", "sequences_per_group": 4, "mean_experts": 1.5}, 1 / 4),
        ({"kind": "soft_moe", "slots_per_expert": 1}, 1),
        ({"kind": "mixture_of_tokens", "sequences_per_group": 4}, 1),
    ],
)
def test_a_row_learns_about_the_experts_that_serve_it(router: dict[str, Any], share: float) -> None:
    """K/E of the logits for a choice of K, all of them for a mixture."""
    layer = make_layer(router).eval()
    assert informed_gradient_fraction(layer, rows(8, 3)) == pytest.approx(share)


@pytest.mark.parametrize("kind", ["token_choice", "deepseek", "cosine"])
def test_rows_of_low_precision_are_judged_in_float32(kind: str) -> None:
    router = make_layer({"kind": kind, "top_k": 2}).router.float()
    x_TD = rows(2, 3).flatten(0, 1).bfloat16()
    choice = router.choose(x_TD)
    assert choice.logits_TE.dtype == choice.weights_TK.dtype == torch.float32
    torch.testing.assert_close(choice.logits_TE, router.choose(x_TD.float()).logits_TE)


def informed_gradient_fraction(feed_forward: Any, x_BSD: Tensor) -> float:
    """Share of (row, expert) logits whose gradient changes when that expert's weights change.

    K/E for softmax top-K without drops, 1 for soft mixtures. Use float64 and evaluation mode:
    nothing may be drawn at random.
    """
    generator = torch.Generator().manual_seed(11)
    direction_BSD = torch.randn(x_BSD.shape, generator=generator, dtype=x_BSD.dtype)
    before = _logit_gradients(feed_forward, x_BSD, direction_BSD)
    tolerance = 1e-12 * before.abs().max()
    experts, changed = feed_forward.sparse.experts, 0
    for expert in range(before.shape[1]):
        kept = experts.w_down.detach()[expert].clone()
        with torch.no_grad():
            experts.w_down[expert] += torch.randn(kept.shape, generator=generator, dtype=kept.dtype)
        after = _logit_gradients(feed_forward, x_BSD, direction_BSD)
        with torch.no_grad():
            experts.w_down[expert] = kept
        changed += int(((after - before)[:, expert].abs() > tolerance).sum())
    return changed / before.numel()


def _logit_gradients(feed_forward: Any, x_BSD: Tensor, direction_BSD: Tensor) -> Tensor:
    """(T, E): d⟨answers, direction⟩ / d logits."""
    y_BSD, routing = feed_forward(x_BSD, x_BSD)
    logits_THA = routing.logits_THA
    # The reported logits are a view of those that the gate read; only the latter stand between the
    # weights and the answers.
    read = logits_THA if logits_THA._base is None else logits_THA._base
    (gradient,) = torch.autograd.grad((y_BSD * direction_BSD).sum(), read)
    gradient = gradient.contiguous().as_strided(
        logits_THA.shape, logits_THA.stride(), logits_THA.storage_offset()
    )
    return gradient.flatten(1)
