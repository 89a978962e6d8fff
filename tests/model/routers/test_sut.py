"""The Sparse Universal Transformer: against a slow loop over tokens, experts, heads and keys, and
against its own promises.

No record of the model without halting exists, nor of tokens that halt early, so the loop is written
from the formulas.
"""

import math
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from family import some_tokens as tokens_of_family
from parts import layers
from torch import Tensor

from moebius.model.balance import RunningSum
from moebius.model.config.attention_config import MoMHAConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import InitialisationConfig, ModelConfig
from moebius.model.execution.precision import cast_weights
from moebius.model.initialise import draw, initialise, zeros
from moebius.model.routers.sut import SutConfig, SutRouter
from moebius.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=31,
    d_model=12,
    num_layers=5,
    layers_per_group=1,
    norm="post",
    attention=MoMHAConfig(
        num_heads=2, d_head=3, num_experts=4, top_k=2, max_distance=4, balance=0.02
    ),
    feed_forward=ExpertsConfig(
        num_experts=5, d_expert=6, expert_bias=True, router=SutConfig(top_k=2, mi_loss=0.03)
    ),
    initialisation=InitialisationConfig(kind="sut"),
)
HALTING = {"loss": 0.05, "threshold": 0.9}

Sign = Literal["corrected", "as_published"]


def config(changes: dict) -> ModelConfig:
    return TINY.changed(changes)


def make(config: ModelConfig, *, backend: str = "auto", noise: float = 0.0) -> Transformer:
    """Starting values; with noise everything is away from its start, so that dropping a part shows."""
    model = Transformer(config, backend=backend)
    initialise(model, 0)
    model = model.double()
    generator, decided = (torch.Generator().manual_seed(seed) for seed in (7, 5))
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(noise * drawn)
        if name == "halting.output.weight":  # tokens halt at every step, and some never
            drawn = torch.randn(parameter.shape, generator=decided, dtype=torch.float64)
            parameter.data.copy_(3 * noise * drawn)
    return model


some_tokens = partial(tokens_of_family, seed=3, vocabulary=31)


