"""Mixture of Tokens: values and gradients against a loop, and the published sizes."""

import math
from typing import Any

import pytest
import torch
from parts import layers
from routing_oracle import assert_same
from sparse_layer import expert, make_layer, make_model, rows
from torch import Tensor

from moebius.model.config.model_config import ModelConfig, ScaledInitialisationConfig
from moebius.model.initialise import draw, initialise
from moebius.model.routing import Mixture
from moebius.model.transformer import Transformer
from moebius.train.recipes.published import PUBLISHED

MOT = {"kind": "mixture_of_tokens", "sequences_per_group": 4}


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


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    layer, x_BSD = make_layer(MOT), rows(6, 3)
    with pytest.raises(
        ValueError, match=r"6 sequences are not whole groups of 4: .*with a group context of 3"
    ):
        layer(x_BSD, x_BSD)


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
