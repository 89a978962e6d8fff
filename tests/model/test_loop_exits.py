"""Sequences leave the loops by an exit rule; losses, balancing and measures of several loops."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family import (
    NAMES,
    VOCABULARY,
    make_uneven,
    set_options,
    some_tokens,
    tiny_config,
    tiny_model,
)
from row_order import assert_reordered, reordered_pass
from torch import Tensor

from moebius.model.balance import RouterReport
from moebius.model.documents import Documents, mark_documents
from moebius.model.execution.depth_losses import DepthStates, WeightedLoss
from moebius.model.loops.depth import PassDepth, own_depth
from moebius.model.loops.exits import ExitRule, exit_log_probabilities
from moebius.model.transformer import Transformer
from moebius.train.record.route_tap import tap

R, SEQUENCES, POSITIONS = 6, 5, 9
GATED = {"loops.exit_entropy": 0.1}


def looped(recipe: str, changes: dict[str, Any] | None = None) -> Transformer:
    """With R loops that differ, and a gate that answers otherwise for every token."""
    config = tiny_config(recipe, changes or {})
    once = config.loops.prelude + config.loops.coda
    number = {"num_layers": once + R * config.core_layers}
    model = make_uneven(tiny_model(recipe, {**(changes or {}), **number}, dtype=torch.float64))
    if model.loops.exit_gate is not None:
        generator = torch.Generator().manual_seed(5)
        weight = model.loops.exit_gate.weight
        weight.data.add_(torch.randn(weight.shape, generator=generator))
    return model


def core_of(model: Transformer) -> list[Any]:
    """The layers that are repeated."""
    loops = model.config.loops
    return list(model.group)[loops.prelude : len(model.group) - loops.coda]


def tokens_of(seed: int = 1) -> Tensor:
    return some_tokens(SEQUENCES, POSITIONS, seed=seed)


def padded(length: int = 5) -> Documents:
    """Marks what follows the first positions as padding."""
    ids = torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int64)
    ids[:, length:] = -1
    return mark_documents(ids, torch.device("cpu"), attention=True, balance=False)


# Exit rules -----------------------------------------------------------------------------------------------------------


def measures_by_hand(model: Transformer, tokens: Tensor, kind: str) -> Tensor:
    """The slow reference, (R − 1, B): all loops of all sequences, and their measures afterwards."""
    states: list[Any] = []
    gates: list[Any] = []
    logits: list[Tensor] = []
    core_of(model)[-1].register_forward_hook(lambda module, given, result: states.append(result[0]))
    if model.loops.exit_gate is not None:
        model.loops.exit_gate.register_forward_hook(lambda module, given, gate: gates.append(gate))
        model.train()(tokens)
        model.eval()
    for loops in range(1, R + 1):
        set_options(model, depth=own_depth(model.config, loops))
        states.clear()
        logits.append(model(tokens).logits_BSV.log_softmax(-1))
    left = torch.ones(SEQUENCES, POSITIONS)
    found = []
    for loop in range(R - 1):
        if kind == "gate":
            left = left * (1 - gates[loop].sigmoid())
            found.append(1 - left)
        elif loop == 0:
            found.append(torch.full_like(left, torch.inf))  # nothing to compare with
        elif kind == "state":
            change = (states[loop] - states[loop - 1]).norm(dim=-1)
            found.append(change / states[loop].norm(dim=-1))
        else:
            before, now = logits[loop - 1], logits[loop]
            found.append((before.exp() * (before - now)).sum(-1))
    return torch.stack(found).mean(-1)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("recipe", "changes", "kind"),
    [
        ("huginn_moe", {}, "kl"),
        ("huginn_moe", {"loops.start": "zero"}, "state"),
        ("parcae_moe", {}, "kl"),
        ("ouro_moe", GATED, "gate"),
        ("ouro_moe", GATED, "state"),
        ("moeut", {}, "kl"),
    ],
)
@torch.no_grad()
def test_a_sequence_leaves_where_the_rule_says_and_equals_a_pass_of_that_depth(
    recipe, changes, kind
):
    tokens = tokens_of()
    if recipe == "ouro_moe" and kind == "state":  # without a norm that ends the loop
        changes = changes | {"loops.final_norm": "once"}
    measures = measures_by_hand(looped(recipe, changes).eval(), tokens, kind)
    in_the_middle = measures[2].sort().values[1:3].mean().item()  # some leave after the third loop
    done = measures > in_the_middle if kind == "gate" else measures < in_the_middle
    wanted = [rows.index(True) + 1 if any(rows) else R for rows in done.T.tolist()]
    assert len(set(wanted)) > 1, "every sequence leaves at once, so nothing is compared"

    model = looped(recipe, changes).eval()
    rule = ExitRule(kind, in_the_middle)
    rule.check(model.config)
    set_options(model, exit_rule=rule)
    rows: list[int] = []
    hook = core_of(model)[0].register_forward_hook(
        lambda module, given, result: rows.append(len(given[0]))
    )
    output = model(tokens)
    hook.remove()
    assert output.auxiliary["loops"].tolist() == wanted
    assert rows == [sum(loops > loop for loops in wanted) for loop in range(R)]
    set_options(model, exit_rule=None)
    for row, loops in enumerate(wanted):
        set_options(model, depth=own_depth(model.config, loops))
        found, bound = model(tokens).logits_BSV[row], reordered_pass(model, num_loops=R)
        assert_reordered(found, output.logits_BSV[row], bound)


@pytest.mark.parametrize("kind", ["kl", "state", "gate"])
@torch.no_grad()
def test_a_measure_that_is_not_a_number_ends_no_loops(kind):
    model, tokens = looped("ouro_moe", GATED).eval(), tokens_of() % 9
    model.embedding[VOCABULARY - 1], tokens[3, 4] = torch.nan, VOCABULARY - 1
    others = ExitRule(kind, 1e-9 if kind == "gate" else 1e9)  # leave at once
    set_options(model, exit_rule=others)
    output = model(tokens)
    once = 2 if kind == "kl" else 1
    assert output.auxiliary["loops"].tolist() == [once, once, once, R, once]
    assert output.logits_BSV[3].isnan().any()


def test_a_saturated_gate_never_rounds_the_chance_to_go_on_to_nothing():
    gates = [torch.full((1, 1), value) for value in (200.0, -200.0, 5.0, 9.0)]
    log_p = exit_log_probabilities(gates).flatten()
    assert log_p[[0, 1, 3]].tolist() == pytest.approx([0, -400, -205], abs=0.1)
    random = [torch.randn(3, 4) for _ in range(5)]
    torch.testing.assert_close(exit_log_probabilities(random).exp().sum(0), torch.ones(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_at_a_threshold_of_one_no_sequence_leaves_early(dtype):
    model = looped("ouro_moe", GATED).eval().to(dtype)
    assert model.loops.exit_gate is not None
    model.loops.exit_gate.bias.fill_(3e4)
    set_options(model, exit_rule=ExitRule("gate", 1.0))
    seen: list[Any] = []
    model.loops.exit_gate.register_forward_hook(lambda module, given, gate: seen.append(gate))
    assert model(tokens_of()).auxiliary["loops"].tolist() == [R] * SEQUENCES
    assert {gate.dtype for gate in seen} == {torch.float32}
    set_options(model, exit_rule=ExitRule("gate", 0.999))
    assert model(tokens_of()).auxiliary["loops"].tolist() == [1] * SEQUENCES


def can_leave(name: str) -> bool:
    try:
        ExitRule("state", 1e9).check(tiny_config(name))
    except ValueError:
        return False
    return True


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", [name for name in NAMES if can_leave(name)])
def test_a_pass_goes_on_without_a_live_sequence(name):
    """Another rank may still have one."""
    model, tokens = make_uneven(tiny_model(name)).eval(), tokens_of()
    set_options(model, exit_rule=ExitRule("state", 1e9))
    found = model(tokens)
    assert found.auxiliary["loops"].tolist() == [1] * SEQUENCES
    set_options(model, exit_rule=None, depth=own_depth(model.config, 1))
    assert torch.equal(model(tokens).logits_BSV, found.logits_BSV)
    if model.config.loops.read_loops(7) == (6,):  # refused beside losses of several loops
        set_options(model.train(), depth=PassDepth(7, 0, (1,) * SEQUENCES))
        model(tokens, targets_BS=tokens).cross_entropy.backward()


@torch.no_grad()
def test_padding_does_not_decide_when_a_sequence_leaves():
    model, tokens, documents = looped("huginn_moe").eval(), tokens_of(), padded()
    set_options(model, exit_rule=ExitRule.parse("state=0.3"))
    found = model(tokens, documents=documents).auxiliary["loops"]
    other = torch.cat((tokens[:, :5], tokens_of(2)[:, 5:]), 1)
    assert torch.equal(model(other, documents=documents).auxiliary["loops"], found)
    assert torch.equal(model(tokens[:, :5]).auxiliary["loops"], found)


def test_padding_and_masked_targets_count_in_no_entropy_and_no_measure():
    model, tokens = looped("ouro_moe", GATED), tokens_of()
    set_options(model, measures_loops=True)
    counts = (torch.arange(POSITIONS) < 5).expand(SEQUENCES, POSITIONS)
    found = model(tokens, targets_BS=tokens, loss_mask_BS=counts, documents=padded())
    alone = model(tokens[:, :5], targets_BS=tokens[:, :5])
    torch.testing.assert_close(found.cross_entropy, alone.cross_entropy)
    for name in ("exit_entropy", "loops", "state_change/2", "kept_experts/2"):
        torch.testing.assert_close(found.auxiliary[name], alone.auxiliary[name])
    masked = model(tokens, targets_BS=tokens, loss_mask_BS=counts).auxiliary
    for name in ("exit_entropy", "loops"):
        torch.testing.assert_close(masked[name], alone.auxiliary[name])
    whole = model(tokens, targets_BS=tokens).auxiliary["exit_entropy"]
    assert not torch.allclose(masked["exit_entropy"], whole, rtol=1e-3)
    nothing = model(tokens, targets_BS=tokens, loss_mask_BS=counts | True).auxiliary["exit_entropy"]
    assert torch.equal(nothing, whole)


def checked(recipe: str, rule: str) -> None:
    ExitRule.parse(rule).check(tiny_config(recipe))


def run(cache: tuple[Any, ...] | None = None, **options: Any) -> None:
    model = looped("huginn_moe").eval()
    set_options(model, **options)
    model(tokens_of(), None if cache is None else model.new_cache(*cache))


NONE = "is no exit rule: write kl=X or state=X with X above 0"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        *(
            (partial(ExitRule.parse, text), NONE)
            for text in ("kl", "kl=0", "state=-1", "gate=1.5", "gate=nan", "entropy=1", "kl=x")
        ),
        (partial(ExitRule, "kl", -1), "kl=-1 is no exit rule"),
        *((partial(checked, name, "kl=1"), "no loops") for name in ("dense", "sut", "moeut_aabb")),
        (partial(checked, "huginn_moe", "gate=0.5"), "the model has no gate: use kl or state"),
        (
            partial(run, (), depth=PassDepth(2)),
            "cache has 14 depth steps, and a pass of 2 loops has 6",
        ),
        (partial(run, (), exit_rule=ExitRule("kl", 0.1)), "a pass with a cache makes every loop"),
        (partial(run, (0,)), "shared_loops=0 must be at least 1"),
        (partial(run, depth=PassDepth(0)), "num_loops=0 must be at least 1"),
    ],
)
@torch.no_grad()
def test_what_cannot_be_asked_of_a_pass_is_refused(mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()


# Losses and balancing of several loops --------------------------------------------------------------------------------


def loss_of(model: Transformer) -> Tensor:
    torch.manual_seed(0)  # the state before the first loop
    return model(tokens_of(), targets_BS=tokens_of(2)).cross_entropy


def test_a_coda_that_runs_after_several_loops_is_one_depth_step_for_losses_on_states():
    """Its state is that of the last loop."""
    seen: list[DepthStates] = []

    def loss(states: DepthStates) -> Tensor:
        seen.append(states)
        return states.tokens_BS.new_zeros(len(states.tokens_BS), dtype=torch.float32)

    for values in ({}, {"loops.read_out": (1, 4)}):
        model = looped("huginn_moe", {"loops.depth": {}, **values})
        set_options(model, depth_losses=(WeightedLoss("own:loss", 1.0, loss),))
        loss_of(model)
    plain, reads = (each.states_L for each in seen)
    assert len(plain) == len(reads) == model.config.num_layers
    assert all(map(torch.equal, plain, reads))


def test_a_loss_may_read_logits_out_of_every_state():
    """They are the ones that `cross_entropy` is taken of, with their gradients."""
    found: list[tuple[Tensor, Tensor]] = []

    def loss(states: DepthStates) -> Tensor:
        for state_BSD in states.states_L:
            logits_BSV = states.logits(state_BSD)
            own = F.cross_entropy(logits_BSV.mT, states.targets_BS)
            found.append((own, states.cross_entropy(state_BSD).mean()))
        return found[-1][0].expand(len(states.tokens_BS))

    model = looped("huginn_moe", {"loops.depth": {}})
    set_options(model, depth_losses=(WeightedLoss("own:loss", 1.0, loss),))
    cross_entropy = loss_of(model)
    assert len(found) == model.config.num_layers
    for own, theirs in found:
        torch.testing.assert_close(own, theirs)
    torch.testing.assert_close(found[-1][0], cross_entropy / tokens_of().numel())
    gradients = [
        torch.autograd.grad(one, model.embedding, retain_graph=True)[0] for one in found[0]
    ]
    torch.testing.assert_close(*gradients)


def test_a_loss_on_the_routing_over_loops_reaches_the_router():
    """Of the mean probabilities of a layer's experts in its first two loops."""

    def loss(states: DepthStates) -> Tensor:
        of_loop = {
            step.loop: report["feed_forward"].sums["probability"]
            for step, report in states.routing
            if step.loop is not None and "feed_forward" in report
        }
        assert [*of_loop] == [*range(R)]
        return (of_loop[0] - of_loop[1]).square().sum((1, 2))

    model = looped("moeut", {"layers_per_group": 1})
    set_options(model, depth_losses=(WeightedLoss("own:loss", 1.0, loss),))
    tokens = tokens_of()
    output = model(tokens, targets_BS=tokens)
    assert output.auxiliary["loss"].shape == (SEQUENCES,)
    set_options(model, depth_losses=())
    without = model(tokens, targets_BS=tokens).regularisation_B
    difference = (output.regularisation_B - without).sum()
    torch.testing.assert_close(difference, output.auxiliary["loss"].sum())
    difference.backward()
    routers = [value.grad for name, value in model.named_parameters() if "router" in name]
    assert any(grad is not None and grad.abs().max() > 0 for grad in routers)


