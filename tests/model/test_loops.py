"""Loop programs agree with the public code of Huginn, Parcae and Ouro.

The runs in tests/recorded were made with that code in float32 on one thread, at the commits that
their `config_json` names: Parcae without its value embeddings, Ouro with the loss of
arXiv 2510.25741, eq. 4.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from family import LEAVING, PROGRAMS, VOCABULARY, own_depths, program, set_options, tiny_model
from row_order import assert_reordered, reordered_pass
from shared import shared_folder
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.recompute import Recompute
from moebius.model.loops.depth import own_depth
from moebius.model.loops.exits import exit_log_probabilities
from moebius.model.loops.program import DecayInjection, Loops
from moebius.model.transformer import Transformer

RECORDED = Path(__file__).parents[1] / "recorded"
CLOSE = {"rtol": 0, "atol": 1e-5}


class Recording:
    """A recorded run: its configuration and its weights and gradients under our names."""

    layers: ClassVar[
        dict[str, int]
    ]  # the first layer of each part of the group, by their name for it
    whole: ClassVar[dict[str, str]]  # names outside of layers
    inner: ClassVar[dict[str, str]]  # names inside of a layer

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.values = {key: file[key] for key in file.files}
        self.given = json.loads(str(self.values["config_json"]))

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
                found |= self.translate(key.removeprefix(prefix), self.tensor(key))
        return found

    def translate(self, name: str, value: Tensor) -> dict[str, Tensor]:
        name = name.removeprefix("transformer.").removeprefix("model.")
        if name in self.whole:
            return {self.whole[name]: value}
        part, number, rest = name.split(".", 2)
        return {f"group.{self.layers[part] + int(number)}.{self.inner[rest]}": value}

    def model(self, config: ModelConfig, *, strict: bool = True) -> Transformer:
        """The recorded model; the state before its first loop is the recorded one."""
        model = Transformer(config)
        model.load_state_dict(self.named("w/"), strict=strict)
        if "state" in self.values:
            state = self.tensor("state")
            model.loops.start_state = lambda *given: state  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def check(self, model: Transformer, prefix: str, logits: Tensor) -> None:
        """The loss and every gradient are the recorded ones."""
        loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        loss.backward()
        torch.testing.assert_close(loss, self.tensor(f"{prefix}loss"), **CLOSE)
        expected = self.named(f"{prefix}g/")
        found = {key: value.grad for key, value in model.named_parameters()}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, **CLOSE, msg=lambda text, key=key: f"{key}: {text}"
            )


class Huginn(Recording):
    """Of seal-rg/recurrent-pretraining."""

    whole: ClassVar[dict[str, str]] = {
        "wte.weight": "embedding",
        "lm_head.weight": "head.weight",
        "ln_f.weight": "final_norm.weight",
        "adapter.weight": "loops.injection.adapter.weight",
    }
    inner: ClassVar[dict[str, str]] = {
        "norm_1.weight": "attention_norm.weight",
        "norm_2.weight": "attention_output_norm.weight",
        "norm_3.weight": "feed_forward_norm.weight",
        "norm_4.weight": "feed_forward_output_norm.weight",
        "attn.proj.weight": "attention.output.weight",
        "attn.qk_bias": "attention.qk_bias",
        "mlp.fc.weight": "feed_forward.up.weight",
        "mlp.proj.weight": "feed_forward.down.weight",
    }

    def __init__(self, name: str) -> None:
        shared = shared_folder()
        if shared is None:
            pytest.skip("recorded runs of the official code are not beside the project")
        super().__init__(shared / f"golden/{name}.npz")
        given, width = self.given, self.given["n_embd"]
        prelude, core = given["n_layers_in_prelude"], given["n_layers_in_recurrent_block"]
        coda, channels = given["n_layers_in_coda"], width // given["n_heads"]
        type(self).layers = {"prelude": 0, "core_block": prelude, "coda": prelude + core}
        self.config = ModelConfig.from_dotted(
            {
                "vocab_size": given["vocab_size"],
                "d_model": width,
                "layers_per_group": prelude + core + coda,
                "num_layers": prelude + core * given["mean_recurrence"] + coda,
                "norm": "sandwich",
                "norm_layer": "rmsnorm",
                "attention.kind": "dense",
                "attention.num_heads": given["n_heads"],
                "attention.d_head": channels,
                "attention.qk_bias": given["qk_bias"],
                "attention.positions.width": channels,
                "attention.positions.base": given["rope_base"],
                "attention.positions.pairs": "neighbours",
                "feed_forward.kind": "dense",
                "feed_forward.activation": "swiglu",
                "feed_forward.d_feed_forward": given["intermediate_size"],
                "feed_forward.dense_bias": False,
                "head_bias": False,
                "tied_head": given["tie_embeddings"],
                "scale_embedding": True,
                "initialisation.kind": "takase",
                "loops.prelude": prelude,
                "loops.coda": coda,
                "loops.start": "drawn",
                "loops.inject": "linear",
                "loops.final_norm": "around_coda",
            }
        )

    def translate(self, name: str, value: Tensor) -> dict[str, Tensor]:
        if not name.endswith("attn.Wqkv.weight"):
            value = value.transpose(1, 2) if name.endswith("qk_bias") else value
            return super().translate(name, value)
        parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
        norm = name.replace("attn.Wqkv", "norm_1")
        layer = next(iter(super().translate(norm, value))).removesuffix("attention_norm.weight")
        return {f"{layer}attention.{each}.weight": part for each, part in parts}


class Parcae(Recording):
    """Of sandyresearch/parcae."""

    layers: ClassVar[dict[str, int]] = {"prelude": 0, "core_block": 1, "coda": 3}
    whole: ClassVar[dict[str, str]] = {
        "wte.weight": "embedding",
        "ln_f.weight": "final_norm.weight",
        "ln_prelude.weight": "loops.input_norm.weight",
        "adapter.A_log": "loops.injection.rate_bias",
        "adapter.dt_bias": "loops.injection.step_bias",
        "adapter.B": "loops.injection.input.weight",
        "C.weight": "loops.injection.output.weight",
    }
    inner: ClassVar[dict[str, str]] = {
        "norm_1.weight": "attention_norm.weight",
        "norm_2.weight": "feed_forward_norm.weight",
        "attn.c_q.weight": "attention.query.weight",
        "attn.c_k.weight": "attention.key.weight",
        "attn.c_v.weight": "attention.value.weight",
        "attn.c_proj.weight": "attention.output.weight",
        "mlp.fc.weight": "feed_forward.up.weight",
        "mlp.proj.weight": "feed_forward.down.weight",
    }
    config = ModelConfig.from_dotted(
        {
            "vocab_size": 31,
            "d_model": 16,
            "layers_per_group": 4,
            "num_layers": 10,
            "norm": "pre",
            "norm_layer": "rmsnorm",
            "attention.kind": "dense",
            "attention.num_heads": 2,
            "attention.d_head": 8,
            "attention.qk_norm": True,
            "attention.positions.width": 8,
            "attention.positions.base": 50000,
            "attention.positions.pairs": "neighbours",
            "feed_forward.kind": "dense",
            "feed_forward.activation": "relu2",
            "feed_forward.d_feed_forward": 24,
            "feed_forward.dense_bias": False,
            "head_bias": False,
            "tied_head": True,
            "loops.prelude": 1,
            "loops.coda": 1,
            "loops.start": "drawn",
            "loops.inject": "decay",
            "loops.input_norm": True,
        }
    )

    def __init__(self) -> None:
        super().__init__(RECORDED / "parcae_tiny.npz")

    def named(self, prefix: str) -> dict[str, Tensor]:
        """As in the base; its ReLU² has a factor of ½, which is here in the matrix after it."""
        factor = 0.5 if prefix == "w/" else 2.0
        found = super().named(prefix)
        down = {key: factor * found[key] for key in found if "feed_forward.down" in key}
        return found | down


class Ouro(Recording):
    """Of ByteDance's modeling_ouro.py."""

    layers: ClassVar[dict[str, int]] = {"layers": 0}
    whole: ClassVar[dict[str, str]] = {
        "embed_tokens.weight": "embedding",
        "lm_head.weight": "head.weight",
        "norm.weight": "final_norm.weight",
        "early_exit_gate.weight": "loops.exit_gate.weight",
        "early_exit_gate.bias": "loops.exit_gate.bias",
    }
    inner: ClassVar[dict[str, str]] = {
        "input_layernorm.weight": "attention_norm.weight",
        "input_layernorm_2.weight": "attention_output_norm.weight",
        "post_attention_layernorm.weight": "feed_forward_norm.weight",
        "post_attention_layernorm_2.weight": "feed_forward_output_norm.weight",
        "self_attn.q_proj.weight": "attention.query.weight",
        "self_attn.k_proj.weight": "attention.key.weight",
        "self_attn.v_proj.weight": "attention.value.weight",
        "self_attn.o_proj.weight": "attention.output.weight",
        "mlp.down_proj.weight": "feed_forward.down.weight",
    }
    config = ModelConfig.from_dotted(
        {
            "vocab_size": 31,
            "d_model": 16,
            "layers_per_group": 2,
            "num_layers": 6,
            "norm": "branch",
            "norm_layer": "rmsnorm",
            "attention.kind": "dense",
            "attention.num_heads": 2,
            "attention.d_head": 8,
            "attention.positions.width": 8,
            "feed_forward.kind": "dense",
            "feed_forward.activation": "swiglu",
            "feed_forward.d_feed_forward": 24,
            "feed_forward.dense_bias": False,
            "head_bias": False,
            "loops.final_norm": "every_loop",
            "loops.exit_entropy": 0.05,
        }
    )

    def __init__(self) -> None:
        super().__init__(RECORDED / "ouro_tiny.npz")

    def named(self, prefix: str) -> dict[str, Tensor]:
        """As in the base, with the two halves of a gated perceptron's first matrix as one."""
        for key in [key for key in self.values if key.startswith(prefix) and "gate_proj" in key]:
            halves = [self.values.pop(key), self.values.pop(key.replace("gate_proj", "up_proj"))]
            self.values[key.replace("gate_proj", "both")] = np.concatenate(halves)
        return super().named(prefix)

    def translate(self, name: str, value: Tensor) -> dict[str, Tensor]:
        if name.endswith("mlp.both.weight"):
            down = name.replace("both", "down_proj")
            layer = next(iter(super().translate(down, value)))
            return {layer.replace("down", "up"): value}
        return super().translate(name, value)


