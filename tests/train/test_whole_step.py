"""Whole training steps against slow ones in float64, written from the papers, for every kind of model.

The forward pass is the model's own, in float64 with plain kernels; autograd differentiates it. What follows is written
out here, one matrix at a time, and reads names and shapes alone: the norm over all gradients, what decays and at which
rate, AdamW (arXiv 1711.05101, algorithm 2), and Muon (Jordan; scale and decay of arXiv 2502.16982).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import NAMES, tiny_config
from pairwise import slow_but
from parts import make_config
from torch import Tensor
from trained import assembled

from moebius.data_pipeline.read.loader import Batch
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config
from moebius.train.config.schedule import learning_rate_at
from moebius.train.loop import step
from moebius.train.micro_batches import document_use, options_of_passes, split_batch

STEPS, WARM_UP, PEAK, MATRICES_PEAK, MICRO = 3, 4, 1e-2, 3e-2, 8
OPTIM = {
    "learning_rate": PEAK,
    "warmup_steps": WARM_UP,
    "beta1": 0.8,
    "beta2": 0.9,
    "epsilon": 1e-3,
}
OPTIM |= {"weight_decay": 2.0, "clip_norm": 0.05}
RATES = {"embedding_rate": 0.5, "head_rate": 2.0, "router_rate": 0.25}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {**RATES, "weight_decay_on": "matrices"},
    "adamw on all": {"clip_norm": 1e9},
    "muon": {"kind": "muon", **RATES, "weight_decay_on": "matrices"},
    "muon on all": {"kind": "muon", "router_rate": 0.5, "muon": {"scale": "spectral"}},
}
RULES["muon"]["muon"] = {"routers": True, "cautious": True, "learning_rate": MATRICES_PEAK}
FAST = [
    ("dense", "adamw"),
    ("olmoe_small", "adamw on all"),
    ("deepseek_v3_small", "muon"),
    ("gpt_oss_small", "muon on all"),
]
EVERY = [
    (name, tuple(RULES)[place % 2 + half]) for place, name in enumerate(NAMES) for half in (0, 2)
]
CASES = slow_but(dict.fromkeys([*FAST, *EVERY]), *FAST, names=2)
ADDED = ("bias", "b_up", "b_down", "relative", "sinks", "scale", "log_temperature")
BESIDE = ("norm", "gate", "injection", "halting", "condition")


def orthogonal(u_OI: Tensor) -> Tensor:
    x = u_OI if len(u_OI) <= len(u_OI.T) else u_OI.T
    x = x / max(float(x.square().sum().sqrt()), 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * (a @ x) + 2.0315 * (a @ a @ x)
    return x if len(u_OI) <= len(u_OI.T) else x.T


class SlowOptimizer:
    """Holds the two moments of every parameter, and updates them by name."""

    def __init__(self, config: Config, weights: dict[str, Tensor]) -> None:
        self.optim, self.weights = config.optim, weights
        self.state = {
            name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()
        }
        model = config.model
        self.is_gated = "glu" in (model.experts or model.feed_forward).activation
        self.parcae = model.loops.inject == "decay"

    def step(self, number: int, grads: dict[str, Tensor]) -> float:
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        factor = min(1.0, self.optim.clip_norm / (norm + 1e-6))
        for name, weight in self.weights.items():
            self.update(number, name, weight, factor * grads.get(name, torch.zeros_like(weight)))
        return norm

    def update(self, number: int, name: str, w: Tensor, grad: Tensor) -> None:
        optim, first = self.optim, name.split(".")[0]
        is_router, is_beside = "router" in name, any(word in name for word in BESIDE)
        is_table = name in ("embedding", "position_embedding")
        is_matrix = not (is_table or is_beside or name.endswith(ADDED) or w.ndim < 2)
        factors = {"embedding": optim.embedding_rate, "position_embedding": optim.embedding_rate}
        factor = (factors | {"head": optim.head_rate}).get(first, 1.0)
        rate = (optim.router_rate if is_router else factor) * (number + 1) / WARM_UP
        decays = is_matrix or optim.weight_decay_on == "all"
        decay = optim.weight_decay * (decays and not (self.parcae and "injection" in name))
        is_muons = is_matrix and first != "head" and (optim.muon.routers or not is_router)
        if optim.kind == "muon" and is_muons:
            self.muon(name, w, grad, rate * (optim.muon.learning_rate or PEAK), decay)
        else:
            self.adamw(number, name, w, grad, rate * PEAK, decay)

    def adamw(
        self, number: int, name: str, w: Tensor, grad: Tensor, rate: float, decay: float
    ) -> None:
        beta1, beta2, (m, v) = self.optim.beta1, self.optim.beta2, self.state[name]
        m.copy_(beta1 * m + (1 - beta1) * grad)
        v.copy_(beta2 * v + (1 - beta2) * grad * grad)
        unbiased_m, unbiased_v = m / (1 - beta1 ** (number + 1)), v / (1 - beta2 ** (number + 1))
        w -= rate * decay * w + rate * unbiased_m / (unbiased_v.sqrt() + self.optim.epsilon)

    def muon(self, name: str, w: Tensor, grad: Tensor, rate: float, decay: float) -> None:
        momentum = self.state[name][0]
        momentum.copy_(0.95 * momentum + 0.05 * grad)
        ahead = 0.95 * momentum + 0.05 * grad
        halves = 2 if self.is_gated and name.endswith((".up.weight", "w_up")) else 1
        for expert in range(len(w)) if w.ndim == 3 else [None]:  # a bank is (E, in, out)
            one, u = (w, ahead) if expert is None else (w[expert].T, ahead[expert].T)
            for part_OI, u_OI in zip(one.chunk(halves), u.chunk(halves), strict=True):
                num_out, num_in = part_OI.shape
                is_rms = self.optim.muon.scale == "match_rms_adamw"
                scale = (
                    0.2 * max(num_out, num_in) ** 0.5 if is_rms else max(1, num_out / num_in) ** 0.5
                )
                update = scale * orthogonal(u_OI)
                kept = part_OI * update > 0 if self.optim.muon.cautious else 1.0
                part_OI -= rate * (update + decay * kept * part_OI)


def slow_gradients(model: Transformer, micro_batches: list, passes: list) -> tuple[dict, dict]:
    """Returns the gradients of the mean over all tokens and sequences, and what routers learn from."""
    length, outs = micro_batches[0].inputs_BS.shape[1], []
    for each, options in zip(micro_batches, passes, strict=True):
        outs.append(model(each.inputs_BS, targets_BS=each.targets_BS, options=options))
    sequences = MICRO * len(outs)
    losses = [o.cross_entropy / length + o.regularisation_B.sum() for o in outs]
    loss = torch.stack(losses).sum() / sequences
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    carried = {key: sum(o.carried[key].double() for o in outs) for key in outs[0].carried}
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}, carried


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_whole_step_is_the_slow_one(name: str, rule: str, tmp_path: Path) -> None:
    config = make_config(
        model=tiny_config(name, {"vocab_size": 257}),
        data__seq_len=8,
        kernels__backend="segments",
        optim=OPTIM | RULES[rule],
        train={"global_batch": 2 * MICRO, "micro_batch": MICRO, "steps": WARM_UP},
    )
    drawn = np.random.default_rng(0).integers(257, size=(STEPS, 2, MICRO, 9))
    with assembled(config, tmp_path) as run:
        run.model.double()  # in float32 an activation or a choice near its edge falls to the other side
        slow = Transformer(config.model, backend="reference").double()
        slow.load_state_dict(run.model.state_dict())
        start = {key: value.clone() for key, value in slow.state_dict().items()}
        optimizer = SlowOptimizer(config, {key: p.detach() for key, p in slow.named_parameters()})
        for number, tokens in enumerate(drawn):
            batch = Batch(tokens, first_sample=number * 2 * MICRO, digest=0)
            micro_batches = split_batch(batch, run.process.device, document_use(config))
            passes = options_of_passes(config, number, run.process, micro_batches)
            slow.before_step(number)
            grads, carried = slow_gradients(slow, micro_batches, passes)
            norm = optimizer.step(number, grads)
            slow.after_step(number, carried)
            rate = learning_rate_at(config.optim.over(config.train.steps), number)
            assert step(run, batch, rate).grad_norm == pytest.approx(norm, rel=1e-6)
        found = run.model.state_dict()
    for key, expected in slow.state_dict().items():
        moved = float((expected - start[key]).abs().max())
        assert float((found[key] - expected).abs().max()) <= 1e-5 * moved + 1e-12, key
