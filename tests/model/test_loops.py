"""Loop programs agree with the public code of Huginn, Parcae and Ouro.

The runs in tests/recorded were made with that code in float32 on one thread, at the commits that
their `config_json` names: Parcae without its value embeddings, Ouro with the loss of
arXiv 2510.25741, eq. 4.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from family import LEAVING, PROGRAMS, own_depths, program, set_options, some_tokens, tiny_model
from row_order import assert_reordered, reordered_pass
from shared import shared_folder
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.loops.depth import own_depth
from moebius.model.loops.exits import exit_log_probabilities
from moebius.model.loops.program import DecayInjection, Loops
from moebius.model.transformer import Transformer

RECORDED = Path(__file__).parents[1] / "recorded"
CLOSE = {"rtol": 0, "atol": 1e-5}
# Their names and ours, outside of layers and inside. Both halves of a gated perceptron's first
# matrix are one of ours.
WHOLE = {
    "wte.weight": "embedding",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head.weight",
    "ln_f.weight": "final_norm.weight",
    "norm.weight": "final_norm.weight",
    "adapter.weight": "loops.injection.adapter.weight",
    "ln_prelude.weight": "loops.input_norm.weight",
    "adapter.A_log": "loops.injection.rate_bias",
    "adapter.dt_bias": "loops.injection.step_bias",
    "adapter.B": "loops.injection.input.weight",
    "C.weight": "loops.injection.output.weight",
    "early_exit_gate.weight": "loops.exit_gate.weight",
    "early_exit_gate.bias": "loops.exit_gate.bias",
}
NORMS = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
INNER = {
    "attn.proj": "attention.output",
    "attn.qk_bias": "attention.qk_bias",
    "mlp.fc": "feed_forward.up",
    "mlp.gate_proj": "feed_forward.up",
    "mlp.up_proj": "feed_forward.up",
    "mlp.proj": "feed_forward.down",
    "mlp.down_proj": "feed_forward.down",
    **dict(zip(("norm_1", "norm_2", "norm_3", "norm_4"), NORMS, strict=True)),
    "input_layernorm": NORMS[0],
    "input_layernorm_2": NORMS[1],
    "post_attention_layernorm": NORMS[2],
    "post_attention_layernorm_2": NORMS[3],
}
for letter, ours in {
    "q": "query",
    "k": "key",
    "v": "value",
    "proj": "output",
    "o": "output",
}.items():
    INNER |= dict.fromkeys((f"attn.c_{letter}", f"self_attn.{letter}_proj"), f"attention.{ours}")
DENSE = {
    "norm_layer": "rmsnorm",
    "attention.kind": "dense",
    "feed_forward.kind": "dense",
    "feed_forward.dense_bias": False,
    "head_bias": False,
}


class Recording:
    """A recorded run: its configuration and its weights and gradients under our names."""

    def __init__(self, path: Path, changes: dict[str, Any]) -> None:
        with np.load(path) as file:
            self.values = {key: file[key] for key in file.files}
        given = json.loads(str(self.values["config_json"]))
        prelude, core, coda = (
            given.get(f"n_layers_in_{part}", 0) for part in ("prelude", "recurrent_block", "coda")
        )
        core = core or given["num_hidden_layers"]
        width = given.get("n_embd") or given["hidden_size"]
        heads = given.get("n_heads") or given["num_attention_heads"]
        self.first_layer = {
            "prelude": 0,
            "core_block": prelude,
            "coda": prelude + core,
            "layers": 0,
        }
        loops = given.get("mean_recurrence") or given["total_ut_steps"]
        sizes = {
            "vocab_size": given["vocab_size"],
            "d_model": width,
            "layers_per_group": prelude + core + coda,
            "num_layers": prelude + core * loops + coda,
            "attention.num_heads": heads,
            "attention.d_head": width // heads,
            "attention.positions.width": width // heads,
            "attention.qk_bias": given.get("qk_bias", False),
            "feed_forward.d_feed_forward": given["intermediate_size"],
            "tied_head": given.get("tie_embeddings", False),
            "loops.prelude": prelude,
            "loops.coda": coda,
        }
        self.config = ModelConfig.from_dotted(DENSE | sizes | changes)

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.values[key])

    @property
    def inputs(self) -> Tensor:
        return self.tensor("tokens")[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.tensor("tokens")[:, 1:]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Tensors of weights or gradients, by our names."""
        found: dict[str, Tensor] = {}
        for key in self.values:
            if key.startswith(prefix):
                for name, value in self.translate(key.removeprefix(prefix), self.tensor(key)):
                    found[name] = torch.cat((found[name], value)) if name in found else value
        if self.config.norm == "pre":  # Parcae's ReLU² has a factor of ½, here in the next matrix
            for name in found:
                found[name] *= (
                    (0.5 if prefix == "w/" else 2.0) if "feed_forward.down" in name else 1
                )
        return found

    def translate(self, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        name = name.removeprefix("transformer.").removeprefix("model.")
        if name in WHOLE:
            return [(WHOLE[name], value)]
        part, number, rest = name.split(".", 2)
        layer, inner = (
            f"group.{self.first_layer[part] + int(number)}.",
            rest.removesuffix(".weight"),
        )
        if inner == "attn.Wqkv":
            names = [f"{layer}attention.{each}.weight" for each in ("query", "key", "value")]
            return list(zip(names, value.chunk(3), strict=True))
        if inner == "attn.qk_bias":
            return [(layer + INNER[inner], value.transpose(1, 2))]
        ours = NORMS[2] if inner == "norm_2" and self.config.norm == "pre" else INNER[inner]
        return [(f"{layer}{ours}.weight", value)]

    def model(self, changes: dict[str, Any], *, strict: bool = True) -> Transformer:
        """The recorded model; the state before its first loop is the recorded one."""
        model = Transformer(self.config.changed(changes))
        model.load_state_dict(self.named("w/"), strict=strict)
        if "state" in self.values:
            state = self.tensor("state")
            model.loops.start_state = lambda *given: state  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def check(self, model: Transformer, prefix: str, loss: Tensor) -> None:
        """The loss and every gradient are the recorded ones."""
        loss.backward()
        torch.testing.assert_close(loss, self.tensor(f"{prefix}loss"), **CLOSE)
        expected = self.named(f"{prefix}g/")
        found = {key: value.grad for key, value in model.named_parameters()}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, **CLOSE, msg=lambda text, key=key: f"{key}: {text}"
            )

    def check_logits(self, model: Transformer, prefix: str, logits: Tensor) -> None:
        self.check(model, prefix, F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()))


