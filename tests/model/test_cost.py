"""Costs by formula: against torch's counter, against published figures, and by hand."""

from statistics import fmean
from typing import Any

import pytest
import torch
from pairwise import slow_but
from parts import layers
from small_model import ODD, VARIANTS
from torch_modes import counted_flops

from moebius.model.config.attention_config import (
    DenseAttentionConfig,
)
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import (
    count_parameters,
    forward_flops,
    is_upper_bound,
)
from moebius.model.loops.depth import loops_of
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.train.recipes.smoke import RECIPES


def shallow(config: ModelConfig) -> ModelConfig:
    """The same layers at a fixed depth, at most four deep: every further one costs what these do."""
    if config.loops.depth.kind != "fixed":
        return config.changed({"loops.depth.kind": "fixed", "loops.depth.per": "step"})
    if config.num_layers <= 4 or not config.loops.is_plain:
        return config
    group = 4 if config.layers_per_group == config.num_layers else config.layers_per_group
    changes: dict[str, Any] = {"layers_per_group": group, "num_layers": -(-4 // group) * group}
    lists = {
        "feed_forward.sparse_layers": getattr(config.experts, "sparse_layers", ()),
        "attention.window_layers": getattr(config.attention, "window_layers", ()),
    }
    for key, listed in lists.items():
        if isinstance(listed, tuple) and listed:
            changes[key] = tuple(member for member in listed if member < group)
    return config.changed(changes)


@pytest.mark.quick(3)
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", RECIPES)
def test_the_formula_agrees_with_torch_for_every_recipe(name: str) -> None:
    """To the last FLOP, where neither width nor length is a round number."""
    config, length = shallow(RECIPES[name]().model), 37
    tokens = config.group_sequences * length
    assert round(forward_flops(config, length).training * tokens) == round(
        counted_flops(config, length) * tokens
    )


@pytest.mark.parametrize("name", ["huginn_moe", "parcae_moe"])
def test_training_costs_the_mean_of_the_depths_that_are_drawn(name: str) -> None:
    config = RECIPES[name]().model
    fixed = config.changed({"loops.depth.kind": "fixed", "loops.depth.per": "step"})
    drawn = [loops_of(config.loops.depth, config.num_repeats, 0, step, 0) for step in range(4000)]
    costs = {loops: forward_flops(fixed.with_loops(loops), 64).training for loops in set(drawn)}
    found = forward_flops(config, 64)
    assert found.training == pytest.approx(fmean(costs[loops] for loops in drawn), rel=0.01)
    assert abs(found.drawn_depths) > 0.005 * found.training
    assert found.forward == forward_flops(fixed, 64).forward  # of evaluation, which makes R loops


@pytest.mark.quick(3)
@pytest.mark.parametrize("variant", slow_but(VARIANTS, *list(VARIANTS)[::3]))
def test_the_formula_agrees_with_torch_for_every_switch(variant: str) -> None:
    assert forward_flops(VARIANTS[variant], 19).training == counted_flops(VARIANTS[variant], 19)


# Multiply-accumulates per token, in millions, of the MoEUT paper's own accounting: layers alone,
# forward.
PUBLISHED_MACS = {
    "dense_44m": 51.3,
    "dense_126m": 138.4,
    "dense_244m": 264.8,
    "dense_319m": 353.0,
    "dense_728m": 802.2,
    "dense_1b": 1132.5,
    "moeut_44m": 45.1,
    "moeut_126m": 92.3,
    "moeut_244m": 158.5,
    "moeut_319m": 210.2,
    "moeut_728m": 482.9,
    "moeut_1b": 683.8,
}


@pytest.mark.parametrize("name", PUBLISHED_MACS)
def test_the_papers_own_accounting_comes_out(name: str) -> None:
    """It counts V's and O's routers as if for one head, and the weighing of V's and O's answers,
    which is no product here.
    """
    config = RECIPES[name]().model
    flops = forward_flops(config, 1024)
    macs = (flops.forward - flops.read_out) / 2
    attention: Any = config.attention
    if attention.expert_count:
        heads, top_k = attention.num_heads, attention.top_k
        counted_once = 2 * (heads - 1) * attention.num_experts * config.d_model
        macs += config.num_layers * (2 * heads * top_k * attention.d_head - counted_once)
    assert round(macs / 1e6, 1) == PUBLISHED_MACS[name]


def test_the_halting_gate_belongs_to_the_layers() -> None:
    """SUT with and without it, of one size otherwise: D·D + D and 2·D in its two maps."""
    halting, fixed = (
        count_parameters(RECIPES[name]().model, 128) for name in ("sut", "sut_no_act")
    )
    width = RECIPES["sut"]().model.d_model
    gate = width * width + width + 2 * width
    assert halting.in_layers - fixed.in_layers == halting.total - fixed.total == gate


# Of the published files
DENSE_PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama3_1_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b_v0_1": 7_241_732_096,
    "mistral_7b_v0_3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_32b": 32_763_876_352,
    "qwen3_0_6b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "olmo2_1b": 1_484_916_736,
    "olmo2_13b": 13_716_198_400,
}


@pytest.mark.parametrize("name", DENSE_PARAMETERS)
def test_dense_recipes_have_as_many_parameters_as_the_published_models(name: str) -> None:
    assert count_parameters(RECIPES[name]().model, 8).total == DENSE_PARAMETERS[name]


def test_active_parameters_by_hand() -> None:
    """One of two layers dense: router, K of E experts, k of N attention experts per head, and all
    the rest.
    """
    config = ODD.changed({"feed_forward.sparse_layers": 1})
    d, heads, channels = 24, 3, 10
    attention = 2 * d * heads * channels + 2 * heads * 2 * channels * d + 2 * heads * 5 * d
    dense = 2 * d * 512 + 512 + d
    sparse = 11 * d + 4 * 2 * d * 6
    norms = (
        3 * 2 * d
    )  # of both attentions and of the sparse feed-forward; peri-norm has none before a dense one
    rest = 61 * d + 2 * d + 61 * d + 61
    assert count_parameters(config, 8).active == 2 * attention + dense + sparse + norms + rest


def test_sub_tokens_use_more_experts_but_never_more_than_there_are() -> None:
    total = count_parameters(ODD.changed({"feed_forward.sub_tokens": 3}), 8)
    assert total.active < total.total  # attention's
    dense = ODD.changed(
        {"attention.kind": "dense", "feed_forward.sub_tokens": 3}
    )  # 3 × 4 draws from 11 experts
    assert count_parameters(dense, 8).active == count_parameters(dense, 8).total


def test_only_what_may_be_refused_or_halt_is_an_upper_bound() -> None:
    bounds = {"switch_causal", "gshard", "transition", "sut"}
    exact = {"dense", "moeut", "top_k", "expert_choice", "soft_moe", "sut_no_act"}
    assert {name for name in bounds | exact if is_upper_bound(RECIPES[name]().model)} == bounds


# Multi-Head MoE -----------------------------------------------------------------------------------------------------

# The sizes of arXiv 2411.16205 (SwiGLU): d_model, experts, top_k, d_expert,
# sub-tokens; FLOPs per token, parameters.
PARITY = {
    "SMoE": (768, 8, 1, 2048, 1, 9_437_184, 37_748_736),
    "fine-grained": (768, 16, 2, 1024, 1, 9_437_184, 37_748_736),
    "two heads": (768, 40, 2, 768, 2, 9_437_184, 36_569_088),
    "three heads": (768, 96, 3, 512, 3, 9_437_184, 38_928_384),
}


@pytest.mark.parametrize("row", PARITY)
def test_layers_cost_what_the_parity_table_says(row: str) -> None:
    """The table leaves out routers and biases."""
    d_model, num_experts, top_k, d_expert, sub_tokens, flops, parameters = PARITY[row]
    config = ModelConfig(
        d_model=d_model,
        num_layers=1,
        layers_per_group=1,
        norm="pre",
        attention=DenseAttentionConfig(),
        feed_forward=ExpertsConfig(
            activation="swiglu",
            num_experts=num_experts,
            d_expert=d_expert,
            sub_tokens=sub_tokens,
            router=SigmoidConfig(top_k=top_k),
        ),
    )
    found = forward_flops(config, 8)
    assert found.feed_forward + found.sub_tokens == flops
    with torch.device("meta"):
        block = layers(Transformer(config))[0].feed_forward
    names = [
        name
        for name, _ in block.named_parameters()
        if not name.startswith("router") and "bias" not in name
    ]
    assert sum(block.get_parameter(name).numel() for name in names) == parameters
