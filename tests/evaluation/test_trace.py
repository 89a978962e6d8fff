"""Traces record the routes and states of the model's own layers, and an evaluation's loss."""

import pytest
import torch
from family import make_uneven, tiny_model
from torch import nn

from moebius.evaluation.restore import Restored
from moebius.evaluation.trace import logits, rows_of, trace
from moebius.train.config.run_config import Config
from moebius.train.record.route_tap import tap

TOKENS = torch.randint(9, (32, 7), generator=torch.Generator().manual_seed(1))
MODELS = ["moeut", "moeut_aabb", "mh_moe", "switch", "expert_choice", "mixture_of_tokens", "sut"]


def restored(name: str) -> Restored:
    model = make_uneven(tiny_model(name)).eval()
    return Restored(model, Config.model_construct(model=model.config, train=Config().train), 7)


@pytest.mark.parametrize("name", MODELS)
def test_routes_are_those_of_the_layers_by_token(name: str) -> None:
    asked = restored(name)
    found = trace(asked, rows_of(TOKENS))
    with torch.no_grad(), tap(asked.model) as calls:
        asked.model(TOKENS[:, :-1])
    assert len(found.routes) == len(calls) > 0
    for own, call in zip(found.routes, calls, strict=True):
        assert (own.layer, own.depth, own.kind) == (call.id.layer, call.id.depth, call.id.kind)
        assert own.num_experts == call.routes.num_experts
        if own.chosen_by == "nobody":
            assert name == "mixture_of_tokens"
            assert not len(own.token_N)
            continue
        rows_per_token = call.num_rows // TOKENS[:, 1:].numel()
        expected = [row // rows_per_token for row in call.routes.source_N.tolist()]
        assert own.token_N.tolist() == expected
        assert own.expert_N.tolist() == call.routes.expert_N.tolist()
        assert torch.equal(own.weight_N, call.routes.weight_N.float())
        is_by_experts = name == "expert_choice" and own.kind == "feed_forward"
        assert (own.chosen_by == "experts") == is_by_experts


def test_heads_choose_among_their_own_experts() -> None:
    found = trace(restored("moeut"), rows_of(TOKENS))
    attention = restored("moeut").model.config.attention
    heads = {routes.kind: routes.num_heads for routes in found.routes}
    assert heads == {"value": attention.num_heads, "output": attention.num_heads, "feed_forward": 1}


@torch.no_grad()
@pytest.mark.parametrize("name", ["moeut", "dense", "sut"])
def test_states_are_those_between_the_depth_steps(name: str) -> None:
    asked = restored(name)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(_: nn.Module, inputs: tuple, output: tuple) -> None:
        seen.append((inputs[0], output[0]))

    hooks = [layer.register_forward_hook(look) for layer in asked.model.group]
    found = trace(asked, rows_of(TOKENS))
    for hook in hooks:
        hook.remove()
    assert len(found.hidden_LBSD) == asked.model.config.num_layers + 1
    for depth, (before, after) in enumerate(seen):
        assert torch.equal(found.hidden_LBSD[depth], before)
        assert torch.equal(found.hidden_LBSD[depth + 1], after)
    halts = not bool(found.active_LBS.all())
    assert halts == (name == "sut")


def test_the_loss_is_the_mean_of_the_targets_that_count() -> None:
    asked = restored("moeut")
    found = trace(asked, rows_of(TOKENS))
    nats = logits(asked, TOKENS[:, :-1]).log_softmax(-1).gather(-1, TOKENS[:, 1:, None])
    assert found.num_targets == TOKENS[:, 1:].numel()
    assert found.loss_sum == pytest.approx(-float(nats.double().sum()), rel=1e-5)