@pytest.mark.parametrize("name", ["huginn_tiny", "huginn_tiny_untied"])
@pytest.mark.parametrize(("dropped", "kept"), [(3, 2), (0, 4), (0, 1)])
def test_huginn_has_the_official_logits_loss_state_and_gradients(name, dropped, kept):
    golden = Huginn(name)
    model = golden.model(golden.config.changed({"loops.depth.gradient_loops": kept}))
    set_options(model, depth=own_depth(model.config, dropped + kept))
    seen: list[Tensor] = []
    assert model.final_norm is not None
    model.final_norm.register_forward_hook(lambda module, given, result: seen.append(result))
    logits = model(golden.inputs).logits_BSV
    recorded = f"n{dropped}k{kept}/"
    torch.testing.assert_close(logits, golden.tensor(f"{recorded}logits"), **CLOSE)
    torch.testing.assert_close(seen[0], golden.tensor(f"{recorded}latent"), **CLOSE)
    golden.check(model, recorded, logits)


@pytest.mark.parametrize(
    "recording",
    [partial(Huginn, "huginn_tiny"), partial(Huginn, "huginn_tiny_untied"), Parcae, Ouro],
)
def test_logits_are_the_public_ones_at_every_depth(recording):
    golden = recording()
    model = golden.model(golden.config).eval()
    depths = sorted(int(key.removeprefix("eval/r")) for key in golden.values if key[:6] == "eval/r")
    assert depths[-1] == 16
    for depth in depths:
        set_options(model, depth=own_depth(model.config, depth))
        logits = model(golden.inputs).logits_BSV
        torch.testing.assert_close(logits, golden.tensor(f"eval/r{depth}"), **CLOSE)