OF_HUGINN_AND_PARCAE = {
    "attention.positions.base": 50000,
    "attention.positions.pairs": "neighbours",
    "loops.start": "drawn",
}


def huginn(name: str) -> Recording:
    """Of seal-rg/recurrent-pretraining."""
    changes = {
        "norm": "sandwich",
        "feed_forward.activation": "swiglu",
        "scale_embedding": True,
        "initialisation.kind": "takase",
        "loops.inject": "linear",
        "loops.final_norm": "around_coda",
    }
    return Recording(shared_folder() / f"golden/{name}.npz", OF_HUGINN_AND_PARCAE | changes)


def parcae() -> Recording:
    """Of sandyresearch/parcae."""
    changes = {
        "norm": "pre",
        "attention.qk_norm": True,
        "feed_forward.activation": "relu2",
        "loops.inject": "decay",
        "loops.input_norm": True,
    }
    return Recording(RECORDED / "parcae_tiny.npz", OF_HUGINN_AND_PARCAE | changes)


def ouro() -> Recording:
    """Of ByteDance's modeling_ouro.py."""
    changes = {
        "norm": "branch",
        "feed_forward.activation": "swiglu",
        "loops.final_norm": "every_loop",
        "loops.exit_entropy": 0.05,
    }
    return Recording(RECORDED / "ouro_tiny.npz", changes)


DRAWN = {
    "huginn": partial(huginn, "huginn_tiny"),
    "huginn, untied": partial(huginn, "huginn_tiny_untied"),
    "parcae": parcae,
}


