"""What each model promises (causal? batch-invariant? dropless? balanced?), held against what it
does, from embedding to logits.

Both directions: a promise that is made is kept at every cut, with uneven routers, up to the rounding
of products with other numbers of rows; one that is not made is seen broken (else the table would call
a model worse than it is).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from family import (
    LEAVING,
    NAMES,
    PROGRAMS,
    VOCABULARY,
    make_uneven,
    own_depths,
    program,
    set_options,
    some_tokens,
    tiny_config,
    tiny_model,
)
from row_order import reordered_pass
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.loops.depth import own_depth
from moebius.model.routers.router import RouterConfig
from moebius.model.transformer import ModelOutput, Transformer

SEQUENCES, POSITIONS = 16, 6
TOKENS = some_tokens(SEQUENCES, POSITIONS, seed=3)


# Orders in which rows ask for places, and groups along the sequence, which no recipe has
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"top {top_k}, {order}": (
        "top_k",
        {
            "feed_forward.allow_future_leak": True,
            "feed_forward.router": {
                "kind": "token_choice",
                "top_k": top_k,
                "capacity_factor": 1.0,
                "drop_order": order,
            },
        },
    )
    for top_k in (1, 2)
    for order in ("position_major", "token_major", "slot_major", "priority")
}
OTHERS["neighbours"] = (
    "mixture_of_tokens",
    {
        "feed_forward.allow_future_leak": True,
        "feed_forward.router.axis": "sequence",
        "feed_forward.router.sequences_per_group": 3,
    },
)
OTHERS["transition, token_major"] = (
    "transition",
    {
        "feed_forward.allow_future_leak": True,
        "feed_forward.router.capacity_factor": 1.25,
        "feed_forward.router.drop_order": "token_major",
    },
)
LEAK = 1e-9  # in float64: rounding stays below it, and whatever reads a token exceeds it


@dataclass
class Leaks:
    """The largest change of a logit where nothing should change, over all cuts."""

    past: float = 0.0  # of positions before the cut, when all sequences change after it
    own_past: float = 0.0  # of the same positions, when only this sequence changes after it
    others: float = 0.0  # of other sequences, when one sequence changes after the cut


def run(model: Transformer, tokens: Tensor, *, seed: int = 0) -> ModelOutput:
    torch.manual_seed(seed)  # what a router draws in training must not count as a leak
    with torch.no_grad():
        return model(tokens)


def measure(model: Transformer) -> Leaks:
    """Temporal leak: every cut, since a cut on a border of groups would miss a leak inside them."""
    generator, leaks = torch.Generator().manual_seed(7), Leaks()
    before = run(model, TOKENS).logits_BSV
    for cut in range(1, POSITIONS):
        other = torch.randint(VOCABULARY, TOKENS.shape, generator=generator)
        changed = torch.cat((TOKENS[:, :cut], other[:, cut:]), 1)
        leaks.past = max(
            leaks.past, difference(run(model, changed).logits_BSV, before, slice(None), slice(cut))
        )
        for sequence in (0, SEQUENCES - 1):
            one = TOKENS.clone()
            one[sequence, cut:] = other[sequence, cut:]
            after = run(model, one).logits_BSV
            rest = [index for index in range(SEQUENCES) if index != sequence]
            leaks.own_past = max(leaks.own_past, difference(after, before, sequence, slice(cut)))
            leaks.others = max(leaks.others, difference(after, before, rest, slice(None)))
    return leaks


def config_of(name: str) -> ModelConfig:
    return tiny_config(*(OTHERS | PROGRAMS).get(name, (name, {})))


def states(name: str, *, common: float) -> Iterator[Transformer]:
    """In training and evaluation, on either side of a transition, at another depth, and where every
    sequence makes its own number of loops: a promise holds for the whole run.
    """
    recipe, changes = OTHERS.get(name, (name, {}))
    model = tiny_model(recipe, changes, dtype=torch.float64) if recipe in NAMES else program(name)
    make_uneven(model, common=common)
    for step in sorted({0, getattr(router_of(model.config), "switch_step", 0)}):
        model.before_step(step)
        yield model.train()
        yield model.eval()
    if name in PROGRAMS:
        set_options(model, depth=own_depth(model.config, 5))
        yield model.train()
    if name in LEAVING:
        set_options(model, depth=own_depths(model, *(1, 3, 4, 2) * (SEQUENCES // 4)))
        yield model.train()


def largest(name: str) -> tuple[float, float, float]:
    """Leaks in training and evaluation, with rows that have much and rows that have little in
    common.

    A capacity that one position exhausts hides later ones, one that nobody exhausts hides all.
    """
    leaks = [measure(model) for common in (3.0, 0.3) for model in states(name, common=common)]
    return (
        max(leak.past for leak in leaks),
        max(leak.own_past for leak in leaks),
        max(leak.others for leak in leaks),
    )


def difference(after: Tensor, before: Tensor, sequences: Any, positions: slice) -> float:
    return (after[sequences] - before[sequences])[..., positions, :].abs().max().item()


@pytest.mark.quick(13)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_stays_below_a_leak(name: str) -> None:
    for model in states(name, common=3.0):
        largest_logit = run(model, TOKENS).logits_BSV.abs().max().item()
        assert reordered_pass(model) * largest_logit < LEAK / 10


def router_of(config: ModelConfig) -> RouterConfig | None:
    return None if config.experts is None else config.experts.router


@pytest.mark.quick(11)
@pytest.mark.parametrize("name", [n for n in NAMES if tiny_config(n).promises.causal])
def test_a_causal_model_does_not_care_how_much_follows(name: str) -> None:
    """Unless it has a capacity, which is a share of the rows there are."""
    config = tiny_config(name)
    changes = []
    for model in states(name, common=3.0):
        whole = run(model, TOKENS).logits_BSV
        for cut in (1, 4):
            part = run(model, TOKENS[:, :cut]).logits_BSV
            changes.append((part - whole[:, :cut]).abs().max().item())
    has_capacity = getattr(router_of(config), "capacity_factor", None) is not None
    assert max(changes) > 1e-3 if has_capacity else max(changes) < LEAK


UNLIKE_TRAINING = [
    n for n in NAMES if tiny_config(n).evaluation_promises != tiny_config(n).promises
]


@pytest.mark.parametrize("name", UNLIKE_TRAINING)
def test_promises_of_evaluation_alone_are_kept_there(name: str) -> None:
    """GShard refuses rows in training only: there it reads the future, here it does not."""
    promises = tiny_config(name).evaluation_promises
    assert promises.causal or name != "gshard"
    for common in (3.0, 0.3):
        model = make_uneven(tiny_model(name, dtype=torch.float64), common=common).eval()
        leaks = measure(model)
        assert (max(leaks.past, leaks.own_past) < LEAK) or not promises.causal
        assert (leaks.others < LEAK) == promises.batch_invariant
        for load in run(model, TOKENS).loads.values():
            served_in_full = torch.equal(load.load_LN.sum(1), load.wanted_L)
            assert served_in_full or not promises.dropless


@pytest.mark.quick(5)
@pytest.mark.sample(20)
@pytest.mark.parametrize("name", [*NAMES, *OTHERS, *PROGRAMS])
def test_every_promise_is_kept_and_every_other_is_seen_broken(name: str) -> None:
    promises = config_of(name).promises
    past, own_past, others = largest(name)
    if promises.causal:
        assert max(past, own_past) < LEAK
    else:
        assert past > LEAK
    assert (others < LEAK) == promises.batch_invariant
    outputs = [run(model, TOKENS) for model in states(name, common=3.0)]
    loads = [load for output in outputs for load in output.loads.values()]
    if not loads:
        assert promises.balanced
        assert promises.dropless
        return
    served_in_full = all(torch.equal(load.load_LN.sum(1), load.wanted_L) for load in loads)
    if promises.dropless:
        assert served_in_full
    even = all((load.load_LN == load.load_LN[:, :1]).all() for load in loads)
    assert even == promises.balanced