@pytest.mark.parametrize(
    ("recorded", "kept", "depths"),
    [
        *(("n3k2", 2, (5,)), ("n0k4", 4, (4,)), ("n0k1", 1, (1,))),
        *(("own5-1", 2, (5, 1)), ("own2-4", 2, (2, 4))),  # every sequence has its depth
    ],
)
def test_parcae_has_the_public_logits_loss_state_and_gradients(recorded, kept, depths):
    golden = Parcae()
    model = golden.model(golden.config.changed({"loops.depth.gradient_loops": kept}))
    set_options(model, depth=own_depth(model.config, max(depths)))
    if len(depths) > 1:
        set_options(model, depth=own_depths(model, *depths))
    seen: list[Tensor] = []
    assert isinstance(model.loops.injection, DecayInjection)
    model.loops.injection.output.register_forward_pre_hook(
        lambda module, given: seen.append(given[0])
    )
    logits = model(golden.inputs).logits_BSV
    torch.testing.assert_close(logits, golden.tensor(f"{recorded}/logits"), **CLOSE)
    torch.testing.assert_close(seen[0], golden.tensor(f"{recorded}/latent"), **CLOSE)
    golden.check(model, f"{recorded}/", logits)


def test_ouro_has_the_public_logits_states_gates_loss_and_gradients():
    golden = Ouro()
    model = golden.model(golden.config)
    for loop, expected in enumerate(golden.tensor("logits")):
        set_options(model, depth=own_depth(model.config, loop + 1))
        torch.testing.assert_close(model(golden.inputs).logits_BSV, expected, **CLOSE)
    gates: list[Any] = []
    states: list[Tensor] = []
    assert model.loops.exit_gate is not None
    assert model.final_norm is not None
    model.loops.exit_gate.register_forward_hook(lambda module, given, gate: gates.append(gate))
    model.final_norm.register_forward_hook(lambda module, given, state: states.append(state))
    output = model(golden.inputs, targets_BS=golden.targets)
    torch.testing.assert_close(torch.stack(states), golden.tensor("latent"), **CLOSE)
    torch.testing.assert_close(torch.stack(gates), golden.tensor("gates"), **CLOSE)
    log_p = exit_log_probabilities(gates)
    torch.testing.assert_close(log_p.exp(), golden.tensor("exit"), **CLOSE)
    loss = output.cross_entropy / golden.targets.numel() + output.regularisation_B.mean()
    loss.backward()
    torch.testing.assert_close(loss, golden.tensor("loss"), **CLOSE)
    expected = golden.named("g/")
    found = {key: value.grad for key, value in model.named_parameters()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, **CLOSE)
    # a token leaves at the first loop where the share that has left reaches the threshold
    for threshold in (0.3, 0.6, 1.0):
        left_RBS = log_p.exp().cumsum(0)
        loops_BS = (left_RBS[:-1] < threshold).sum(0)
        logits = golden.tensor("logits").take_along_dim(loops_BS[None, ..., None], 0)[0]
        torch.testing.assert_close(logits, golden.tensor(f"threshold/{threshold}"), **CLOSE)


