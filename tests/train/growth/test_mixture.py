"""Dense models become mixtures with the same logits, or with some hidden units redrawn."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from grown_case import TOKENS, drawn, given, grown, logits_of, near
from hf_case import make_run, model_of
from published_case import arrays_of, folder_of, state_of
from starts import LAYOUTS, loaded, on
from trained import different

from moebius import start_from
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer
from moebius.plugins import PluginError
from moebius.train.families.table import family_of, open_family
from moebius.train.growth.depth import depth
from moebius.train.growth.growth import Growth
from moebius.train.growth.mixture import mixture
from moebius.train.growth.table import OPERATORS, parse
from moebius.train.record.run_folder import open_run

LLAMA = ModelConfig.from_dotted(
    {
        "vocab_size": 31,
        "d_model": 24,
        "num_layers": 3,
        "layers_per_group": 3,
        "norm": "pre",
        "norm_layer": "rmsnorm",
        "attention.kind": "dense",
        "attention.d_head": 6,
        "feed_forward.kind": "dense",
        "feed_forward.activation": "swiglu",
        "feed_forward.d_feed_forward": 24,
        "feed_forward.dense_bias": False,
        "initialisation.kind": "normal",
    }
)
DENSE = {
    "llama": {},
    "biases and relu": {"feed_forward.dense_bias": True, "feed_forward.activation": "relu"},
    "biased gates": {"feed_forward.dense_bias": True, "feed_forward.activation": "clamped_swiglu"},
    "peri": {"norm": "peri", "norm_layer": "layernorm", "feed_forward.activation": "gelu"},
    "post": {"norm": "post", "norm_layer": "layernorm"},
    "repeated": {"num_layers": 6},
    "switchhead": {"attention.kind": "switchhead"},
}
SIZES = ["4/1", "4/2", "8/4", "8/4 top=8", "6/1 top=3", "4/4"]


def words_of(text: str) -> dict[str, str]:
    """Returns `mixture=E/G` and what follows it."""
    return {name: value for name, _, value in (each.partition("=") for each in text.split())}


def mixture_of(model: ModelConfig, state: Any, text: str, seed: int = 0) -> Growth:
    return mixture(model, words_of(f"mixture={text}"), given(state, seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_logits_of_a_mixture_are_those_of_the_dense_model(
    kind: str, sizes: str, dtype: torch.dtype
) -> None:
    model = LLAMA.changed(DENSE[kind])
    state = drawn(model, dtype)
    growth = mixture_of(model, state, sizes)
    after = grown(state, growth)
    near(logits_of(growth.model, after), logits_of(model, state))
    assert growth.is_exact
    rows_ED = after["group.0.feed_forward.router.weight"]
    _, parts = map(int, sizes.split()[0].split("/"))
    assert len(rows_ED.unique(dim=0)) * parts == len(rows_ED)


BECOMES = {  # by family: what its mixture is exported as; none: with moebius' own code
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen2": None,
    "qwen3": "qwen3_moe",
    "olmo2": None,
}


@pytest.mark.needs_shared
@pytest.mark.parametrize("family", BECOMES)
def test_the_logits_of_a_published_dense_model_become_those_of_its_mixture(family: str) -> None:
    folder = folder_of(f"hf_{family}_a")
    try:
        plan = open_family(folder)
    except PluginError:
        pytest.skip(f"{family} is no family yet")
    state = state_of(plan)
    recorded = arrays_of(f"hf_{family}_a")
    for dtype in (torch.float64, torch.float32):
        before = {name: value.to(dtype) for name, value in state.items()}
        growth = mixture_of(plan.model, before, "8/4")
        found = logits_of(growth.model, grown(before, growth), recorded["ids"])
        near(found, logits_of(plan.model, before, recorded["ids"]))
        near(found, recorded["logits"], 2e-5)
        exported = family_of(growth.model)
        assert (exported and exported.model_types[0]) == BECOMES[family]


def test_the_experts_of_a_copy_separate_by_their_gradients() -> None:
    state = drawn(LLAMA, torch.float64)
    growth = mixture_of(LLAMA, state, "8/4")
    model = Transformer(growth.model).double()
    model.load_state_dict(grown(state, growth))
    model.train()(TOKENS[:, :-1], targets_BS=TOKENS[:, 1:]).cross_entropy.backward()
    for layer in range(3):
        gradient = dict(model.named_parameters())[f"group.{layer}.feed_forward.router.weight"].grad
        assert gradient is not None
        assert len(gradient.round(decimals=12).unique(dim=0)) == 8


@pytest.mark.parametrize(("share", "redrawn"), [(".5", 6), ("0.25", 3), ("0.9", 11)])
def test_dropped_hidden_units_are_redrawn_like_the_layer_and_survive_elsewhere(
    share: str, redrawn: int
) -> None:
    state = drawn(LLAMA, torch.float64)
    exact = grown(state, mixture_of(LLAMA, state, "8/2"))
    growth = mixture_of(LLAMA, state, f"8/2 drop={share}")
    after = grown(state, growth)
    bank = "group.1.feed_forward.sparse.experts."
    up_EDX, down_EFD = (after[f"{bank}{name}"] for name in ("w_up", "w_down"))
    same_EF = (down_EFD == exact[f"{bank}w_down"]).all(-1)
    for half_EDF, exact_EDF in zip(
        up_EDX.chunk(2, -1), exact[f"{bank}w_up"].chunk(2, -1), strict=True
    ):
        assert torch.equal((half_EDF == exact_EDF).all(1), same_EF)
    assert (~same_EF).sum(1).tolist() == [redrawn] * 8
    survivors_CGF = same_EF.view(4, 2, 12).sum(0)  # of four copies
    assert survivors_CGF.max() - survivors_CGF.min() <= 1
    assert not growth.is_exact
    new = Counter(down_EFD[~same_EF].flatten().tolist())
    assert max(new.values()) == 1, "two experts drew the same numbers"


def test_redrawn_units_have_the_mean_and_deviation_of_their_matrix() -> None:
    model = LLAMA.changed({"d_model": 64, "feed_forward.d_feed_forward": 96})
    state = drawn(model, torch.float64)
    path = "group.0.feed_forward."
    state[f"{path}up.weight"][:96] += 0.5  # the gate
    state[f"{path}down.weight"] *= 2
    after = grown(state, mixture_of(model, state, "16/2 drop=0.5"))
    for name, source, half in (("w_up", "up", 0), ("w_up", "up", 1), ("w_down", "down", 0)):
        halves = 2 if source == "up" else 1
        found = after[f"{path}sparse.experts.{name}"].chunk(halves, -1)[half]
        wanted = state[f"{path}{source}.weight"].chunk(halves, 0)[half]
        factor = 1 if source == "up" else 2
        near(found.mean(), factor * wanted.mean(), 0.01)
        near(found.std(), factor * wanted.std(), 0.03 * wanted.std().item())


def test_a_mixture_is_drawn_from_the_seed() -> None:
    state = drawn(LLAMA, torch.float32)
    takes = [mixture_of(LLAMA, state, "8/4 drop=0.5", seed).takes for seed in (0, 0, 1)]
    assert takes[0] == takes[1] != takes[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "words",
    [
        "mixture=8/2 split=2",
        "mixture=8/4 core=0:3 loops=1",
        "prelude=0:1 core=1:3 loops=1 mixture=4/2 split=3",
    ],
)
def test_operators_that_follow_each_other_keep_the_logits(words: str, dtype: torch.dtype) -> None:
    model, state = LLAMA, drawn(LLAMA, dtype)
    wanted = logits_of(model, state)
    for name, own in parse(words.split()):
        growth = OPERATORS[name].grow(model, own, given(state))
        model, state = growth.model, grown(state, growth)
    near(logits_of(model, state), wanted)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "mesh"), LAYOUTS, ids=str)
def test_every_layout_makes_the_same_mixture_with_loops(
    world: int, mesh: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    model, run_dir = model_of("dense"), tmp_path / "run"
    trunk = make_run(tmp_path / "trunk", model, data=str(data))
    words = "prelude=0:1 core=1:2 coda=3:4 loops=2 mixture=8/4 drop=.4"
    start = start_from(trunk, *on({"ep": 1} | mesh), "train.micro_batch=4", grow=words)
    open_run(start.config, run_dir, start.source)
    found = loaded(world, start.config, run_dir)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    looped = depth(model.config, words_of(words[: words.index(" mixture")]), given(state))
    between = grown(state, looped)
    wanted = grown(between, mixture_of(looped.model, between, "8/4 drop=.4"))
    assert different(found, {f"model.{name}": value for name, value in wanted.items()}) == []