def test_the_loss_of_chosen_loops_is_their_mean():
    model = looped("huginn_moe", {"loops.depth": {}})
    losses = []
    for loops in (1, 4, R):
        set_options(model, depth=own_depth(model.config, loops))
        losses.append(loss_of(model))
    values = {"loops.depth": {}, "loops.read_out": (1, 4)}
    chosen = looped("huginn_moe", values)
    chosen.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss_of(chosen), torch.stack(losses).mean())
    set_options(chosen, depth=own_depth(chosen.config, 2))  # a pass that does not reach the fourth
    set_options(model, depth=own_depth(model.config, 2))
    torch.testing.assert_close(loss_of(chosen), (losses[0] + loss_of(model)) / 2)


def test_each_loop_is_balanced_by_itself_if_asked():
    reports: list[tuple[int, dict[str, RouterReport]]] = []
    model = looped("moeut", {"loops.balance": "each"})

    def keep(member: int, module: Any, given: Any, result: Any) -> None:
        reports.append((member, result[1]))

    for member, layer in enumerate(model.group):
        layer.register_forward_hook(partial(keep, member))
    output = model(tokens_of(), targets_BS=tokens_of(2))
    expected = torch.zeros(SEQUENCES, dtype=torch.float64)
    for member, kind, router in model.routers():
        for _, report in (each for each in reports if each[0] == member):
            for loss in router.losses(report[kind].sums, model.running):
                share = 1 / len(model.config.sparse_members) if loss.mean_over_layers else 1
                expected += loss.coefficient * share * loss.value_B / R
    torch.testing.assert_close(output.regularisation_B, expected)
    together = looped("moeut")(tokens_of(), targets_BS=tokens_of(2)).regularisation_B
    assert not torch.allclose(together, expected, rtol=1e-3)