def test_ouro_has_the_public_gradients_of_the_last_loop_alone():
    golden = Ouro()
    model = golden.model(golden.config.changed({"loops.exit_entropy": None}), strict=False)
    golden.check(model, "last/", model(golden.inputs).logits_BSV)


# What every key must keep

POSITIONS = 7


def some_tokens(seed: int = 1, num_sequences: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num_sequences, POSITIONS), generator=generator)


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
    model, tokens = program(name).train(mode != "evaluation"), some_tokens()
    if mode == "own depths":
        set_options(model, depth=own_depths(model, 3, 1, 5))
    if mode == "another depth":  # growing or drawn
        set_options(model, depth=own_depth(model.config, 5))
    before, bound = logits_of(model, tokens), reordered_pass(model, num_loops=5)
    for cut in range(1, POSITIONS):
        other = tokens.clone()
        other[:, cut:] = some_tokens(seed=2)[:, cut:]
        assert_reordered(logits_of(model, other)[:, :cut], before[:, :cut], bound)
        other[0] = tokens[0]
        assert_reordered(logits_of(model, other)[0], before[0], bound)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pass_with_a_cache_equals_a_whole_one(name):
    model, tokens = program(name).eval(), some_tokens()
    for num_loops in (1, model.config.num_repeats + 1):
        set_options(model, depth=own_depth(model.config, num_loops))
        cache = model.new_cache(num_loops=num_loops)
        parts = [tokens[:, :3], tokens[:, 3:4], tokens[:, 4:]]
        with torch.no_grad():
            found = torch.cat([model(part, cache).logits_BSV for part in parts], 1)
        whole = logits_of(model, tokens)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_keeps_loss_and_gradients_to_the_bit(name, mode):
    def gradients(mode: Recompute) -> list[Tensor]:
        model = program(name)
        set_options(model, recompute=mode)
        torch.manual_seed(0)
        output = model(some_tokens(), targets_BS=some_tokens(seed=2))
        (output.cross_entropy + output.regularisation_B.sum()).backward()
        found = [value.grad for value in model.parameters()]
        return [output.cross_entropy, *(each for each in found if each is not None)]

    expected, found = gradients("none"), gradients(mode)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_weight_has_a_gradient(name):
    model = program(name)
    model(some_tokens(), targets_BS=some_tokens(seed=2)).cross_entropy.backward()
    for key, value in model.named_parameters():
        assert value.grad is not None, key
        if "router" not in key and "experts" not in key:  # some experts serve no token
            assert value.grad.abs().max() > 0, key


