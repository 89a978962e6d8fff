"""Multi-Head MoE: what is split comes together again in the same order."""

from typing import Any

import pytest
import torch
from sparse_layer import make_layer, rows
from torch import Tensor

from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import draw
from moebius.model.transformer import Transformer

# Gates that add up to 1, so that identical answers add up to that answer.
NORMALISED: dict[str, dict[str, Any]] = {
    kind: {"kind": kind, "top_k": 2, "renormalise": True} for kind in ("token_choice", "deepseek")
}


@torch.no_grad()
def make_identity(layer: Any) -> Any:
    """Orthogonal head, its transpose as merge, no biases, experts that hand back what they get:
    relu(x) − relu(−x).
    """
    generator = torch.Generator().manual_seed(3)
    head = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=generator)).Q
    layer.view.head.weight.copy_(head)
    layer.view.merge.weight.copy_(head.T)
    layer.view.head.bias.zero_()
    layer.view.merge.bias.zero_()
    experts = layer.sparse.experts
    eye = torch.eye(experts.w_up.shape[1], dtype=torch.float64)
    experts.w_up.copy_(torch.cat((eye, -eye), 1).expand_as(experts.w_up))
    experts.w_down.copy_(torch.cat((eye, -eye)).expand_as(experts.w_down))
    return layer


@pytest.mark.parametrize("router", NORMALISED)
@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_the_layer_is_the_identity_where_its_parts_are(router: str, heads: int) -> None:
    layer = make_identity(
        make_layer(NORMALISED[router], sub_tokens=heads, d_expert=2 * 12 // heads)
    )
    x_BSD = rows(3, 5)
    y_BSD, routing = layer(x_BSD, x_BSD)
    torch.testing.assert_close(y_BSD, x_BSD, rtol=0, atol=1e-12)
    assert routing.routes.num_targets == 3 * 5 * heads


@pytest.mark.parametrize("order", ["heads first", "tokens reversed"])
def test_another_order_of_the_sub_tokens_is_noticed(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_identity(make_layer(NORMALISED["token_choice"], sub_tokens=3, d_expert=8))
    assert layer.view is not None
    merge = layer.view.merge

    def wrong(y_UC: Tensor) -> Tensor:
        if order == "heads first":
            return merge(y_UC.unflatten(0, (3, -1)).transpose(0, 1).flatten(1))
        return merge(y_UC.unflatten(0, (-1, 3)).flip(1).flatten(1))

    monkeypatch.setattr(layer.view, "join", wrong)
    x_BSD = rows(3, 5)
    assert (layer(x_BSD, x_BSD)[0] - x_BSD).abs().max() > 0.1


def test_the_layer_is_its_formula() -> None:
    """arXiv 2404.15045, token by token and head by head, without its residual, as released."""
    heads, width = 3, 4
    layer = make_layer(NORMALISED["token_choice"], sub_tokens=heads, expert_bias=True)
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
    layer = make_layer(NORMALISED["token_choice"], sub_tokens=3)
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