def note_state(model: Transformer) -> list[Tensor]:
    """Notes the state that leaves the loops, as recorded."""
    seen: list[Tensor] = []
    if isinstance(model.loops.injection, DecayInjection):
        model.loops.injection.output.register_forward_pre_hook(
            lambda module, given: seen.append(given[0])
        )
    elif model.final_norm is not None:

        def note(module: torch.nn.Module, given: object, result: Tensor) -> None:
            seen.append(result)

        model.final_norm.register_forward_hook(note)
    return seen


@pytest.mark.parametrize(
    ("name", "recorded", "kept", "depths"),
    [
        *(
            (name, f"n{dropped}k{kept}", kept, (dropped + kept,))
            for name in DRAWN
            for dropped, kept in ((3, 2), (0, 4), (0, 1))
        ),
        *(("parcae", "own5-1", 2, (5, 1)), ("parcae", "own2-4", 2, (2, 4))),
    ],
)
def test_the_public_logits_loss_state_and_gradients(
    name: str, recorded: str, kept: int, depths: tuple[int, ...]
) -> None:
    """With one depth, and where every sequence has its own."""
    golden = DRAWN[name]()
    model = golden.model({"loops.depth.gradient_loops": kept})
    alike = len(depths) == 1
    depth = own_depth(model.config, *depths) if alike else own_depths(model, *depths)
    set_options(model, depth=depth)
    seen = note_state(model)
    logits = model(golden.inputs).logits_BSV
    torch.testing.assert_close(logits, golden.tensor(f"{recorded}/logits"), **CLOSE)
    torch.testing.assert_close(seen[0], golden.tensor(f"{recorded}/latent"), **CLOSE)
    golden.check_logits(model, f"{recorded}/", logits)


@pytest.mark.parametrize("recording", [*DRAWN.values(), ouro])
def test_logits_are_the_public_ones_at_every_depth(recording: Callable[[], Recording]) -> None:
    golden = recording()
    model = golden.model({}).eval()
    depths = sorted(int(key.removeprefix("eval/r")) for key in golden.values if key[:6] == "eval/r")
    assert depths[-1] == 16
    for depth in depths:
        set_options(model, depth=own_depth(model.config, depth))
        logits = model(golden.inputs).logits_BSV
        torch.testing.assert_close(logits, golden.tensor(f"eval/r{depth}"), **CLOSE)


def test_ouro_has_the_public_states_gates_loss_and_gradients() -> None:
    golden = ouro()
    model = golden.model({})
    gates: list[Any] = []
    states = note_state(model)
    assert model.loops.exit_gate is not None
    model.loops.exit_gate.register_forward_hook(lambda module, given, gate: gates.append(gate))
    output = model(golden.inputs, targets_BS=golden.targets)
    torch.testing.assert_close(torch.stack(states), golden.tensor("latent"), **CLOSE)
    torch.testing.assert_close(torch.stack(gates), golden.tensor("gates"), **CLOSE)
    log_p = exit_log_probabilities(gates)
    torch.testing.assert_close(log_p.exp(), golden.tensor("exit"), **CLOSE)
    loss = output.cross_entropy / golden.targets.numel() + output.regularisation_B.mean()
    golden.check(model, "", loss)
    # a token leaves at the first loop where the share that has left reaches the threshold
    for threshold in (0.3, 0.6, 1.0):
        left_RBS = log_p.exp().cumsum(0)
        loops_BS = (left_RBS[:-1] < threshold).sum(0)
        logits = golden.tensor("logits").take_along_dim(loops_BS[None, ..., None], 0)[0]
        torch.testing.assert_close(logits, golden.tensor(f"threshold/{threshold}"), **CLOSE)


def test_ouro_has_the_public_gradients_of_the_last_loop_alone() -> None:
    golden = ouro()
    model = golden.model({"loops.exit_entropy": None}, strict=False)
    golden.check_logits(model, "last/", model(golden.inputs).logits_BSV)


# What every key must keep

POSITIONS = 7


def tokens_of(seed: int = 1, num_sequences: int = 3) -> Tensor:
    return some_tokens(num_sequences, POSITIONS, seed=seed)


def logits_of(model: Transformer, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)  # the state before the first loop
    with torch.no_grad():
        return model(tokens).logits_BSV