# Depth per sequence


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
        tokens, targets = some_tokens(1, 4), some_tokens(2, 4)
        loss = model(tokens, targets_BS=targets).cross_entropy
        loss.backward()
        found.append((loss, [value.grad for value in model.parameters()]))
    (loss, gradients), (expected, reference) = found
    assert_reordered(loss, expected, reordered_pass(model, num_loops=5))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(gradients, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LEAVING)
def test_a_sequence_of_its_own_depth_is_what_it_would_be_alone(name):
    """And its losses, gradients and measures; experts serve the rows of the live sequences."""
    model = program(name)
    set_options(model, measures_loops=True)
    experts = model.config.experts
    assert experts is not None
    model.loops.start_state = lambda e_BSD, *given: 0.5 * e_BSD  # pyright: ignore[reportAttributeAccessIssue]
    tokens, depths = some_tokens(1, 4), (3, 1, 5, 2)
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
        output = model(some_tokens(1, 2), targets_BS=some_tokens(2, 2))
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
        output = model(some_tokens(), targets_BS=some_tokens(seed=2))
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
        output = model(some_tokens(), targets_BS=some_tokens(seed=2))
    assert output.cross_entropy.requires_grad
    return sum(kept.values())


def test_memory_grows_with_the_loops_that_have_a_gradient_and_with_no_others():
    bytes_of = {(loops, kept): saved_bytes(loops, kept) for loops in (4, 16) for kept in (1, 2, 3)}
    one_loop = bytes_of[4, 2] - bytes_of[4, 1]
    assert one_loop > 10_000
    assert bytes_of[4, 3] - bytes_of[4, 2] == pytest.approx(one_loop, rel=0.05)
    for kept in (1, 2, 3):
        assert bytes_of[16, kept] == pytest.approx(bytes_of[4, kept], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 9}, r"num_layers=9 is not loops.prelude \+ loops.coda \+ R·2 = 2 \+ R·2"),
        ({"num_layers": 2}, r"num_layers=2 is not .* R ≥ 1.*choose num_layers=4 or 6"),
        ({"loops.prelude": 3}, r"leave no core of layers_per_group=4: .* at least 5"),
        ({"loops.depth.gradient_loops": 0}, "greater than 0"),
        ({"loops.inject": "none"}, r'start="drawn" with inject="none": the core would never read'),
        (
            {"loops.inject": "none", "loops.start": "embedding"},
            r'gradient_loops=2 with inject="none"',
        ),
        ({"loops.coda": 0, "num_layers": 10}, r'final_norm="around_coda" with coda=0'),
        ({"order": "aabb"}, r'order="aabb" repeats each layer by itself'),
        ({"loops.read_out": (1,)}, "read_out or exit_entropy with depth.gradient_loops=2"),
        (
            {"loops.read_out": (5,), "loops.depth": {}},
            r"read_out=\[5\] names a loop that a pass of R=4",
        ),
        (
            {"loops.read_out": (1,), "loops.depth.gradient_loops": None, "loops.exit_entropy": 0.1},
            r"exit_entropy=0.1 with read_out=\[1\]",
        ),
        (
            {
                "loops.exit_entropy": 0.1,
                "loops.depth.gradient_loops": None,
                "loops.depth.per": "sequence",
            },
            "a loop that only some sequences make has no loss of its own",
        ),
        ({"feed_forward.sparse_layers": (1, 4)}, r"sparse_layers=\[1, 4\] names layer 4"),
    ],
)
def test_a_program_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_model("huginn_moe", changes)


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("moeut_aabb", {"loops.depth.per": "sequence"}, r'order="aabb" repeats each layer'),
        ("sut", {"loops.depth.per": "sequence"}, "halting with model.loops"),
        ("sut", {"loops.depth.per": "step"}, "halting with model.loops"),
    ],
)
def test_a_depth_that_would_be_passed_over_is_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(recipe, {"loops.depth.kind": "poisson", **changes})
