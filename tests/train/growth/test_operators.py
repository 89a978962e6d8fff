"""What grows beside the logits: parts and copies separate, units are redrawn, layers are renumbered."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from grown_case import MIXTURES, TOKENS, drawn, feeds, grow, logits_of, model_of, near, routes
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.deepseek import DeepSeekRouter
from moebius.model.transformer import ModelOutput, Transformer
from moebius.train.families.table import shapes_of
from moebius.train.growth.experts import chosen

ROUTER = "group.0.feed_forward.router.weight"
BANK = "group.0.feed_forward.sparse.experts."


def trained_pass(model: ModelConfig, state: Any) -> tuple[ModelOutput, dict[str, Tensor]]:
    """Returns a pass over some tokens, and the gradients of its loss."""
    built = Transformer(model).double().train()
    built.load_state_dict(state)
    output = built(TOKENS[:, :-1], targets_BS=TOKENS[:, 1:])
    output.cross_entropy.backward()
    return output, {n: one.grad for n, one in built.named_parameters() if one.grad is not None}


def test_a_token_may_choose_two_copies_of_a_dense_layer() -> None:
    model = model_of("biased gates")
    state = drawn(model)
    after, weights, _ = grow(model, state, "mixture=8/4")
    near(logits_of(after.changed(routes(top_k=8)), weights), logits_of(model, state))


# Parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MIXTURES)
def test_parts_of_experts_have_no_parameters_more(kind: str) -> None:
    model = model_of(kind)
    after = grow(model, drawn(model), "split=3")[0]
    sizes = [
        sum(math.prod(shape) for name, shape in shapes_of(each).items() if ".router." not in name)
        for each in (model, after)
    ]
    has_biases = after.experts is not None and after.experts.expert_bias  # of outputs
    assert sizes[1] - sizes[0] == 2 * len(model.sparse_members) * 8 * 24 * has_biases


@pytest.mark.parametrize("kind", ["σ-MoE", "softmax", "softmax of K, biases", "V3, groups"])
def test_parts_separate_and_moments_are_those_of_their_gradients(kind: str) -> None:
    model = model_of(kind)
    state = drawn(model)
    before = trained_pass(model, state)[1]
    powers = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 1}
    moments = {
        f"optimizer.{slot}.{name}": value**power
        for name, value in before.items()
        for slot, power in powers.items()
    }
    after, found, _ = grow(model, state | moments, "split=2")
    gradients = trained_pass(after, {name: found[name] for name in shapes_of(after)})[1]
    assert (gradients[ROUTER][0::2] - gradients[ROUTER][1::2]).abs().max() > 1e-3
    for name, value in gradients.items():
        rows = slice(0, None, 2 if "b_down" in name else 1)  # only the first part's bias is copied
        for slot, power in powers.items() if ".sparse.experts." in name else ():
            moment, wanted = found[f"optimizer.{slot}.{name}"], value**power
            torch.testing.assert_close(moment[rows], wanted[rows], atol=1e-14, rtol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "V2", "V3, groups"])
@pytest.mark.parametrize("pool", [False, True])
def test_parts_have_the_balancing_loss_of_their_experts(kind: str, pool: bool) -> None:
    scope = routes(balance=0.5, balance_scope="micro_batch", balance_pool=pool)
    model = model_of(kind, scope)
    state = drawn(model)
    passes = [
        trained_pass(*each)[0] for each in ((model, state), grow(model, state, "split=2")[:2])
    ]
    losses = [each.regularisation_B.double().mean() for each in passes]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("sizes", ["8/2", "8/4", "4/4"])
def test_parts_of_a_dense_layer_share_a_row_and_separate_by_their_gradients(sizes: str) -> None:
    model = model_of("llama")
    after, weights, _ = grow(model, drawn(model), f"mixture={sizes}")
    num_experts, parts = map(int, sizes.split("/"))
    assert len(weights[ROUTER].unique(dim=0)) == num_experts // parts
    gradient = trained_pass(after, weights)[1][ROUTER]
    assert len(gradient.round(decimals=12).unique(dim=0)) == num_experts


# Redrawn units -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "redrawn"), [(".5", 6), ("0.25", 3), ("0.9", 11)])
def test_dropped_units_are_redrawn_and_survive_in_other_copies(share: str, redrawn: int) -> None:
    model = model_of("llama")
    state = drawn(model)
    exact = grow(model, state, "mixture=8/2")[1]
    _, after, growths = grow(model, state, f"mixture=8/2 drop={share}")
    same_EF = (after[f"{BANK}w_down"] == exact[f"{BANK}w_down"]).all(-1)
    same_EX = (after[f"{BANK}w_up"] == exact[f"{BANK}w_up"]).all(1)
    assert torch.equal(same_EX, same_EF.repeat(1, 2))  # gate and content
    assert (~same_EF).sum(1).tolist() == [redrawn] * 8
    survivors_CGF = same_EF.view(4, 2, 12).sum(0)  # of four copies
    assert survivors_CGF.max() - survivors_CGF.min() <= 1
    assert not growths[0].is_exact
    new = Counter(after[f"{BANK}w_down"][~same_EF].flatten().tolist())
    assert max(new.values()) == 1, "two experts drew the same numbers"


def test_redrawn_units_have_the_mean_and_deviation_of_their_matrix() -> None:
    model = model_of("llama", {"d_model": 64} | feeds(d_feed_forward=96))
    state = drawn(model)
    up, down = (f"group.0.feed_forward.{name}.weight" for name in ("up", "down"))
    state[up][:96] += 0.5  # the gate
    after = grow(model, state, "mixture=16/2 drop=0.5")[1]
    halves = after[f"{BANK}w_up"].chunk(2, -1), state[up].chunk(2)
    for found, wanted in (*zip(*halves, strict=True), (after[f"{BANK}w_down"], 2 * state[down])):
        near(found.mean(), wanted.mean(), 0.01)
        near(found.std(), wanted.std(), 0.03 * wanted.std().item())


def test_growth_is_drawn_from_the_seed() -> None:
    for kind, words in (("llama", "mixture=8/4 drop=0.5"), ("softmax", "experts=+4")):
        model = model_of(kind)
        state = drawn(model)
        takes = [grow(model, state, words, seed)[2][0].takes for seed in (0, 0, 1)]
        assert takes[0] == takes[1] != takes[2]


# Copies ------------------------------------------------------------------------------------------


def test_copies_sleep_for_the_steps_that_are_said_and_then_wake() -> None:
    model = model_of("V3", routes(bias_rate=0.1))
    after, weights, growths = grow(model, drawn(model, torch.float32), "experts=×2")
    assert after.experts is not None
    router = DeepSeekRouter(after.experts.router, 24, 16, init=lambda *given: given[0])  # type: ignore
    prefix = ROUTER.removesuffix("weight")
    router.load_state_dict({each: weights[prefix + each] for each in ("weight", "selection_bias")})
    rows = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    used = []
    for step in range(40):
        experts = router.choose(rows).experts_TK
        used.append(int((experts % 2).sum()))  # copies follow their experts
        router.after_step(step, {"load": experts.flatten().bincount(minlength=16).float()})
    assert used[0] == 0
    steps = int(growths[0].notes[0].split("at most ")[1].split()[0])
    assert next(step for step, count in enumerate(used) if count) <= steps <= 20
    until = model_of("V3", routes(bias_rate=0.1, bias_until_step=steps - 1))
    after = grow(until, drawn(model, torch.float32), "experts=×2")[0]
    assert after.model_dump()["feed_forward"]["router"]["bias_until_step"] is None


@pytest.mark.parametrize("kind", ["MoEUT", "softmax", "σ, gated, biases"])
def test_copies_have_their_experts_weights_and_rows_with_noise(kind: str) -> None:
    model = model_of(kind)
    state = drawn(model)
    after = grow(model, state, "experts=+4 noise=0.05")[1]
    norms = state[f"{BANK}w_up"].flatten(1).norm(dim=1)
    order = sorted([*range(8), *chosen(norms.tolist(), 4)])
    is_copy = torch.tensor([False, *(a == b for a, b in pairwise(order))])
    for name in (each for each in state if each.startswith(BANK)):
        assert torch.equal(after[name], state[name][order])
    noise = after[ROUTER] - state[ROUTER][order]
    assert not noise[~is_copy].any()
    size = 0.05 * state[ROUTER].square().mean().sqrt().item()
    assert noise[is_copy].std().item() == pytest.approx(size, rel=0.2)


def test_copies_stay_in_their_experts_group() -> None:
    model = model_of("V3, groups")
    state = drawn(model)
    found, before = (
        each[f"{BANK}w_down"].flatten(1) for each in (grow(model, state, "experts=+4")[1], state)
    )
    for group in range(4):
        own, grown = before[2 * group :][:2], found[3 * group :][:3]
        assert torch.equal(grown.unique(dim=0), own.unique(dim=0))


def test_the_most_useful_experts_are_copied_at_most_three_times() -> None:
    assert chosen([1.0, 9.0, 4.0, 2.0], 5) == [1, 1, 2, 1, 2]
    assert chosen([0.0, 1.0], 6) == [1, 1, 1, 0, 0, 0]


# Loops -------------------------------------------------------------------------------------------


def test_every_loop_applies_the_core_to_the_state() -> None:
    model = model_of("SwitchHead")
    state = drawn(model)
    after, weights, _ = grow(model, state, "prelude=0:1 core=2:4 coda=5:6 loops=3")
    assert after.num_repeats == 3
    unrolled = [0, 2, 3, 2, 3, 2, 3, 5]
    long = model.changed({"num_layers": len(unrolled), "layers_per_group": len(unrolled)})
    layers = {
        f"group.{new}.{name.split('.', 2)[2]}": value
        for new, old in enumerate(unrolled)
        for name, value in state.items()
        if name.startswith(f"group.{old}.")
    }
    others = {name: value for name, value in state.items() if not name.startswith("group.")}
    near(logits_of(after, weights), logits_of(long, others | layers))


def test_layers_and_their_lists_are_renumbered() -> None:
    def grown(kind: str, words: str) -> Any:
        model = model_of(kind)
        return grow(model, drawn(model), f"{words} coda=5:6 loops=2")[0]

    found = grown("windows", "prelude=0:1 core=3:5")
    assert (found.sparse_members, found.attention.window_layers) == ((1, 3), (2,))
    assert [step.member for step in found.schedule] == [0, 1, 2, 1, 2, 3]
    assert grown("windows", "core=0:1").attention.window is None
    assert grown("first layers dense", "core=0:1").sparse_members == (1,)
