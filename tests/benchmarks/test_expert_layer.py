"""The benchmarks of expert layers measure what they say: right answers, counted bytes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import expert_layer
from benchmarks.kernels.layers import (
    Setting,
    contenders,
    draw_bank,
    draw_choices,
    exact_mode,
    meaning,
    result_of,
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


TINY_STEP = """
import sys
from pathlib import Path
from benchmarks import step
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
SMALL = ["mesh.ep=1", "mesh.dp_replicate=none", "job.num_nodes=1", "job.ranks_per_node=1", "model.d_model=32"]
DENSE = ["model.attention.kind=dense", "model.feed_forward.kind=dense", "model.feed_forward.d_feed_forward=64", "model.norm=pre"]
step.RECIPES = {
    "moeut_tiny": lambda: resolve("smoke", SMALL, RECIPES), "dense_tiny": lambda: resolve("smoke", SMALL + DENSE, RECIPES),
}
step.compare(step.Case("tiny", "cpu", "float32", 1, 32, 2, 1, 2, False, 60.0), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_step_benchmark_compares_two_models(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TINY_STEP, str(tmp_path / "case.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "case.json").read_text())
    assert len(found["all_s"]["moeut"]) == len(found["all_s"]["dense"]) == 2
