"""Mixture of Tokens: values and gradients against a loop, no look into the future, continuity,
cost, and why one is no group.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from family import some_tokens
from parts import layers
from routing_oracle import assert_same
from sparse_layer import expert, make_layer, make_model, rows, temporal_leak
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moebius.model.config.attention_config import DenseAttentionConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig, ScaledInitialisationConfig
from moebius.model.initialise import draw, initialise, normal
from moebius.model.routers.mixture import TokenMixingConfig, TokenMixingRouter
from moebius.model.routers.router import Promises
from moebius.model.routing import Mixture
from moebius.model.transformer import Transformer
from moebius.train.recipes.published import PUBLISHED

MOT = {"kind": "mixture_of_tokens", "sequences_per_group": 4}
SWITCH = {"kind": "token_choice", "top_k": 1}


def mixture_of(layer: Any, x_BSD: Tensor) -> Mixture:
    plan = layer.router(x_BSD.flatten(0, 1), batch_size=len(x_BSD)).plan
    assert isinstance(plan, Mixture)
    return plan


def loop(layer: Any, x_BSD: Tensor) -> Tensor:
    """The layer one group, one expert and one token at a time."""
    out = torch.zeros_like(x_BSD)
    for group in BY_POSITION:
        logits = torch.stack([layer.router.weight @ x_BSD[place] for place in group])  # (M, E)
        weights = (logits / layer.router.config.temperature).exp()
        for e, w in enumerate((weights / weights.sum(0)).T):
            mixed: Any = sum(w[m] * x_BSD[place] for m, place in enumerate(group))
            answer = expert(layer, e, mixed)
            for m, place in enumerate(group):
                out[place] = out[place] + w[m] * answer
    return out


# every group's (sequence, position)
BY_POSITION = [[(4 * j + m, s) for m in range(4)] for s in range(3) for j in range(2)]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_values_and_gradients_are_those_of_a_loop(temperature: float) -> None:
    layer, x_BSD = make_layer(MOT | {"temperature": temperature}), rows(8, 3)
    assert_same(layer, x_BSD, lambda x_BSD: loop(layer, x_BSD))
    plan = mixture_of(layer, x_BSD)
    assert plan.emit_GMP is plan.merge_GMP


# ---- what it promises


def test_no_position_reads_a_later_one() -> None:
    """Layer and model of two layers; the control is Soft MoE."""
    x_BSD, other_BSD = rows(8, 12), rows(8, 12, seed=1)
    tokens_BS, other_BS = (some_tokens(8, 12, seed=n, vocabulary=31) for n in (1, 2))
    for router, causal in (
        (MOT, True),
        (MOT | {"sequences_per_group": 8}, True),
        ({"kind": "soft_moe", "slots_per_expert": 1}, False),
    ):
        layer, model = make_layer(router), make_model(router)
        with torch.no_grad():
            in_layer = temporal_leak(lambda x, f=layer: f(x, x)[0], x_BSD, other_BSD, range(1, 12))
            in_model = temporal_leak(
                lambda x, f=model: f(x).logits_BSV, tokens_BS, other_BS, range(1, 12)
            )
        assert (in_layer == 0.0, in_model == 0.0) == (causal, causal)
        assert layer.router.config.promises.causal == causal
    assert in_layer > 0.1


def test_the_group_context_does_matter() -> None:
    layer, x_BSD = make_layer(MOT), rows(8, 3)
    changed = x_BSD.clone()
    changed[0] += 1
    before, after = layer(x_BSD, x_BSD)[0], layer(changed, changed)[0]
    assert ((before - after)[1:4].abs().amax((1, 2)) > 1e-3).all()
    assert before[4:].equal(after[4:])
    assert layer.router.config.promises == Promises(
        causal=True, batch_invariant=False, dropless=True, balanced=True
    )


def largest_jump(layer: Any, x_BSD: Tensor, steps: int) -> float:
    """Of any output while the router's weight moves along a line, in so many steps."""
    start = layer.router.weight.detach().clone()
    line = (
        torch.randn(start.shape, dtype=start.dtype, generator=torch.Generator().manual_seed(9))
        * 0.1
    )
    with torch.no_grad():
        outputs = []
        for step in range(steps + 1):
            layer.router.weight.copy_(start + line * step / steps)
            outputs.append(layer(x_BSD, x_BSD)[0])
        layer.router.weight.copy_(start)
    return max((b - a).abs().max().item() for a, b in pairwise(outputs))


