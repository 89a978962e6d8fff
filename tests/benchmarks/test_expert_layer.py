"""The benchmarks of expert layers measure what they say: right answers, counted bytes."""

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import step
from benchmarks.kernels import expert_layer
from benchmarks.kernels.layers import (
    ExpertLayer,
    Result,
    Setting,
    contenders,
    draw_bank,
    draw_choices,
    exact_mode,
    meaning,
    result_of,
    run_calls,
    run_layer,
)

ROOT = Path(__file__).resolve().parents[2]
MLP = Setting("mlp", 40, 16, 8, 6, 3, d_dense=20)
ATTENTION = Setting("attention", 24, 16, 8, 6, 2, heads=2, d_dense=16)
GATED = Setting("gated", 40, 16, 12, 6, 3, activation="swiglu")


@pytest.mark.parametrize("setting", [MLP, ATTENTION, GATED], ids=lambda setting: setting.name)
def test_every_contender_means_the_same(setting: Setting) -> None:
    generator = torch.Generator().manual_seed(0)
    bank = draw_bank(setting, torch.float32, generator, exact=True)
    choices = draw_choices(setting, 0.5, generator)
    expected, ran = meaning(bank, choices, chunk=11), set[str]()
    for contender in contenders(setting, ("default", "oneDNN")):
        if contender.role not in ("peer", "ours"):
            continue
        layer = contender.build(bank)
        leaves = (bank.x_TD, *(choice.gates_THK for choice in choices), *layer.weights)
        expert_layer.clear(leaves)
        try:
            with exact_mode(contender.mode):
                y = lambda layer=layer: layer(bank.x_TD, choices)  # noqa: E731
                answer = result_of(y, bank.grad_TD, leaves)
        except (ValueError, ImportError):
            assert contender.name.startswith(("ours", "transformers"))
            continue
        # Ours must be exact; of a peer it must be the same layer, however its library rounds.
        bound = 1e-5 if contender.role == "ours" else 1e-2
        assert answer.error(expected) < bound, contender.name
        ran.add(contender.name)
    assert {"grouped_mm", "ours: segments", "ours: reference"} <= ran
    has_transformers = find_spec("transformers") is not None
    assert ("transformers: grouped_mm" in ran) == (setting is GATED and has_transformers)


@pytest.mark.parametrize("setting", [MLP, ATTENTION], ids=lambda setting: setting.name)
def test_calls_in_a_step_share_the_bank(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the gradients of its own routing, and the weights' are the sum over all of them."""
    generator = torch.Generator().manual_seed(0)
    bank = draw_bank(setting, torch.float32, generator, exact=True)
    every = [draw_choices(setting, 0.5, generator) for _ in range(3)]
    run = partial(run_layer, activation="relu", backend="segments", defer=True)
    y_TD, grads = run_calls(ExpertLayer(bank, run), bank, every)
    alone = [meaning(bank, choices) for choices in every]
    rows = [result.grads[0] for result in alone]
    gates = [grad for result in alone for grad in result.grads[1:-2]]
    weights = [torch.stack([result.grads[i] for result in alone]).sum(0) for i in (-2, -1)]
    assert Result(y_TD, grads).error(Result(alone[0].y_TD, (*rows, *gates, *weights))) < 1e-5
    assert bank.w_up_EDW.grad is bank.x_TD.grad is None
    [one] = [each for each in contenders(setting, ("default",)) if each.calls > 1]
    entry = expert_layer.Entry(setting.name, "float32", one.name, one.role, one.mode, one.calls)
    running = expert_layer.Running(one, entry, ExpertLayer(bank, run), bank)
    timing = expert_layer.Timing(0.9, 0.18)
    monkeypatch.setattr(expert_layer, "timed", lambda work: (work(), timing)[1])
    assert running.run_once(generator)[:2] == pytest.approx((0.1, 0.02))


TINY_STEP = """
import sys
from pathlib import Path
from benchmarks import step
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
SMALL = ["mesh.ep=1", "mesh.dp_replicate=none", "job.num_nodes=1", "job.ranks_per_node=1", "model.d_model=32"]
DENSE = ["model.attention.kind=dense", "model.feed_forward.kind=dense", "model.feed_forward.d_feed_forward=62", "model.norm=pre"]
step.RECIPES = {
    "moeut_tiny": lambda: resolve("smoke", SMALL, RECIPES), "dense_tiny": lambda: resolve("smoke", SMALL + DENSE, RECIPES),
}
step.compare(step.Case("tiny", "cpu", "float32", 1, 32, 2, 1, 2, False, 60.0, step.BESIDE), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_step_benchmark_compares_two_models(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TINY_STEP, str(tmp_path / "case.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "case.json").read_text())
    assert {side: len(times) for side, times in found["all_s"].items()} == dict.fromkeys(
        ("moeut", "dense", *step.BESIDE), 2
    )
    assert set(found["ratios"]) == {"moeut ÷ dense_aligned", *(f"{x} ÷ moeut" for x in step.FUSED)}
    # two more columns in two matrices and a bias of two layers: weights and two moments
    sizes = [found["sides"][side]["state_bytes"] for side in ("dense_aligned", "dense")]
    assert sizes[0] - sizes[1] == 2 * (2 * 2 * 32 + 2) * 3 * 4
