"""Multi-Head MoE: what is split comes together again in the same order, whatever router stands in
between.
"""

from typing import Any

import pytest
import torch
from sparse_layer import make_layer, rows
from torch import Tensor
from world import run_ranks

from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model, expert_names
from moebius.distributed.process.process import start_process
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import draw, initialise
from moebius.model.transformer import Transformer

# Gates that add up to 1, so that identical answers add up to that answer.
NORMALISED: dict[str, dict[str, Any]] = {
    "token_choice": {"kind": "token_choice", "top_k": 2, "renormalise": True},
    "deepseek": {
        "kind": "deepseek",
        "top_k": 2,
        "num_groups": 1,
        "kept_groups": 1,
        "renormalise": True,
    },
}
ROUTERS = NORMALISED | {
    "sigmoid": {"kind": "sigmoid", "top_k": 2},
    "cosine": {"kind": "cosine", "top_k": 1},
    "mixture_of_tokens": {"kind": "mixture_of_tokens", "sequences_per_group": 4},
    "expert_choice": {"kind": "expert_choice", "sequences_per_group": 4, "mean_experts": 1.5},
}


@torch.no_grad()
def make_identity(layer: Any) -> Any:
    """Orthogonal head, its transpose as merge, no biases, experts that hand back what they get:
    relu(x) − relu(−x).
    """
    assert layer.view is not None
    head = torch.linalg.qr(
        torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ).Q
    layer.view.head.weight.copy_(head)
    layer.view.merge.weight.copy_(head.T)
    for bias in (layer.view.head.bias, layer.view.merge.bias):
        assert bias is not None
        bias.zero_()
    width = layer.sparse.experts.w_up.shape[1]
    eye = torch.eye(width, dtype=torch.float64)
    layer.sparse.experts.w_up.copy_(torch.cat((eye, -eye), 1).expand_as(layer.sparse.experts.w_up))
    layer.sparse.experts.w_down.copy_(torch.cat((eye, -eye)).expand_as(layer.sparse.experts.w_down))
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

    def wrong(y_UC: Tensor, _: Tensor) -> Tensor:
        if order == "heads first":
            return merge(y_UC.unflatten(0, (3, -1)).transpose(0, 1).flatten(1))
        return merge(y_UC.unflatten(0, (-1, 3)).flip(1).flatten(1))

    monkeypatch.setattr(layer.view, "join", wrong)
    x_BSD = rows(3, 5)
    assert (layer(x_BSD, x_BSD)[0] - x_BSD).abs().max() > 0.1


@pytest.mark.parametrize("residual", [False, True])
def test_the_layer_is_its_formula(residual: bool) -> None:
    """arXiv 2404.15045, token by token and head by head; the residual as in the formula, or none,
    as released.
    """
    heads, width = 3, 4
    layer = make_layer(
        NORMALISED["token_choice"], sub_tokens=heads, sub_token_residual=residual, expert_bias=True
    )
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
            out_C = sub_C if residual else torch.zeros_like(sub_C)
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


# Expert parallelism -------------------------------------------------------------------------------------------------

BATCH, LENGTH = 4, 6


def config_of(router: str) -> ModelConfig:
    return ModelConfig.from_dotted(
        {
            "vocab_size": 31,
            "d_model": 24,
            "num_layers": 2,
            "layers_per_group": 2,
            "attention.num_heads": 2,
            "attention.d_head": 12,
            "norm": "pre",
            "attention.kind": "dense",
            "feed_forward.num_experts": 6,
            "feed_forward.d_expert": 10,
            "feed_forward.sub_tokens": 3,
            "feed_forward.router": ROUTERS[router],
        }
    )


def tokens_of(rank: int) -> Tensor:
    return torch.randint(31, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))


def logits_and_gradients(model: Transformer, tokens_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.before_step(0)
    logits_BSV = model(tokens_BS).logits_BSV
    logits_BSV.square().sum().backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return logits_BSV.detach(), gradients


def on_ranks(routers: tuple[str, ...]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """This rank's logits, and the gradients of its experts."""
    with start_process("cpu", timeout_s=30) as process:
        mesh = build_mesh(plan_layout(MeshConfig(ep=2), 2), process)
        found = {}
        for router in routers:
            model = build_model(
                config_of(router),
                mesh,
                dispatcher="alltoall",
                backend="auto",
                seed=0,
                device=process.device,
            )
            logits_BSV, gradients = logits_and_gradients(model, tokens_of(process.rank))
            found[router] = logits_BSV, {name: gradients[name] for name in expert_names(model)}
        return found


def test_two_ranks_share_the_experts_of_sub_tokens() -> None:
    """Any router inside: logits are those of one process, and an expert's gradient is the sum of
    what both ranks sent it.
    """
    on_two = run_ranks(on_ranks, 2, tuple(ROUTERS))
    for router in ROUTERS:
        gradients = []
        for rank in range(2):
            model = Transformer(config_of(router))
            initialise(model, 0)
            logits_BSV, own = logits_and_gradients(model, tokens_of(rank))
            torch.testing.assert_close(on_two[rank][router][0], logits_BSV, rtol=0, atol=1e-5)
            gradients.append(own)
        for name in on_two[0][router][1]:
            blocks = torch.cat([on_two[rank][router][1][name] for rank in range(2)])
            torch.testing.assert_close(
                blocks, gradients[0][name] + gradients[1][name], rtol=1e-4, atol=1e-5
            )