# Measures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["moeut_sandwich", "moeut", "switch"])
def test_the_measures_of_loops_are_those_of_the_routes(recipe):
    changes = {} if recipe != "switch" else {"layers_per_group": 2}
    model = looped(recipe, changes)
    output = model(tokens_of(), targets_BS=tokens_of(2))
    assert not [name for name in output.auxiliary if "/" in name]  # on request alone
    set_options(model, measures_loops=True)
    states: list[Tensor] = []
    core_of(model)[-1].register_forward_hook(lambda module, given, result: states.append(result[0]))
    with tap(model) as calls:
        found = model(tokens_of(), targets_BS=tokens_of(2)).auxiliary
    experts = model.config.experts
    assert experts is not None
    chosen: dict[int, list[Tensor]] = {}  # of every layer, by loop: (row, expert), true or not
    for call in calls:
        step = model.config.schedule[call.id.depth - 1]
        if call.id.kind == "feed_forward" and step.loop is not None:
            pairs = torch.zeros(SEQUENCES, POSITIONS, experts.num_experts, dtype=torch.float64)
            pairs.view(-1, experts.num_experts)[call.routes.target_N, call.routes.expert_N] = 1
            chosen.setdefault(step.member, []).append(pairs)
    kept, divergences = [], []
    for first, second, *_ in chosen.values():
        kept.append((first * second).sum((1, 2)) / second.sum((1, 2)).clamp_min(1))
        counts = torch.stack((first.sum(1), second.sum(1)))
        p, q = counts / counts.sum(-1, keepdim=True).clamp_min(1)
        both = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
        divergences.append(both * counts.sum(-1).all(0))
    for name, values in (("kept_experts/2", kept), ("routing_divergence/2", divergences)):
        expected = torch.stack(values).mean(0).to(found[name])
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)
    change = (states[2] - states[1]).norm(dim=-1) / states[2].norm(dim=-1)
    torch.testing.assert_close(found["state_change/3"], change.mean(1).detach())
    assert f"kept_experts/{R}" in found
    assert f"kept_experts/{R + 1}" not in found