@pytest.mark.sample(14)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *product(PROGRAMS, ["evaluation", "training", "another depth"]),
        *product(LEAVING, ["own depths"]),
    ],
)
def test_no_later_position_and_no_other_sequence_changes_anything(name, mode):
    model, tokens = program(name).train(mode != "evaluation"), tokens_of()
    if mode == "own depths":
        set_options(model, depth=own_depths(model, 3, 1, 5))
    if mode == "another depth":  # growing or drawn
        set_options(model, depth=own_depth(model.config, 5))
    before, bound = logits_of(model, tokens), reordered_pass(model, num_loops=5)
    for cut in range(1, POSITIONS):
        other = tokens.clone()
        other[:, cut:] = tokens_of(seed=2)[:, cut:]
        assert_reordered(logits_of(model, other)[:, :cut], before[:, :cut], bound)
        other[0] = tokens[0]
        assert_reordered(logits_of(model, other)[0], before[0], bound)


# Depth per sequence


@pytest.mark.parametrize("name", LEAVING)
def test_a_sequence_of_its_own_depth_is_what_it_would_be_alone(name):
    """And its losses, gradients and measures; experts serve the rows of the live sequences."""
    model = program(name)
    set_options(model, measures_loops=True)
    experts = model.config.experts
    assert experts is not None
    model.loops.start_state = lambda e_BSD, *given: 0.5 * e_BSD  # pyright: ignore[reportAttributeAccessIssue]
    tokens, depths = tokens_of(1, 4), (3, 1, 5, 2)
    set_options(model, depth=own_depths(model, *depths))
    together = model(tokens)
    together.logits_BSV.square().sum().backward()
    gradients = [value.grad for value in model.parameters()]
    model.zero_grad()
    for index, depth in enumerate(depths):
        set_options(model, depth=own_depth(model.config, depth))
        alone = model(tokens[index : index + 1])
        alone.logits_BSV.square().sum().backward()
        close = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(together.logits_BSV[index], alone.logits_BSV[0], **close)
        if getattr(experts.router, "balance_scope", "sequence") == "sequence":
            torch.testing.assert_close(
                together.regularisation_B[index], alone.regularisation_B[0], rtol=0, atol=1e-6
            )
        for key in (each for each in together.auxiliary if "/" in each):
            loop = int(key.rpartition("/")[2])
            makes = sum(each >= loop for each in depths) / len(depths)
            expected = alone.auxiliary[key][0] / makes if loop <= depth else torch.zeros(())
            value = together.auxiliary[key][index]
            torch.testing.assert_close(value, expected.to(value), rtol=1e-6, atol=1e-9)
    assert {"state_change/1", "kept_experts/5", "routing_divergence/2"} <= set(together.auxiliary)
    assert "kept_experts/6" not in together.auxiliary
    for value, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(value.grad, gradient, rtol=1e-9, atol=1e-9)
    rows = together.loads["feed_forward"].load_LN.sum(1) / experts.experts_per_row(POSITIONS)
    sparse = [model.config.has_experts(step.member) for step in model.config.schedule_of(5)]
    once = sum(
        model.config.has_experts(step.member)
        for step in model.config.schedule_of(1)
        if step.loop is None
    )
    core = (sum(sparse) - once) // 5
    assert rows.sum().item() == POSITIONS * (4 * once + core * sum(depths))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", LEAVING)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_loops_that_no_sequence_needs_change_nothing(name, mode):
    """Another rank may need them, so this one takes part in their exchanges without a row."""
    found = []
    for others in ((), (7,)):
        model = program(name)
        set_options(model, recompute=mode, depth=own_depths(model, 1, 1, others=others))
        torch.manual_seed(0)
        output = model(tokens_of(1, 2), targets_BS=tokens_of(2, 2))
        (output.cross_entropy + output.regularisation_B.sum()).backward()
        found.append([output.cross_entropy, *(value.grad for value in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_one_loop_without_injection_is_the_model_without_loops():
    plain = tiny_model("middle_half_twice", {"num_layers": 4, "loops": {}})
    looped = tiny_model("middle_half_twice", {"num_layers": 4})
    assert plain.config.loops.is_plain
    assert not looped.config.loops.is_plain
    looped.load_state_dict(plain.state_dict())
    losses = []
    for model in (plain, looped):
        output = model(tokens_of(), targets_BS=tokens_of(seed=2))
        losses.append(output.cross_entropy + output.regularisation_B.sum())
        losses[-1].backward()
    assert torch.equal(*losses)
    for one, other in zip(plain.parameters(), looped.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def saved_bytes(num_loops: int, gradient_loops: int) -> int:
    """What a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}
    model = tiny_model("huginn_moe", {"loops.depth.gradient_loops": gradient_loops})
    set_options(model, depth=own_depth(model.config, num_loops))

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens_of(), targets_BS=tokens_of(seed=2))
    assert output.cross_entropy.requires_grad
    return sum(kept.values())


def test_memory_grows_with_the_loops_that_have_a_gradient_and_with_no_others():
    bytes_of = {(loops, kept): saved_bytes(loops, kept) for loops in (4, 16) for kept in (1, 2, 3)}
    one_loop = bytes_of[4, 2] - bytes_of[4, 1]
    assert one_loop > 10_000
    assert bytes_of[4, 3] - bytes_of[4, 2] == pytest.approx(one_loop, rel=0.05)
    for kept in (1, 2, 3):
        assert bytes_of[16, kept] == pytest.approx(bytes_of[4, kept], rel=0.01)


class Masked(Loops):
    """The slow reference: every loop computes all sequences, and those that are done keep theirs."""

    def forward(self, steps, x_BSD, *, final_norm, predict):
        layer, schedule, depth = steps.apply, steps.schedule, steps.depth
        assert depth.of_sequence is not None
        assert final_norm is not None
        has_grad, num_sequences = torch.is_grad_enabled(), len(x_BSD)
        before, after = schedule[: self.first], schedule[len(schedule) - self.config.coda :]
        for step in before:
            x_BSD = layer(step, x_BSD, None)
        e_BSD = None
        if self.injection is not None:
            e_BSD = x_BSD if self.input_norm is None else self.input_norm(x_BSD)
            e_BSD = self.injection.prepare(e_BSD)
            x_BSD = self.start_state(x_BSD, steps)
        for loop in range(depth.num_loops):
            places = [depth.place(loop, sequence) for sequence in range(num_sequences)]
            with torch.set_grad_enabled(has_grad and loop >= depth.no_gradient):
                y_BSD = x_BSD
                if self.injection is not None and e_BSD is not None:
                    y_BSD = self.injection(y_BSD, e_BSD)
                if self.condition is not None:
                    own = [max(place, 0) for place in places]
                    y_BSD = self.condition(y_BSD, own, list(depth.of_sequence))
                for step in schedule:
                    if step.loop == loop:
                        y_BSD = layer(step, y_BSD, None)
                if self.config.final_norm == "every_loop":
                    y_BSD = final_norm(y_BSD)
            is_live = torch.tensor(places)[:, None, None] >= 0
            x_BSD = torch.where(is_live, y_BSD, x_BSD)
        if self.injection is not None:
            x_BSD = self.injection.finish(x_BSD)
        if self.config.final_norm == "around_coda":
            x_BSD = final_norm(x_BSD)
        for step in after:
            x_BSD = layer(step, x_BSD, None)
        if self.config.final_norm == "every_loop" and not after:
            return [x_BSD], []
        return [final_norm(x_BSD)], []


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LEAVING)
def test_sequences_that_leave_equal_the_masked_reference(name, dtype):
    """Up to rounding, since products have other numbers of rows."""
    found = []
    for masked in (False, True):
        model = program(name).to(dtype)
        set_options(model, depth=own_depths(model, 3, 1, 5, 2))
        if masked:
            model.loops.__class__ = Masked
        torch.manual_seed(0)
        tokens, targets = (some_tokens(4, POSITIONS, seed=seed) for seed in (1, 2))
        loss = model(tokens, targets_BS=targets).cross_entropy
        loss.backward()
        found.append((loss, [value.grad for value in model.parameters()]))
    (loss, gradients), (expected, reference) = found
    bound = reordered_pass(model, num_loops=5)
    assert_reordered(loss, expected, bound)
    for one, other in zip(gradients, reference, strict=True):
        assert_reordered(one, other, bound)