def test_it_is_continuous_in_the_router_and_top_1_is_not() -> None:
    x_BSD = rows(8, 12) - rows(
        1, 1
    )  # without a favourite, so that some token's choice flips on the way
    jumps = {
        steps: [
            largest_jump(layer, x_BSD, steps) for layer in (make_layer(MOT), make_layer(SWITCH))
        ]
        for steps in (64, 128)
    }
    mixing, choosing = ([jumps[steps][router] for steps in (64, 128)] for router in (0, 1))
    assert mixing[1] / mixing[0] == pytest.approx(0.5, abs=0.02)
    assert choosing[1] / choosing[0] == pytest.approx(1.0, abs=0.02)
    assert choosing[1] > 5 * mixing[1]


# ---- what it costs


@pytest.mark.parametrize("granularity", [1, 16])
def test_matched_experts_cost_a_dense_layer_and_mixing_6de(granularity: int) -> None:
    """Sizes of MoT-Medium/32E/1 and /16: E = 32·m experts of width 2048/m."""
    d_model, width, group = 512, 2048, 32
    num_experts, d_expert = group * granularity, width // granularity
    with torch.device("meta"):
        model = Transformer(
            ModelConfig(
                d_model=d_model,
                num_layers=1,
                layers_per_group=1,
                norm="pre",
                attention=DenseAttentionConfig(),
                feed_forward=ExpertsConfig(
                    num_experts=num_experts,
                    d_expert=d_expert,
                    router=TokenMixingConfig(sequences_per_group=group),
                ),
            ),
            backend="segments",
        )
        layer = layers(model)[0].feed_forward
        x_BSD = torch.zeros(group, 4, d_model)
        with FlopCounterMode(display=False) as counter:
            layer(x_BSD, x_BSD)
    dense, mixing = 4 * d_model * width, 6 * d_model * num_experts
    assert counter.get_total_flops() == group * 4 * (dense + mixing)
    config = layer.router.config
    assert config.active_experts(num_experts, 4) * 4 * d_model * d_expert == dense
    assert config.router_flops(d_model, num_experts) == mixing
    assert mixing / dense == pytest.approx({1: 0.023, 16: 0.375}[granularity], abs=0.001)
    assert sum(weight.numel() for weight in layer.sparse.parameters()) == 32 * 2 * d_model * width


# ---- a group of one


