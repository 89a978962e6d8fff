"""Transition tuning: both halves against the routers that they are, the switch, and what
calibration does.
"""

from typing import Any

import pytest
import torch
from sparse_layer import make_layer, rows
from torch import Tensor

from moebius.model.balance import RunningSum
from moebius.model.routing import Mixture, Routes

TRANSITION = {"kind": "transition", "sequences_per_group": 4, "switch_step": 10}


def values_and_gradients(layer: Any, x_BSD: Tensor) -> list[Tensor]:
    fixed = rows(*x_BSD.shape[:2], seed=5)
    y_BSD = layer(x_BSD, x_BSD)[0]
    return [y_BSD, *torch.autograd.grad((y_BSD * fixed).sum(), [x_BSD, *layer.parameters()])]


@pytest.mark.parametrize(
    ("step", "capacity", "same_as"),
    [
        (9, None, {"kind": "mixture_of_tokens", "sequences_per_group": 4}),
        (10, None, {"kind": "token_choice", "top_k": 1}),
        (11, 1.25, {"kind": "token_choice", "top_k": 1, "capacity_factor": 1.25}),
        (10, None, {"kind": "token_choice", "top_k": 2}),
    ],
)
def test_each_half_is_the_router_that_it_names(
    step: int, capacity: float | None, same_as: dict[str, Any]
) -> None:
    top_k = same_as.get("top_k", 1)
    layer = make_layer(
        TRANSITION | {"capacity_factor": capacity, "top_k": top_k}, num_experts=4 * top_k
    )
    layer.router.before_step(step)
    x_BSD = rows(8, 3).requires_grad_()
    named = make_layer(same_as, num_experts=4 * top_k)
    ours, theirs = (values_and_gradients(each, x_BSD) for each in (layer, named))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_plan_and_the_losses_change_at_the_step() -> None:
    layer, x_BSD = make_layer(TRANSITION | {"balance": 0.01}, num_experts=4), rows(8, 3)
    for step in (0, 9, 10, 500, 3):  # and back: the number of steps done alone decides
        layer.router.before_step(step)
        routing = layer.router(x_BSD.flatten(0, 1), batch_size=8)
        losses = layer.router.losses(layer.router.statistics(routing, 8), RunningSum())
        assert isinstance(routing.plan, Mixture if step < 10 else Routes)
        assert [loss.name for loss in losses] == ([] if step < 10 else ["load_balancing"])
        assert layer.router.group_context_size == (3 if step < 10 else 0)
    layer.router.before_step(10)
    alone = layer(x_BSD[:1], x_BSD[:1])[0]
    torch.testing.assert_close(
        alone, layer(x_BSD, x_BSD)[0][:1]
    )  # a sequence by itself, and the same as in a batch


def test_calibration_subtracts_the_mean_logits_of_the_last_mixing_step() -> None:
    """An offset per expert is invisible to mixing, decides the load of a Switch, and is gone once
    calibrated.
    """
    layer = make_layer(TRANSITION | {"calibrate": True}, spread=0.3, num_experts=4)
    router, x_BSD = layer.router, rows(8, 30)
    x_BSD[..., 0] = 1.0
    with torch.no_grad():
        mixed = layer(x_BSD, x_BSD)[0]
        router.weight[:, 0] += torch.tensor([9.0, -3.0, 0.0, -8.0], dtype=torch.float64)
        torch.testing.assert_close(layer(x_BSD, x_BSD)[0], mixed, rtol=1e-9, atol=1e-12)
    logits_TE = x_BSD.flatten(0, 1) @ router.weight.T
    for step in (8, 9):
        router.before_step(step)
        halves = [
            router(x.flatten(0, 1), batch_size=4)
            for x in (x_BSD[:4] * (step - 8), x_BSD[4:] * (step - 8))
        ]
        sums = [router.statistics(half, 4) for half in halves]  # two micro-batches
        assert router.carried == ("logits", "rows")
        totals = {
            name: torch.stack([part[name].sum(0) for part in sums]).sum(0).double()
            for name in router.carried
        }
        router.after_step(step, totals)
    torch.testing.assert_close(router.mean_logit, logits_TE.mean(0), rtol=1e-6, atol=1e-6)
    assert "router.mean_logit" in layer.state_dict()  # so it is in every checkpoint
    router.before_step(10)
    assert router.carried == ()
    calibrated = router.choose(x_BSD.flatten(0, 1))
    torch.testing.assert_close(
        calibrated.logits_TE, logits_TE - logits_TE.mean(0), rtol=1e-5, atol=1e-5
    )
    load_E = torch.bincount(calibrated.experts_TK[:, 0], minlength=6)
    router.mean_logit.zero_()
    raw_E = torch.bincount(router.choose(x_BSD.flatten(0, 1)).experts_TK[:, 0], minlength=6)
    assert load_E.max() < 0.5 * 240
    assert raw_E.max() > 0.9 * 240
