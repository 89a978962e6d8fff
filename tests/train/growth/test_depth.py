"""Loops made of layers: with one loop the logits are those of the model without the others."""

from typing import Any

import pytest
import torch
from grown_case import State, drawn, given, grown, logits_of, near
from published_case import arrays_of, folder_of, state_of

from moebius.model.config.model_config import ModelConfig
from moebius.train.families.table import open_family
from moebius.train.growth.depth import depth
from moebius.train.growth.growth import Growth

MIXTURE = ModelConfig.from_dotted(
    {
        "vocab_size": 31,
        "d_model": 24,
        "num_layers": 6,
        "layers_per_group": 6,
        "feed_forward.d_feed_forward": 20,
        "feed_forward.num_experts": 6,
        "feed_forward.d_expert": 8,
        "feed_forward.router.top_k": 2,
        "attention.d_head": 6,
    }
)
DEEPSEEK = {
    "norm": "pre",
    "feed_forward.router.kind": "deepseek",
    "feed_forward.router.top_k": 2,
    "feed_forward.sparse_layers": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "σ-MoE with SwitchHead": {},
    "first layers dense": DEEPSEEK | {"attention.kind": "dense"},
    "windows": {
        "norm": "pre",
        "attention.kind": "dense",
        "attention.window": 3,
        "attention.window_layers": (1, 4),
        "feed_forward.sparse_layers": "every_second",
    },
    "dense": {"norm": "pre", "attention.kind": "dense", "feed_forward.kind": "dense"},
    "learned positions, aabb": {
        "attention.positions.kind": "learned",
        "attention.positions.max_positions": 16,
        "order": "aabb",
        "tied_head": True,
    },
}
WORDS = [
    "prelude=0:1 core=2:4 coda=5:6",
    "prelude=0:2 core=2:5 coda=5:6",
    "prelude=0:1 core=3:6",
    "core=0:2 coda=4:6",
    "core=0:6",
]


def depth_of(model: ModelConfig, text: str) -> Growth:
    words = dict(each.split("=") for each in text.split())
    return depth(model, words, given({}))


def without(state: State, layers: set[int]) -> dict[str, torch.Tensor]:
    """Returns weights whose layers add nothing: all of their numbers are zero."""
    zeroed = tuple(f"group.{layer}." for layer in layers)
    return {
        name: torch.zeros_like(value) if name.startswith(zeroed) else value
        for name, value in state.items()
    }


def left_out(text: str, num_layers: int) -> set[int]:
    ranges = [each.partition("=")[2].split(":") for each in text.split() if ":" in each]
    return set(range(num_layers)) - {n for a, b in ranges for n in range(int(a), int(b))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("text", WORDS)
def test_one_loop_gives_the_logits_of_the_pruned_model(
    kind: str, text: str, dtype: torch.dtype
) -> None:
    model = MIXTURE.changed(MODELS[kind])
    state = drawn(model, dtype)
    growth = depth_of(model, f"{text} loops=3")
    after = grown(state, growth)
    pruned = without(state, left_out(text, model.num_layers))
    near(logits_of(growth.model.with_loops(1), after), logits_of(model, pruned), 1e-6)
    assert growth.model.num_repeats == 3


def test_every_loop_applies_the_core_to_the_state() -> None:
    state = drawn(MIXTURE, torch.float64)
    growth = depth_of(MIXTURE, "prelude=0:1 core=2:4 coda=5:6 loops=3")
    unrolled = [0, 2, 3, 2, 3, 2, 3, 5]
    size = {"num_layers": len(unrolled), "layers_per_group": len(unrolled)}
    layers = {
        f"group.{new}.{name.split('.', 2)[2]}": value
        for new, old in enumerate(unrolled)
        for name, value in state.items()
        if name.startswith(f"group.{old}.")
    }
    others = {name: value for name, value in state.items() if not name.startswith("group.")}
    wanted = logits_of(MIXTURE.changed(size), others | layers)
    near(logits_of(growth.model, grown(state, growth)), wanted)


@pytest.mark.needs_shared
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("text", ["core=0:1 coda=2:3", "prelude=0:1 core=1:2 coda=2:3"])
def test_one_loop_of_a_published_mixture_gives_its_pruned_logits(family: str, text: str) -> None:
    plan = open_family(folder_of(f"hf_{family}_a"))
    recorded = arrays_of(f"hf_{family}_a")
    state = state_of(plan)
    lost = left_out(text, plan.model.num_layers)
    for dtype in (torch.float64, torch.float32):
        before = {name: value.to(dtype) for name, value in state.items()}
        growth = depth_of(plan.model, f"{text} loops=1")
        found = logits_of(growth.model, grown(before, growth), recorded["ids"])
        near(found, logits_of(plan.model, without(before, lost), recorded["ids"]), 1e-6)
        assert growth.is_exact == (not lost)
        if not lost:
            near(found, recorded["logits"], 2e-5)


def test_layers_and_their_lists_are_renumbered() -> None:
    model = MIXTURE.changed(MODELS["windows"])
    found = depth_of(model, "prelude=0:1 core=3:5 coda=5:6 loops=2").model
    assert found.sparse_members == (1, 3)
    assert getattr(found.attention, "window_layers", None) == (2,)
    assert [step.member for step in found.schedule] == [0, 1, 2, 1, 2, 3]
    none = depth_of(model, "core=0:1 coda=5:6 loops=2").model
    assert getattr(none.attention, "window", None) is None
    only = depth_of(MIXTURE.changed(MODELS["first layers dense"]), "core=0:1 coda=5:6 loops=2")
    assert only.model.sparse_members == (1,)