def test_what_a_group_of_one_would_do() -> None:
    """Every expert's answer in full: independent tokens and even weights make it g·√g times as
    large as in a group of g.
    """
    router = {"kind": "mixture_of_tokens", "sequences_per_group": 32}
    changes = {"d_model": 64, "initialisation.kind": "scaled"}
    layer = layers(make_model(router, changes, num_experts=32, d_expert=256))[0].feed_forward
    x_BSD = torch.randn(32, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        grouped = layer(x_BSD, x_BSD)[0]
        layer.router.config = TokenMixingConfig.model_construct(sequences_per_group=1)
        alone = layer(x_BSD, x_BSD)[0]
        total = sum(expert(layer, e, x_BSD) for e in range(32))
    torch.testing.assert_close(alone, total)
    ratio = (alone.square().mean() / grouped.square().mean()).sqrt().item()
    assert 10 < ratio < 32 * math.sqrt(32)
    assert ratio == pytest.approx(155, rel=0.1)


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    layer, x_BSD = make_layer(MOT), rows(6, 3)
    with pytest.raises(
        ValueError, match=r"6 sequences are not whole groups of 4: .*with a group context of 3"
    ):
        layer(x_BSD, x_BSD)


# ---- precision


def test_rounding_moves_weights_a_little() -> None:
    """bfloat16 logits of 4096 normal rows of width 512: the mixture's weights move by 0.09 %.

    Our router computes in float32: only its rows and its weight can come rounded, which moves
    weights by 0.073 %. Neither depends on the number of experts.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4096, 512, generator=generator)
    moved, ours = [], []
    for num_experts in (8, 32, 64, 512):
        weight_ED = torch.randn(num_experts, 512, generator=generator) * math.sqrt(0.1 / 512)
        exact = x_TD @ weight_ED.T
        rough = (x_TD.bfloat16() @ weight_ED.bfloat16().T).float()
        before, after = (logits.view(128, 32, num_experts).softmax(1) for logits in (exact, rough))
        moved.append(((after - before).norm() / before.norm()).item())
        router = TokenMixingRouter(
            TokenMixingConfig(sequences_per_group=32), 512, num_experts, init=normal(1.0)
        )
        mixtures = []
        for dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                router.weight.copy_(weight_ED.to(dtype))
                mixtures.append(router(x_TD.to(dtype), batch_size=4096).plan.merge_GMP)
        torch.testing.assert_close(mixtures[0], before, rtol=1e-4, atol=1e-7)
        ours.append(((mixtures[1] - mixtures[0]).norm() / mixtures[0].norm()).item())
    assert moved == pytest.approx([0.00094] * 4, abs=0.00003)
    assert ours == pytest.approx([0.00073] * 4, abs=0.00003)


# ---- published sizes


PUBLISHED_TOTALS = {
    "gpt_medium": "76.8 M",
    "mot_medium_8e": "135.5 M",
    "mot_medium_32e_1": "336.9 M",
    "mot_medium_32e_8": "337.3 M",
    "mot_medium_32e_16": "337.9 M",
    "mot_medium_32e_32": "339 M",
    "mot_medium_128e": "1.14 B",
    "gpt_base": "162.3 M",
    "mot_base_32e": "1.04 B",
    "mot_mini": "94.5 M",
}


def matrix_elements(config: ModelConfig, unit: str, digits: int) -> str:
    """Of embeddings, positions, head, layers; without biases and norms, which change the last digit
    of two totals.
    """
    with torch.device("meta"):
        model = Transformer(config)
    total = sum(value.numel() for value in model.parameters() if value.dim() > 1)
    return f"{total / {'M': 1e6, 'B': 1e9}[unit]:.{digits}f} {unit}"


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_published_totals(name: str) -> None:
    number, unit = PUBLISHED_TOTALS[name].split()
    config = PUBLISHED[name][1]().model
    assert matrix_elements(config, unit, len(number.partition(".")[2])) == PUBLISHED_TOTALS[name]


def test_the_largest_published_total_is_that_of_its_name() -> None:
    """MoT-Base/64E/16 is 64·16 experts; the authors' file for it has 2048, of half the width and
    with twice the router.
    """
    config = PUBLISHED["mot_base_64e_16"][1]().model
    for num_experts, total in ((1024, "1.95 B"), (2048, "1.96 B")):
        sizes = {
            "feed_forward.num_experts": num_experts,
            "feed_forward.d_expert": 3072 * 64 // num_experts,
        }
        assert matrix_elements(config.changed(sizes), "B", 2) == total


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if name in ("mot_medium_8e", "mot_mini", "gpt_medium")]
)
def test_the_read_out_is_as_published(name: str) -> None:
    """No norm before it, no bias, and it starts as every matrix of that code: N(0, 0.1/D), cut."""
    config = PUBLISHED[name][1]().model
    with torch.device("meta"):
        model = Transformer(config)
    assert model.final_norm is None
    assert model.head.bias is None
    weight = draw("head.weight", model.head.weight, seed=0)
    assert isinstance(config.initialisation, ScaledInitialisationConfig)
    scale = config.initialisation.scale
    assert weight.std().item() == pytest.approx(math.sqrt(scale / config.d_model), rel=0.02)
    assert weight.abs().max() <= 2 * scale
    uniform = config.changed({"initialisation.head": "uniform", "final_norm": True})
    with torch.device("meta"):
        model = Transformer(uniform)
    assert model.final_norm is not None
    weight = draw("head.weight", model.head.weight, seed=0)
    assert weight.abs().max() <= config.d_model**-0.5


def test_starting_values_are_the_papers() -> None:
    """Truncated normals of variance 0.1 / fan-in: an expert's own width for its second matrix."""
    model = make_model(
        MOT,
        {"initialisation.kind": "scaled", "d_model": 64},
        d_expert=16,
        num_experts=64,
    )
    initialise(model, 0)
    layer = layers(model)[0].feed_forward
    for value, fan_in in (
        (layer.router.weight, 64),
        (layer.sparse.experts.w_up, 64),
        (layer.sparse.experts.w_down, 16),
    ):
        assert value.std().item() == pytest.approx(math.sqrt(0.1 / fan_in), rel=0.05)


def test_a_mixture_has_no_routes_of_rows() -> None:
    layer = make_layer(MOT)
    routing = layer.router(rows(4, 3).flatten(0, 1), batch_size=4)
    with pytest.raises(TypeError, match=r"no routes for its rows; `slot_routes` lists those"):
        _ = routing.routes
