"""Mixture of Tokens: values and gradients against a loop, no look into the future, and the published sizes."""

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
from moebius.model.routers.mixture import TokenMixingConfig
from moebius.model.routing import Mixture
from moebius.model.transformer import Transformer
from moebius.train.recipes.published import PUBLISHED

MOT = {"kind": "mixture_of_tokens", "sequences_per_group": 4}


def mixture_of(layer: Any, x_BSD: Tensor) -> Mixture:
    plan = layer.router(x_BSD.flatten(0, 1), batch_size=len(x_BSD)).plan
    assert isinstance(plan, Mixture)
    return plan


def loop(
    layer: Any,
    x_BSD: Tensor,
    members: list[list[tuple[int, int]]],
    config: TokenMixingConfig,
) -> Tensor:
    """The layer one group, one expert and one token at a time; `members` lists every group's
    (sequence, position).
    """
    out = torch.zeros_like(x_BSD)
    for group in members:
        logits = torch.stack([layer.router.weight @ x_BSD[place] for place in group])  # (M, E)
        merge = temperature(layer, config, "merge_temperature")
        emit = (
            temperature(layer, config, "emit_temperature")
            if config.separate_emit_temperature
            else merge
        )
        for e in range(logits.shape[1]):
            w_merge = (logits[:, e] / merge[e]).exp() / (logits[:, e] / merge[e]).exp().sum()
            mixed: Any = sum(w * x_BSD[place] for w, place in zip(w_merge, group, strict=True))
            answer = expert(layer, e, mixed)
            for m, place in enumerate(group):
                if config.emit == "softmax_over_experts":
                    weight = (logits[m] / emit).softmax(0)[e]
                else:
                    weight = (logits[:, e] / emit[e]).softmax(0)[m]
                out[place] = out[place] + weight * answer
    return out


def temperature(layer: Any, config: TokenMixingConfig, name: str) -> Tensor:
    learned = getattr(layer.router, name)
    value = torch.ones(6, dtype=torch.float64) if learned is None else learned.expand(6)
    return config.temperature * (
        value if config.temperature_form == "direct" or learned is None else (value - 1).exp()
    )


BY_POSITION = [[(4 * j + m, s) for m in range(4)] for s in range(3) for j in range(2)]
BY_NEIGHBOURHOOD = [[(b, 3 * j + m) for m in range(3)] for b in range(4) for j in range(2)]


@pytest.mark.parametrize(
    ("options", "shape", "members"),
    [
        ({}, (8, 3), BY_POSITION),
        ({"temperature": 0.3}, (8, 3), BY_POSITION),
        ({"learnable_temperature": "scalar"}, (8, 3), BY_POSITION),
        (
            {
                "learnable_temperature": "per_expert",
                "temperature_form": "positive",
                "temperature": 2.0,
            },
            (8, 3),
            BY_POSITION,
        ),
        (
            {"learnable_temperature": "per_expert", "separate_emit_temperature": True},
            (8, 3),
            BY_POSITION,
        ),
        ({"emit": "softmax_over_experts"}, (8, 3), BY_POSITION),
        ({"axis": "sequence", "sequences_per_group": 3}, (4, 6), BY_NEIGHBOURHOOD),
    ],
    ids=[
        "published",
        "cold",
        "learned",
        "positive",
        "separate",
        "over experts",
        "along the sequence",
    ],
)
def test_values_and_gradients_are_those_of_a_loop(
    options: dict[str, Any], shape: tuple[int, int], members: list
) -> None:
    layer = make_layer(MOT | options)
    config = layer.router.config
    with torch.no_grad():
        for name, value in layer.router.named_parameters():
            if "temperature" in name:
                value.add_(torch.linspace(-0.4, 0.7, value.numel(), dtype=value.dtype))
    x_BSD = rows(*shape)
    assert_same(layer, x_BSD, lambda x_BSD: loop(layer, x_BSD, members, config))
    plan = mixture_of(layer, x_BSD)
    same_weights = config.emit == "merge" and not config.separate_emit_temperature
    assert (plan.emit_GMP is plan.merge_GMP) == same_weights