def entropy(p_BE: Tensor) -> Tensor:
    return -torch.special.xlogy(p_BE, p_BE).sum(-1)


# Caches that loops share ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["huginn_moe", "moeut"])
@pytest.mark.parametrize("shared", [1, 2, R])
@torch.no_grad()
def test_a_shared_cache_gives_every_loop_the_keys_of_the_last_one_that_wrote(recipe, shared):
    model, tokens = looped(recipe).eval(), tokens_of()
    prompt, new = tokens[:, :6], tokens[:, 6:7]
    full = model.new_cache()
    first = model(prompt, full).logits_BSV
    cache = model.new_cache(shared)
    torch.testing.assert_close(model(prompt, cache).logits_BSV, first, rtol=0, atol=1e-6)
    core = model.config.core_layers
    assert len({id(entry) for entry in cache}) == len(cache) - (R - shared) * core
    # by hand: caches of their own, whose past is that of the last loop with the same rest
    by_hand = model.new_cache()
    for step in model.config.schedule:
        loop = step.loop
        if loop is not None:
            loop = max(other for other in range(R) if other % shared == loop % shared)
        [source] = [
            s.index for s in model.config.schedule if s.member == step.member and s.loop == loop
        ]
        by_hand[step.index].keys = full[source].keys
        by_hand[step.index].values = full[source].values
    expected = model(new, by_hand).logits_BSV
    torch.testing.assert_close(model(new, cache).logits_BSV, expected, rtol=0, atol=1e-6)
    same = torch.allclose(model(new, full).logits_BSV, expected, rtol=0, atol=1e-6)
    assert same == (shared == R)
    assert cache[0].length == 7
