"""Experts cut into finer ones: the same logits, and parts that separate."""

from typing import Any

import pytest
import torch
from grown_case import TOKENS, InMemory, State, drawn, given, grown, logits_of, near, whole
from published_case import arrays_of, folder_of, state_of
from torch import Tensor

from moebius.distributed.checkpoint.grown import GrownReader
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer
from moebius.train.config.errors import ConfigError
from moebius.train.families.table import open_family
from moebius.train.growth.split import split

BASE = ModelConfig.from_dotted(
    {
        "vocab_size": 31,
        "d_model": 24,
        "num_layers": 4,
        "layers_per_group": 2,
        "attention.d_head": 6,
        "feed_forward.num_experts": 8,
        "feed_forward.d_expert": 12,
        "feed_forward.router.top_k": 3,
    }
)
SOFTMAX = {
    "feed_forward.router.kind": "token_choice",
    "feed_forward.router.top_k": 3,
    "norm": "pre",
}
BIASES = {"feed_forward.expert_bias": True, "feed_forward.activation": "swiglu"}
DEEPSEEK = {
    "norm": "pre",
    "feed_forward.router.kind": "deepseek",
    "feed_forward.router.top_k": 3,
    "feed_forward.router.route_scale": 1.5,
}
GROUPS = {
    "feed_forward.router.num_groups": 4,
    "feed_forward.router.kept_groups": 2,
    "feed_forward.router.group_score": "max",
}
MODELS: dict[str, dict[str, Any]] = {
    "σ-MoE": {"attention.kind": "dense", "layers_per_group": 4},
    "MoEUT": {},
    "σ, gated, biases": BIASES,
    "softmax": SOFTMAX,
    "softmax of the chosen, biases": SOFTMAX
    | BIASES
    | {"feed_forward.router.renormalise": True, "feed_forward.router.bias": True},
    "V3, shared experts": DEEPSEEK | BIASES | GROUPS | {"feed_forward.num_shared_experts": 1},
    "V2": DEEPSEEK
    | {"feed_forward.router.scores": "softmax", "feed_forward.router.renormalise": False},
    "σ of V3": DEEPSEEK | BIASES | {"feed_forward.router.renormalise": False},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("parts", ["2", "3"])
def test_finer_experts_give_the_same_logits(kind: str, parts: str, dtype: torch.dtype) -> None:
    model = BASE.changed(MODELS[kind])
    state = drawn(model, dtype)
    growth = split(model, {"split": parts}, given(state))
    near(logits_of(growth.model, grown(state, growth)), logits_of(model, state))
    assert growth.model.experts is not None
    assert growth.model.experts.num_experts == 8 * int(parts)
    before, after = (
        sum(value.numel() for name, value in weights.items() if ".router." not in name)
        for weights in (state, grown(state, growth))
    )
    more = int(parts) - 1 if model.experts and model.experts.expert_bias else 0
    assert after - before == more * len(model.sparse_members) * 8 * 24  # only output biases


@pytest.mark.needs_shared
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_finer_experts_of_published_mixtures_give_the_recorded_logits(family: str) -> None:
    plan, recorded = open_family(folder_of(f"hf_{family}_a")), arrays_of(f"hf_{family}_a")
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        state = state_of(plan, dtype)
        growth = split(plan.model, {"split": "2"}, given(state))
        found = logits_of(growth.model, grown(state, growth), recorded["ids"])
        near(found, logits_of(plan.model, state, recorded["ids"]), tolerance)
        near(found, recorded["logits"], 2e-5)


def gradients_of(model: ModelConfig, state: State) -> dict[str, Tensor]:
    built = Transformer(model).double()
    built.load_state_dict(state)
    built(TOKENS).logits_BSV.square().sum().backward()
    return {name: one.grad for name, one in built.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    "kind", ["σ-MoE", "softmax", "softmax of the chosen, biases", "V3, shared experts"]
)
def test_parts_separate_and_moments_are_those_of_their_gradients(kind: str) -> None:
    model = BASE.changed(MODELS[kind])
    state = drawn(model, torch.float64)
    growth = split(model, {"split": "2"}, given(state))
    before, after = (
        gradients_of(config, weights)
        for config, weights in ((model, state), (growth.model, grown(state, growth)))
    )
    rows = after["group.0.feed_forward.router.weight"]
    assert (rows[0::2] - rows[1::2]).abs().max() > 1e-3
    powers = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 1}
    moments = {
        f"optimizer.{slot}.{name}": value**power
        for name, value in before.items()
        for slot, power in powers.items()
    }
    reader = GrownReader(
        InMemory(moments | {f"model.{n}": v for n, v in state.items()}), growth.takes
    )
    for name, value in after.items():
        rows = slice(0, None, 2 if "b_down" in name else 1)  # only the first part's bias is copied
        for slot, power in powers.items() if ".sparse.experts." in name else ():
            found = whole(reader, f"optimizer.{slot}.{name}", torch.float64)
            torch.testing.assert_close(found[rows], value[rows] ** power)


@pytest.mark.parametrize("kind", ["softmax", "V2", "V3, shared experts"])
@pytest.mark.parametrize("pool", [False, True])
def test_finer_experts_have_the_same_balancing_loss(kind: str, pool: bool) -> None:
    router = "feed_forward.router."
    scope = {f"{router}balance": 0.5, f"{router}balance_scope": "micro_batch"}
    model = BASE.changed(MODELS[kind] | scope | {f"{router}balance_pool": pool})
    state = drawn(model, torch.float64)
    growth = split(model, {"split": "2"}, given(state))
    found = []
    for config, weights in ((model, state), (growth.model, grown(state, growth))):
        built = Transformer(config).double()
        built.load_state_dict(weights)
        found.append(built.train()(TOKENS, targets_BS=TOKENS).regularisation_B.double().mean())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("changes", "word", "answer"),
    [
        ({}, "5", "d_expert=12 cannot be cut into '5' parts; 2, 3, 4, 6 would fit"),
        (
            {"norm": "pre", "feed_forward.router.kind": "cosine"},
            "2",
            "router.kind='cosine' would choose otherwise",
        ),
        (
            DEEPSEEK | GROUPS | {"feed_forward.router.group_score": "top2"},
            "2",
            "adds the two best experts of a group",
        ),
    ],
)
def test_experts_that_cannot_be_cut_are_refused(
    changes: dict[str, Any], word: str, answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer):
        split(BASE.changed(changes), {"split": word}, given({}))