def test_a_learned_temperature_starts_as_the_fixed_one() -> None:
    x_BSD = rows(8, 3)
    fixed = mixture_of(make_layer(MOT | {"temperature": 0.5}), x_BSD)
    for form in ("direct", "positive"):
        learned = {
            "temperature": 0.5,
            "learnable_temperature": "per_expert",
            "temperature_form": form,
        }
        torch.testing.assert_close(
            mixture_of(make_layer(MOT | learned), x_BSD).merge_GMP, fixed.merge_GMP
        )


def test_the_discrete_form_takes_one_row_per_expert_even_in_a_tie() -> None:
    layer = make_layer(MOT | {"discrete_evaluation": True})
    x_BSD = rows(8, 3)
    x_BSD[1] = x_BSD[0]  # equal tokens: the largest weight occurs twice
    soft = mixture_of(layer.train(), x_BSD).merge_GMP
    mixture = mixture_of(layer.eval(), x_BSD)
    assert (soft < 1).all()
    assert mixture.emit_GMP is mixture.merge_GMP
    assert set(mixture.merge_GMP.unique().tolist()) == {0.0, 1.0}
    assert (mixture.merge_GMP.sum(1) == 1).all()
    assert (mixture.merge_GMP * soft).sum(1).equal(soft.amax(1))


def test_groups_of_another_size_in_evaluation_only() -> None:
    layer = make_layer(MOT | {"evaluation_sequences_per_group": 8})
    x_BSD, config = rows(8, 3), layer.router.config
    assert mixture_of(layer.train(), x_BSD).rows_GM.shape == (6, 4)
    groups_GM = torch.arange(24).view(8, 3).T
    assert torch.equal(mixture_of(layer.eval(), x_BSD).rows_GM, groups_GM)
    assert layer.router.group_context_size == 7
    assert (config.group_sequences, config.evaluation_group_sequences) == (4, 8)


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


@pytest.mark.parametrize("name", ["mot_medium_8e", "mot_mini", "gpt_medium"])
def test_the_read_out_is_as_published(name: str) -> None:
    """No norm before it, no bias, and it starts as every matrix of that code: N(0, 0.1/D), cut."""
    config = PUBLISHED[name][1]().model
    uniform = config.changed({"initialisation.head": "uniform", "final_norm": True})
    with torch.device("meta"):
        model, other = Transformer(config), Transformer(uniform)
    assert model.final_norm is model.head.bias is None
    assert other.final_norm is not None
    weight, bounded = (draw("head.weight", each.head.weight, seed=0) for each in (model, other))
    assert isinstance(config.initialisation, ScaledInitialisationConfig)
    scale = config.initialisation.scale
    assert weight.std().item() == pytest.approx(math.sqrt(scale / config.d_model), rel=0.02)
    assert weight.abs().max() <= 2 * scale
    assert bounded.abs().max() <= config.d_model**-0.5


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


@pytest.mark.parametrize("name", ["sequences_per_group", "evaluation_sequences_per_group"])
def test_stretches_must_divide_the_sequence(name: str) -> None:
    options = {"sequences_per_group": 4, name: 8}
    config = TokenMixingConfig.model_validate(options | {"axis": "sequence"})
    config.check_length(16)
    with pytest.raises(ValueError, match=rf"{name}=8 .* does not divide the 12 rows.*a divisor"):
        config.check_length(12)
    TokenMixingConfig.model_validate(options).check_length(12)


@pytest.mark.parametrize(
    ("options", "batch", "error", "message"),
    [
        ({}, 6, ValueError, r"6 sequences are not whole groups of 4: .*with a group context of 3"),
        ({"axis": "sequence"}, 6, ValueError, r"of 4: 3 positions of a sequence are not whole"),
        ({}, 4, TypeError, r"no routes for its rows; `slot_routes` lists those"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    options: dict[str, Any], batch: int, error: type[Exception], message: str
) -> None:
    router = make_layer(MOT | options).router
    with pytest.raises(error, match=message):
        _ = router(rows(batch, 3).flatten(0, 1), batch_size=batch).routes
