"""Expert choice: values and gradients against a loop, equal loads whatever the logits, and why it
must be grouped by position.
"""

from typing import Any

import pytest
import torch
from routing_oracle import assert_same
from sparse_layer import make_layer, rows
from torch import Tensor

from moebius.kernels.reference import activate
from moebius.model.routers.expert_choice import ExpertChoiceConfig

GROUPED = {
    "kind": "expert_choice",
    "sequences_per_group": 4,
    "mean_experts": 1.5,
}  # C = 1.5/6 · 4 = 1
FLAT = {"kind": "expert_choice", "scope": "flat", "mean_experts": 1.0}


def loop(layer: Any, x_BSD: Tensor, groups: list[list[tuple[int, int]]], taken: int) -> Tensor:
    """One group and one expert at a time: sort the members by probability, take the first ones."""
    out, bank = torch.zeros_like(x_BSD), layer.sparse.experts
    for group in groups:
        p = torch.stack([(layer.router.weight @ x_BSD[place]).softmax(0) for place in group])
        for e in range(p.shape[1]):
            for m in sorted(range(len(group)), key=lambda m: -p[m, e].item())[:taken]:
                place = group[m]
                answer = activate(x_BSD[place] @ bank.w_up[e], bank.activation) @ bank.w_down[e]
                out[place] = out[place] + p[m, e] * answer
    return out


@pytest.mark.parametrize(
    ("router", "groups", "taken"),
    [
        (GROUPED, [[(4 * j + m, s) for m in range(4)] for s in range(3) for j in range(2)], 1),
        (FLAT, [[(b, s) for b in range(8) for s in range(3)]], 4),
    ],
    ids=["position", "flat"],
)
def test_values_and_gradients_are_those_of_a_loop(
    router: dict[str, Any], groups: list, taken: int
) -> None:
    layer = make_layer(router)
    x_BSD = rows(8, 3)
    assert_same(layer, x_BSD, lambda x_BSD: loop(layer, x_BSD, groups, taken))
    y_BSD, routing = layer(x_BSD, x_BSD)
    served = torch.bincount(routing.routes.target_N, minlength=24)
    assert served.max() > 1  # tokens are taken by several experts, and some by none
    assert served.min() == 0
    assert (y_BSD.flatten(0, 1)[served == 0] == 0).all()


@pytest.mark.parametrize("logits", ["opinionated", "all equal", "one favourite"])
@pytest.mark.parametrize("router", [GROUPED, FLAT])
def test_every_expert_takes_equally_many_of_every_group(
    router: dict[str, Any], logits: str
) -> None:
    layer, x_BSD = make_layer(router), rows(8, 3)
    with torch.no_grad():
        if logits != "opinionated":
            layer.router.weight.zero_()
        if logits == "one favourite":
            layer.router.weight[2] = 100
    routing = layer.router(x_BSD.flatten(0, 1), batch_size=8)
    routes = routing.routes
    if router is GROUPED:
        group_N = routes.source_N % 3 + 3 * (routes.source_N // 12)  # (position, half of the batch)
        assert (torch.bincount(routes.expert_N * 6 + group_N, minlength=36) == 1).all()
    else:
        assert (torch.bincount(routes.expert_N, minlength=6) == 4).all()
    assert (routes.expert_N == torch.arange(len(routes.expert_N)) // routes.per_expert).all()
    assert routes.source_N.equal(routes.target_N)
    pairs = routes.source_N * 6 + routes.expert_N
    assert len(pairs.unique()) == len(pairs)  # no token twice in one expert


def test_an_answer_can_be_normalised() -> None:
    layer, x_BSD = make_layer(GROUPED, output_norm=True), rows(8, 3)
    y_BSD, routing = layer(x_BSD, x_BSD)
    raw_BSD = layer.expert_outputs(x_BSD.flatten(0, 1), routing.plan).view_as(x_BSD)
    centred = raw_BSD - raw_BSD.mean(-1, keepdim=True)
    torch.testing.assert_close(
        y_BSD, centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    )


def test_half_a_row_is_one_and_cost_follows_from_what_is_taken() -> None:
    for group, mean, taken in ((16, 1.0, 1), (32, 1.0, 1), (48, 1.0, 2), (32, 5.4, 5)):
        config = ExpertChoiceConfig(sequences_per_group=group, mean_experts=mean)
        config.check(32)
        assert config.taken(32, group) == taken
        assert config.active_experts(32, 128) == taken * 32 / group
