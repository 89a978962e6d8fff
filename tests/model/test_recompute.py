"""Recomputation changes memory and nothing else: loss, gradients, side effects, random numbers."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family import (
    NAMES,
    PROGRAMS,
    make_uneven,
    micro_batch_of,
    program,
    set_options,
    some_tokens,
    tiny_model,
)
from parts import layers
from torch import Tensor, nn
from torch_modes import LiveMemory

from moebius.model.execution.precision import forward_in
from moebius.model.execution.recompute import Recompute, recomputing, run_recomputed, save_decision
from moebius.model.layers import LayerNorm, RMSNorm
from moebius.model.loops.depth import PassDepth
from moebius.model.moe import LocalDispatcher, LocalRows
from moebius.model.routing import Routes
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss

ROWS = some_tokens(8, 7, seed=5)
CHOICE = {"kind": "token_choice", "top_k": 2}
RANDOM = {"renormalise": True, "second_expert": "random", "drop_order": "slot_major"}
DRAWS = {  # what no recipe of the family has
    "jitter": ("switch", CHOICE | {"jitter": 0.2, "capacity_factor": 0.7}),
    "jitter and a random second expert": (
        "gshard",
        CHOICE | RANDOM | {"jitter": 0.2, "capacity_factor": 1.0},
    ),
    "drawn experts": ("sut", {"kind": "sut", "top_k": 3, "sampled": 2}),
    "priority": ("switch", CHOICE | {"capacity_factor": 0.5, "drop_order": "priority"}),
}


def model_of(name: str, mode: Recompute, changes: dict[str, Any] | None = None) -> Transformer:
    if name in PROGRAMS:
        model = program(name)
    else:
        recipe, router = DRAWS.get(name, (name, None))
        changes = {"attention.sampled": 1} if name == "drawn experts" else changes or {}
        changes |= {"feed_forward.router": router} if router else {}
        model = make_uneven(tiny_model(recipe, changes))
    set_options(model, recompute=mode)
    return model


def loss_and_gradients(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    model.before_step(10**9)  # a transition has switched
    torch.manual_seed(3)
    result = micro_batch_loss(
        partial(forward_in, model, dtype), micro_batch_of(ROWS), global_sequences=len(ROWS)
    )
    drawn_next = torch.rand(4)
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {
        "loss": result.loss,
        "regularisation": result.regularisation,
        "drawn next": drawn_next,
    }


@pytest.mark.quick(8)
@pytest.mark.sample(24)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (name, (torch.float32, torch.bfloat16)[index % 2])
            for index, name in enumerate([*NAMES, *DRAWS])
        ),
        *((name, torch.float64) for name in PROGRAMS),
    ],
)
def test_loss_and_every_gradient_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    expected = loss_and_gradients(model_of(name, "none"), dtype)
    for mode in ("selective", "full"):
        found = loss_and_gradients(model_of(name, mode), dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("own", [True, False])
def test_only_a_users_own_part_makes_a_step_keep_the_generators_state(
    own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: (reads.append(1), state())[1])
    (tmp_path / "noise.py").write_text(
        "import torch\ndef drawn(z): return z.relu() * torch.rand_like(z)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"feed_forward.activation": "noise:drawn"} if own else {}
    expected, found = (
        loss_and_gradients(model_of("moeut", mode, changes), torch.float32)
        for mode in ("none", "full")
    )
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    # one read per pass seeds its draws
    assert (len(reads) > 2) == own


@pytest.mark.parametrize("name", ["moeut", "sut", "mh_moe"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_every_step_runs_twice_and_hooks_on_the_layer_once(name: str, mode: Recompute) -> None:
    model, calls, seconds = model_of(name, mode), [], []
    for layer in layers(model):
        layer.register_forward_hook(lambda *_: calls.append("layer"))
        layer.attention.register_forward_hook(
            lambda *_: (seconds if recomputing() else calls).append("step")
        )
    loss_and_gradients(model, torch.bfloat16)
    depth = model.config.num_layers
    assert (calls.count("layer"), calls.count("step"), len(seconds)) == (depth, depth, depth)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, ("selective", "full")[index % 2]) for index, name in enumerate([*NAMES, *DRAWS])],
)
def test_a_second_run_that_rounds_otherwise_decides_as_the_first(
    name: str, mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise far above rounding, in the second run only: where the routers decided anew, routes
    would differ.
    """
    norms: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
        each: each.forward for each in (LayerNorm, RMSNorm)
    }
    dispatch = LocalDispatcher.dispatch
    noise = torch.Generator().manual_seed(8)
    first: list[list[list[int]]] = []
    second: list[list[list[int]]] = []

    def noisy(self: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        normed = norms[type(self)](self, x)
        return normed + torch.randn(normed.shape, generator=noise) if recomputing() else normed

    def recorded(self: LocalDispatcher, x_UD: Tensor, routes: Routes) -> LocalRows:
        found = [routes.source_N.tolist(), routes.expert_N.tolist()]
        (second if recomputing() else first).append(found)
        return dispatch(self, x_UD, routes)

    for norm in norms:
        monkeypatch.setattr(norm, "forward", noisy)
    monkeypatch.setattr(LocalDispatcher, "dispatch", recorded)
    model = model_of(name, mode)
    # loops without gradient would have no second run
    set_options(model, depth=PassDepth(model.config.num_repeats))
    loss_and_gradients(model, torch.float32)
    assert sorted(second) == sorted(first)  # the second runs come in reverse


def test_what_remains_shrinks_and_goes() -> None:
    """Bytes after the forward pass, and after the backward pass nothing but gradients, without a
    garbage collector.
    """
    found = {}
    gc.collect()
    gc.disable()
    try:
        for mode in ("none", "selective", "full"):
            model = tiny_model(
                "moeut", {"d_model": 64, "attention.d_head": 16, "feed_forward.d_expert": 64}
            )
            set_options(model, recompute=mode)
            with LiveMemory() as live:
                output = model(torch.zeros(16, 32, dtype=torch.int64))
                found[mode] = live.num_bytes
                output.logits_BSV.sum().backward()
                del output
            gradients = sum(
                p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None
            )
            assert live.num_bytes <= gradients + 4096, mode
    finally:
        gc.enable()
    assert found["selective"] < 0.2 * found["none"]
    assert found["full"] <= found["selective"]  # on one rank nothing travels


def test_without_gradients_or_with_a_cache_nothing_is_run_twice() -> None:
    model = model_of("moeut", "full")
    calls = []
    layers(model)[0].attention.register_forward_hook(lambda *_: calls.append(recomputing()))
    tokens = ROWS[:, :-1]
    with torch.no_grad():
        plain = model(tokens).logits_BSV
    cache = model.new_cache()
    cached = torch.cat(
        [model(tokens[:, :4], cache).logits_BSV, model(tokens[:, 4:], cache).logits_BSV], 1
    )
    torch.testing.assert_close(cached, plain, rtol=1e-4, atol=1e-5)
    cached.sum().backward()
    assert calls
    assert not any(calls)


def test_a_retained_graph_is_run_again_for_every_backward_pass() -> None:
    model = model_of("moeut", "selective")
    loss = model(ROWS).logits_BSV.square().sum()
    loss.backward(retain_graph=True)
    once_through = {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, 2 * once_through[name], msg=name)


def test_a_second_run_that_asks_for_more_is_an_error() -> None:
    def step(x: Tensor) -> tuple[Tensor, None]:
        for _ in range(2 if recomputing() else 1):
            save_decision(lambda: torch.zeros(1))
        return x.exp(), None

    y, _ = run_recomputed("full", torch.nn.Module(), step, torch.ones(2, requires_grad=True))
    with pytest.raises(AssertionError, match="more than the first run's 1 values"):
        y.sum().backward()


def test_the_second_run_begins_where_the_backward_pass_enters_the_step() -> None:
    """Not where the first tensor is missing: after the sum, whose backward needs none."""
    events = []

    def step(x: Tensor) -> tuple[Tensor, None]:
        if recomputing():
            events.append("second run")
        y = x.exp()
        y.register_hook(lambda _: events.append("backward of the sum is done"))
        return y + 1, None

    y, _ = run_recomputed("full", torch.nn.Module(), step, torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert events == ["second run", "backward of the sum is done"]
