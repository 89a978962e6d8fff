"""Multi-Head MoE: what is split comes together again in the same order."""

import pytest
import torch
from sparse_layer import make_layer, rows

from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import draw
from moebius.model.transformer import Transformer

ROUTER = {"kind": "token_choice", "top_k": 2, "renormalise": True}


def test_the_layer_is_its_formula() -> None:
    """arXiv 2404.15045, token by token and head by head, without its residual, as released."""
    heads, width = 3, 4
    layer = make_layer(ROUTER, sub_tokens=heads, expert_bias=True)
    x_BSD = rows(2, 5)
    assert layer.view is not None
    head, merge, experts = layer.view.head, layer.view.merge, layer.sparse.experts
    expected = []
    for x_D in x_BSD.flatten(0, 1):
        long_D = head.weight @ x_D + head.bias
        parts = []
        for h in range(heads):
            sub_C = long_D[h * width : (h + 1) * width]
            p_E = (layer.router.weight @ sub_C).softmax(0)
            best, second = p_E.argsort(descending=True)[:2].tolist()
            out_C = torch.zeros_like(sub_C)
            for e in (best, second):
                hidden_F = (sub_C @ experts.w_up[e] + experts.b_up[e]).relu()
                out_C = out_C + p_E[e] / (p_E[best] + p_E[second]) * (
                    hidden_F @ experts.w_down[e] + experts.b_down[e]
                )
            parts.append(out_C)
        expected.append(merge.weight @ torch.cat(parts) + merge.bias)
    y_BSD, _ = layer(x_BSD, x_BSD)
    torch.testing.assert_close(y_BSD.flatten(0, 1), torch.stack(expected), rtol=0, atol=1e-12)


def test_balance_is_that_of_the_sub_tokens() -> None:
    layer = make_layer(ROUTER, sub_tokens=3)
    x_BSD = rows(2, 5)
    _, routing = layer(x_BSD, x_BSD)
    sums = layer.router.statistics(routing, 2)
    assert sums["rows"].tolist() == [15.0, 15.0]
    assert sums["load"].sum(1).tolist() == [30, 30]
    first = layer.router.statistics(layer(x_BSD[:1], x_BSD[:1])[1], 1)
    torch.testing.assert_close(first["probability"], sums["probability"][:1])


def test_head_and_merge_start_as_published() -> None:
    """Xavier uniform with gains 1/√2 and 1; the head's bias keeps the framework's default, the
    merge's is 0.
    """
    config = ModelConfig(
        d_model=96, num_layers=1, layers_per_group=1, feed_forward=ExpertsConfig(sub_tokens=4)
    )
    with torch.device("meta"):
        model = Transformer(config)
    values = {
        name: draw(name, parameter, 0)
        for name, parameter in model.named_parameters()
        if ".view." in name
    }
    bounds = {
        "head.weight": (6 / 192 / 2) ** 0.5,
        "merge.weight": (6 / 192) ** 0.5,
        "head.bias": 96**-0.5,
    }
    for name, bound in bounds.items():
        value = values.pop(f"group.0.feed_forward.view.{name}")
        assert 0.95 * bound < value.abs().max() <= bound
        assert value.std() == pytest.approx(bound / 3**0.5, rel=0.2 if "bias" in name else 0.02)
    assert [value.abs().max() for value in values.values()] == [0]