class Oracle:
    """The formulas, one token at a time. Legend: b sequence, i query, j key, s slot, h head, e
    expert.
    """

    def __init__(self, model: Transformer) -> None:
        config: Any = model.config  # every part is the one that a SUT has
        self.c, self.w = config, dict(model.named_parameters())
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {"attention": [], "feed_forward": []}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.w[f"group.0.{name}.weight"], self.w[f"group.0.{name}.bias"]
        )

    def route(
        self, block: str, x: Tensor, top_k: int, weight: Tensor
    ) -> tuple[list[int], list[Tensor]]:
        name = f"group.0.{block}.router."
        hidden = torch.tanh(self.w[name + "hidden.weight"] @ x + self.w[name + "hidden.bias"])
        p = torch.softmax(self.w[name + "output.weight"] @ hidden, 0)
        self.seen[block].append((p, weight))
        best = sorted(range(len(p)), key=lambda e: -p[e].item())[:top_k]
        return best, [p[e] / (sum(p[i] for i in best) + 1e-6) for e in best]

    def attend(self, x: Tensor, memory: Tensor, i: int, weight: Tensor) -> Tensor:
        """x, memory: (S, D) of one sequence."""
        c, w, out = self.c.attention, self.w, torch.zeros_like(x[i])
        experts, gates = self.route("attention", x[i], c.top_k, weight)
        if weight == 0:
            return out
        for e, gate in zip(experts, gates, strict=True):
            q, heads = w["group.0.attention.query.experts.weight"][e].T @ x[i], []
            for h in range(c.num_heads):
                part = slice(h * c.d_head, (h + 1) * c.d_head)
                scores, values = [], []
                for j in range(i + 1):
                    k = (w["group.0.attention.key.weight"] @ memory[j])[part]
                    distance = max(j - i, -(c.max_distance - 1))
                    relative = w["group.0.attention.relative"][h, :, distance + c.max_distance]
                    scores.append(
                        q[part] @ k / math.sqrt(c.d_head) + q[part] * c.d_head**-0.25 @ relative
                    )
                    values.append((w["group.0.attention.value.weight"] @ memory[j])[part])
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            out = out + gate * (
                w["group.0.attention.output.experts.weight"][e].T @ torch.cat(heads)
            )
        return out

    def feed(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        experts, gates = self.route("feed_forward", x, self.c.feed_forward.router.top_k, weight)
        if weight == 0:
            return out
        w = {
            name: self.w[f"group.0.feed_forward.sparse.experts.{name}"]
            for name in ("w_up", "b_up", "w_down", "b_down")
        }
        for e, gate in zip(experts, gates, strict=True):
            hidden = torch.relu(w["w_up"][e].T @ x + w["b_up"][e])
            out = out + gate * (w["w_down"][e].T @ hidden + w["b_down"][e])
        return out

    def layer(self, y: Tensor, memory: Tensor, weight: Tensor) -> Tensor:
        sequences = []
        for b in range(len(y)):
            rows = []
            for i in range(y.shape[1]):
                a = self.norm(
                    y[b, i] + self.attend(y[b], memory[b], i, weight[b, i]), "attention_norm"
                )
                rows.append(self.norm(a + self.feed(a, weight[b, i]), "feed_forward_norm"))
            sequences.append(torch.stack(rows))
        return torch.stack(sequences)

    def halt(self, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.w["halting.hidden.weight"] @ y + self.w["halting.hidden.bias"])
        go_on, halt = torch.log_softmax(self.w["halting.output.weight"] @ hidden, 0).exp()
        return go_on, halt

    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the whole regularisation, and the mean number of depth steps computed."""
        c = self.c
        x = self.w["embedding"][tokens] * math.sqrt(c.d_model)
        x = F.layer_norm(x, x.shape[-1:])
        every = torch.ones(tokens.shape, dtype=x.dtype)
        y, ponder, depth = self.layer(x, x, every), torch.zeros(()), every.clone()
        if c.halting is None:
            for _ in range(1, c.num_layers):
                y = self.layer(y, y, every)
        else:
            y, ponder, depth = self.halted(y, every, depth)
        logits = y @ self.w["head.weight"].T + self.w["head.bias"]
        losses = c.attention.balance * self.information(
            "attention"
        ) + c.feed_forward.router.mi_loss * self.information("feed_forward")
        return logits, losses + (0 if c.halting is None else c.halting.loss * ponder), depth.mean()

    def halted(self, y: Tensor, every: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, sequences, length = y, *every.shape
        tokens = [(b, i) for b in range(sequences) for i in range(length)]
        v = {t: torch.ones((), dtype=y.dtype) for t in tokens}
        a = {t: torch.zeros_like(y[t]) for t in tokens}
        d = {t: torch.zeros((), dtype=y.dtype) for t in tokens}
        steps: list[Tensor] = []
        for step in range(1, self.c.num_layers):
            w = {}
            for t in tokens:
                go_on, halt = self.halt(y[t])
                p, v[t] = v[t] * halt, v[t] * go_on
                a[t], d[t] = a[t] + p * y[t], d[t] + (step - 1) * p
                w[t] = v[t] if v[t] >= 1 - self.c.halting.threshold else torch.zeros_like(v[t])
            weight = torch.stack([w[t] for t in tokens]).view(every.shape)
            y = self.layer(y, s, weight)
            s = torch.stack([a[t] + w[t] * y[t] if w[t] > 0 else s[t] for t in tokens]).view(
                y.shape
            )
            depth = depth + (weight > 0)
            steps.append(torch.stack([d[t] + w[t] * step for t in tokens]).sum() / len(tokens))
        return (
            s,
            steps[-1] if self.c.halting.loss_sum == "last" else torch.stack(steps).sum(),
            depth,
        )

    def information(self, block: str) -> Tensor:
        p, q = (torch.stack(parts) for parts in zip(*self.seen[block], strict=True))
        published = self.c.feed_forward.router.mi_sign == "as_published"
        rows = p.numel() if published and self.c.halting is None else q.sum()
        q = q / rows
        conditional = -sum(q[n] * (p[n] * p[n].log()).sum() for n in range(len(p)))
        mean: Any = sum(q[n] * p[n] for n in range(len(p)))
        marginal = -(mean * mean.log()).sum()
        return conditional + marginal if published else conditional - marginal


@pytest.mark.quick(3)
@pytest.mark.sample(6)
@pytest.mark.parametrize("backend", ["reference", "segments"])
@pytest.mark.parametrize("sign", ["corrected", "as_published"])
@pytest.mark.parametrize("loss_sum", [None, "last", "all"])
def test_the_model_equals_the_loop_in_values_and_in_every_gradient(
    loss_sum: str, sign: Sign, backend: str
) -> None:
    halting = None if loss_sum is None else HALTING | {"loss_sum": loss_sum}
    model = make(
        config({"halting": halting, "feed_forward.router": SutConfig(mi_loss=0.03, mi_sign=sign)}),
        backend=backend,
        noise=0.4,
    )
    tokens = some_tokens(2, 7)
    output = model(tokens)
    logits, regularisation, depth = Oracle(model).run(tokens)
    torch.testing.assert_close(output.logits_BSV, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.regularisation_B.mean(), regularisation, rtol=0, atol=1e-12)
    if halting:
        served_L = output.loads["feed_forward"].load_LN.sum(1)
        assert len(set(served_L.tolist())) > 2  # tokens halt at different steps, and some never
        assert served_L[-1] > 0
        assert output.auxiliary["depth"].mean() == pytest.approx(depth.item())
    parameters = dict(model.named_parameters())
    leaves = list(parameters.values())
    ours = torch.autograd.grad(
        output.logits_BSV.square().sum() + output.regularisation_B.mean(), leaves
    )
    expected = torch.autograd.grad(logits.square().sum() + regularisation, leaves)
    for name, our, their in zip(parameters, ours, expected, strict=True):
        torch.testing.assert_close(
            our, their, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_halved_sticks_cost_exactly_4_03125_over_6_steps_and_0_96875_at_the_last() -> None:
    tokens = some_tokens(3, 8)
    for loss_sum, expected in (("all", 4.03125), ("last", 0.96875)):
        model = make(config({"num_layers": 6, "halting": {"loss_sum": loss_sum}})).float()
        assert model(tokens).auxiliary["halting"].tolist() == [expected] * 3


def test_at_the_start_every_token_is_skipped_from_depth_step_10_on_and_asks_no_expert() -> None:
    model = make(config({"num_layers": 18, "halting": {}}))
    layer, asked = layers(model)[0], []
    for sparse in (layer.attention.query, layer.attention.output, layer.feed_forward.sparse):
        sparse.register_forward_pre_hook(lambda _, args: asked.append(len(args[1].expert_N)))
    output = model(some_tokens(2, 9))
    assert asked == [2 * 9 * 2] * 3 * 10 + [0] * 3 * 8
    assert output.auxiliary["depth"].tolist() == [10.0, 10.0]
    for load in output.loads.values():
        assert load.load_LN.sum(1).tolist() == load.wanted_L.tolist() == [36] * 10 + [0] * 8


def test_one_depth_step_halts_nowhere_and_costs_nothing() -> None:
    output = make(config({"num_layers": 1, "halting": HALTING}))(some_tokens(2, 4))
    assert output.auxiliary["halting"].tolist() == [0.0, 0.0]
    assert output.auxiliary["depth"].tolist() == [1.0, 1.0]


@pytest.mark.quick(3)
@pytest.mark.parametrize("halting", [None, HALTING])
@pytest.mark.parametrize("max_distance", [1, 4, 64])
def test_generation_with_the_cache_equals_the_full_pass(
    halting: dict | None, max_distance: int
) -> None:
    model = make(
        config({"halting": halting, "attention.max_distance": max_distance}), noise=0.4
    ).eval()
    tokens = some_tokens(2, 13)
    full = model(tokens).logits_BSV
    for pieces in ([13], [1] * 13, [5, 1, 4, 3]):
        cache = model.new_cache()
        parts = [model(part, cache).logits_BSV for part in tokens.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-11)
        assert all(entry.length == 13 for entry in cache)


@pytest.mark.parametrize(("weight", "num_losses"), [(0.0, 0), (0.03, 1)])
def test_a_weight_of_zero_leaves_the_mutual_information_out(weight: float, num_losses: int) -> None:
    """It is not computed, where a weight of zero would make a NaN of an infinite value."""
    sums = {name: torch.full((2,), math.inf) for name in ("certainty", "mass")}
    sums["probability"] = torch.full((2, 8), math.inf)
    router = SutRouter(SutConfig(mi_loss=weight), 3, 8, init=zeros)
    assert len(router.losses(sums, RunningSum())) == num_losses


def test_drawn_experts_follow_their_probabilities_beside_the_best_in_training_only() -> None:
    router: Any = SutRouter(SutConfig(top_k=2, sampled=1), 6, 4, init=zeros)
    router.hidden.weight.data.copy_(torch.eye(6))
    router.hidden.bias.data.zero_()
    router.output.weight.data.copy_(torch.eye(4, 6))
    x_TD = torch.atanh(torch.tensor([0.9, 0.1, -0.5, -0.9, 0, 0])).repeat(20_000, 1)
    p_E = torch.tensor([0.9, 0.1, -0.5, -0.9]).softmax(0)
    torch.manual_seed(0)
    experts_TK, weights_TK, _ = router.choose(x_TD)
    assert bool((experts_TK[:, 0] == 0).all())
    drawn_E = torch.bincount(experts_TK[:, 1], minlength=4) / len(x_TD)
    assert drawn_E[0] == 0
    torch.testing.assert_close(drawn_E[1:], p_E[1:] / p_E[1:].sum(), rtol=0, atol=0.015)
    second_T = p_E[experts_TK[:, 1]]
    torch.testing.assert_close(weights_TK[:, 1], second_T / (p_E[0] + second_T))
    assert bool((router.eval().choose(x_TD)[0] == torch.tensor([0, 1])).all())


def test_matrices_are_cast_and_routers_and_gate_are_not() -> None:
    model = make(config({"halting": HALTING})).float()
    kept = {name for name, _ in model.named_parameters()} - set(cast_weights(model, torch.bfloat16))
    assert {name for name in kept if "router" not in name and "norm" not in name} == {
        "embedding",
        "head.bias",
        "halting.hidden.weight",
        "halting.hidden.bias",
        "halting.output.weight",
        "group.0.feed_forward.sparse.experts.b_up",
        "group.0.feed_forward.sparse.experts.b_down",
    }
    assert {name for name, _ in model.named_parameters() if "router" in name} <= kept


def test_parameters_start_as_published() -> None:
    model = Transformer(config({"halting": HALTING}))
    d, expert, width = 12, 6, 6
    bounds = {
        "attention.query.experts.weight": 1 / d,
        "attention.output.experts.weight": 1 / width,
        "attention.key.weight": math.sqrt(3 / (d + width)),
        "attention.value.weight": math.sqrt(3 / (d + width)),
        "attention.router.hidden.weight": d**-0.5,
        "attention.router.hidden.bias": d**-0.5,
        "attention.router.output.weight": d**-0.5,
        "attention.relative": 0.0,
        "feed_forward.sparse.experts.w_up": 1 / d,
        "feed_forward.sparse.experts.b_up": expert**-0.5,
        "feed_forward.sparse.experts.w_down": 1 / expert,
        "feed_forward.sparse.experts.b_down": d**-0.5,
        "feed_forward.router.hidden.weight": d**-0.5,
        "feed_forward.router.output.weight": d**-0.5,
    }
    bounds = {f"group.0.{name}": bound for name, bound in bounds.items()} | {
        "halting.hidden.weight": d**-0.5,
        "halting.hidden.bias": d**-0.5,
        "halting.output.weight": 0.0,
    }
    parameters = dict(model.named_parameters())
    for name, bound in bounds.items():
        drawn = torch.stack([draw(name, parameters[name], seed) for seed in range(30)])
        assert bound * 0.95 <= drawn.abs().max() <= bound * (1 + 1e-6), name
        assert drawn.std() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
