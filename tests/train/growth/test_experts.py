"""Copies of experts: asleep they change nothing, until balancing wakes them; with noise they separate."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from grown_case import drawn, given, grown, logits_of, near
from published_case import arrays_of, folder_of, state_of
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.deepseek import DeepSeekRouter
from moebius.train.config.errors import ConfigError
from moebius.train.families.table import open_family
from moebius.train.growth.experts import chosen, copy_experts

SIGMA = ModelConfig.from_dotted(
    {
        "vocab_size": 31,
        "d_model": 24,
        "num_layers": 4,
        "layers_per_group": 2,
        "attention.d_head": 6,
        "feed_forward.num_experts": 8,
        "feed_forward.d_expert": 12,
        "feed_forward.router.top_k": 1,
    }
)
V3 = SIGMA.changed(
    {"norm": "pre", "feed_forward.router.kind": "deepseek", "feed_forward.router.top_k": 3}
)
GROUPS = {"feed_forward.router.num_groups": 4, "feed_forward.router.kept_groups": 2}
PATH = "group.1.feed_forward."


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("words", [{"experts": "×2"}, {"experts": "+4", "asleep": ""}])
@pytest.mark.parametrize("changes", [{}, GROUPS, {"feed_forward.router.renormalise": False}])
def test_sleeping_copies_leave_the_logits_as_they_are(
    changes: dict[str, Any], words: dict[str, str], dtype: torch.dtype
) -> None:
    model = V3.changed(changes)
    state = drawn(model, dtype)
    growth = copy_experts(model, words, given(state))
    near(logits_of(growth.model, grown(state, growth)), logits_of(model, state))
    assert growth.is_exact


@pytest.mark.needs_shared
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_sleeping_copies_of_published_experts_give_the_recorded_logits(family: str) -> None:
    plan, recorded = open_family(folder_of(f"hf_{family}_a")), arrays_of(f"hf_{family}_a")
    model = plan.model
    state = state_of(plan)
    growth = copy_experts(model, {"experts": "x2"}, given(state))
    near(logits_of(growth.model, grown(state, growth), recorded["ids"]), recorded["logits"], 2e-5)


def test_copies_sleep_for_the_steps_that_are_said_and_then_wake() -> None:
    model = V3.changed({"feed_forward.router.bias_rate": 0.1})
    state = drawn(model, torch.float32)
    growth = copy_experts(model, {"experts": "×2"}, given(state))
    assert growth.model.experts is not None
    router = DeepSeekRouter(growth.model.experts.router, 24, 16, init=lambda *given: given[0])  # type: ignore
    after = grown(state, growth)
    router.load_state_dict(
        {name: after[f"{PATH}router.{name}"] for name in ("weight", "selection_bias")}
    )
    rows = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    used = []
    for step in range(40):
        experts = router.choose(rows).experts_TK
        used.append(int((experts % 2).sum()))  # copies follow their experts
        router.after_step(step, {"load": experts.flatten().bincount(minlength=16).float()})
    assert used[0] == 0
    assert any(used)
    steps = int(growth.notes[0].split("at most ")[1].split()[0])
    assert next(step for step, count in enumerate(used) if count) <= steps <= 20


@pytest.mark.parametrize(
    "model",
    [
        SIGMA,
        SIGMA.changed({"norm": "pre", "feed_forward.router.kind": "token_choice"}),
        SIGMA.changed({"feed_forward.expert_bias": True}),
    ],
    ids=["σ", "softmax", "biases"],
)
def test_copies_have_their_experts_weights_and_rows_with_noise(model: ModelConfig) -> None:
    state = drawn(model, torch.float64)
    words = {"experts": "+4", "noise": "0.05"}
    growth = copy_experts(model, words, given(state))
    after = grown(state, growth)
    norms = state[f"{PATH}sparse.experts.w_up"].flatten(1).norm(dim=1)
    order = sorted([*range(8), *chosen(norms.tolist(), 4)])
    is_copy = torch.tensor([False, *(a == b for a, b in pairwise(order))])
    for name, value in state.items():
        if name.startswith(f"{PATH}sparse.experts."):
            assert torch.equal(after[name], value[order])
    row, weight = f"{PATH}router.weight", state[f"{PATH}router.weight"]
    noise = after[row] - weight[order]
    assert not noise[~is_copy].any()
    size = 0.05 * weight.square().mean().sqrt().item()
    assert noise[is_copy].std().item() == pytest.approx(size, rel=0.2)
    assert not growth.is_exact
    others = grown(state, copy_experts(model, words, given(state, seed=9)))
    assert not torch.equal(others[row][is_copy], after[row][is_copy])


def test_without_noise_a_twin_answers_as_its_expert_does() -> None:
    state = drawn(SIGMA, torch.float64)
    growth = copy_experts(SIGMA, {"experts": "×3", "noise": "0"}, given(state))
    near(logits_of(growth.model, grown(state, growth)), logits_of(SIGMA, state))


def test_copies_stay_in_their_experts_group() -> None:
    model = V3.changed(GROUPS)
    state = drawn(model, torch.float64)
    growth = copy_experts(model, {"experts": "+4", "by": "norm"}, given(state))
    after = grown(state, growth)[f"{PATH}sparse.experts.w_down"]
    before = state[f"{PATH}sparse.experts.w_down"]
    for group in range(4):
        own, found = before[2 * group : 2 * group + 2], after[3 * group : 3 * group + 3]
        assert all(_is_among(one, own) for one in found)
        assert all(_is_among(one, found) for one in own)


def _is_among(one: Tensor, others: Tensor) -> bool:
    return any(torch.equal(one, other) for other in others)


def test_the_most_useful_experts_are_copied_at_most_three_times() -> None:
    assert chosen([1.0, 9.0, 4.0, 2.0], 5) == [1, 1, 2, 1, 2]
    assert chosen([0.0, 1.0], 6) == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("model", "words", "answer"),
    [
        (SIGMA, {"experts": "+25"}, "for at most 3 copies of each"),
        (V3.changed(GROUPS), {"experts": "+2"}, "num_groups=4; \\+4 can"),
        (SIGMA, {"experts": "×2", "noise": "-1"}, "noise=-1 is not a share"),
        (
            V3.changed({"feed_forward.router.bias_until_step": 1000}),
            {"experts": "×2"},
            "copies wake within .* and biases move until step 1,000",
        ),
        (SIGMA, {"experts": "+1", "by": "load"}, "there is no prepared data to measure with"),
    ],
)
def test_copies_that_cannot_be_made_are_refused(
    model: ModelConfig, words: dict[str, str], answer: str
) -> None:
    state = drawn(model, torch.float32)
    with pytest.raises(ConfigError, match=answer):
        copy_experts(model, words, given(state))
