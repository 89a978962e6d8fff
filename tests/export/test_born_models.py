"""Every block of other people's models against transformers' own classes, without recordings: a small
model of each family gets random weights, goes out in the family's format, and is computed there.
"""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from family import some_tokens
from parts import make_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained import assembled

from moebius.export.hf.model_folder import export
from moebius.train.config.run_config import ConfigError
from moebius.train.families.table import family_of
from moebius.train.recipes.hub import HUB_SMALL
from moebius.train.state import TrainingProgress, state_tensors

VOCABULARY, LENGTH = 257, 40  # longer than gpt-oss's window of 32
MIXTURES = [name for name in HUB_SMALL if HUB_SMALL[name][1]().model.experts]
POOLED = [name for name in MIXTURES if not name.startswith(("deepseek", "glm4"))]
YARN = {"attention.positions.yarn": {"factor": 4.0, "original_positions": 16}}
YARN |= {"attention.positions.amplitude": 0.1 * math.log(4.0) + 1}
# Of the dense families: what the small models lack
OTHERS: dict[str, dict[str, Any]] = {
    "llama_small": {"attention.bias": "qkvo", "feed_forward.dense_bias": True, "tied_head": True},
    "mistral_small": {"attention.window": 7, "attention.num_kv_heads": 1},
    "qwen2_small": {"attention.window": 7, "attention.window_layers": (1, 2)} | YARN,
    "qwen3_small": {"attention.window": 7, "attention.window_layers": (2,)}
    | {"attention.bias": "qkvo", "attention.d_head": 24, "attention.positions.width": 24},
    "olmo2_small": {"attention.bias": "qkvo", "attention.num_kv_heads": 1},
}
NAMES = (*HUB_SMALL, *(f"{name} otherwise" for name in OTHERS))
WIDTH = {"olmoe_small": 128}  # others' heads need not be as wide as the stream together
TOKENS = some_tokens(2, LENGTH, vocabulary=VOCABULARY)

# In a process of its own: transformers would take this repository's kernels/ for the library of that name.
READER = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ids = load_file(Path(sys.argv[1], "ids"))["ids"]
for folder in (path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        out = model.eval()(ids, labels=ids)
        bare = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    save_file({"logits": out.logits.contiguous(), "added": out.loss - bare}, f"{folder}.out")
"""


@torch.no_grad()
def randomise(model: torch.nn.Module, *, has_selection_bias: bool) -> None:
    """Moves every weight far from its start, so that a part that is lost or swapped shows."""
    generator = torch.Generator().manual_seed(0)
    biases = model.named_buffers() if has_selection_bias else ()
    for name, value in [*model.named_parameters(), *biases]:
        noise = torch.randn(value.shape, generator=generator)
        size = 0.3 if value.ndim == 1 else 0.5 / value.shape[-1] ** 0.5
        value.copy_(size * noise + name.endswith("norm.weight"))


Computed = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Computed, Computed]:
    """Returns logits and what is added to the cross-entropy, here and in every family's class."""
    folder, ours = tmp_path_factory.mktemp("exports"), {}
    pool: dict[str, Any] = {"balance_pool": True, "balance_scope": "micro_batch", "z_loss": 0.0}
    for name in NAMES:
        recipe = name.split()[0]
        pool["balance"] = 1.0 if name in POOLED else 0.0
        changes = {f"feed_forward.router.{key}": value for key, value in pool.items()}
        if recipe in OTHERS:
            changes = {} if name == recipe else OTHERS[recipe]
        model = HUB_SMALL[recipe][1]().model.changed(
            {"vocab_size": VOCABULARY, "d_model": WIDTH.get(name, 64)} | changes
        )
        config, run_dir = make_config(model=model), tmp_path_factory.mktemp(name) / "run"
        meta = {"progress": TrainingProgress().as_dict(), "config": config.model_dump(mode="json")}
        with assembled(config, run_dir) as run:
            randomise(run.model, has_selection_bias=name != "deepseek_v2_small")
            run.checkpoints.save(0, *state_tensors(run.model, run.optimizer), meta)
            run.checkpoints.wait()
            with torch.no_grad():
                ours[name] = {"logits": run.model.eval()(TOKENS).logits_BSV}
                out = run.model.train()(TOKENS, targets_BS=TOKENS)
                ours[name]["added"] = out.regularisation_B.mean()
        export(run_dir / "checkpoints/step_00000000", folder / name, with_tokenizer=False)
    save_file({"ids": TOKENS}, folder / "ids")
    words = [sys.executable, "-I", "-c", READER, folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ours, {file.stem: load_file(file) for file in folder.glob("*.out")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_family_s_own_class(
    name: str, computed: tuple[Computed, Computed]
) -> None:
    ours, theirs = (each[name]["logits"] for each in computed)
    assert theirs.std() > 0.02  # a thousand times the tolerance
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_class_adds_the_balancing_loss_of_the_exported_model(
    name: str, computed: tuple[Computed, Computed]
) -> None:
    """Loaded as any user would: the file alone says that the loss is added, and with what weight."""
    ours, theirs = (each[name]["added"] for each in computed)
    assert (theirs > 2.005) == (name in POOLED)  # 2 is perfect balance of two choices
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-6)


def test_an_olmoe_that_its_class_cannot_build_is_of_no_family() -> None:
    """Its norms of queries and keys have the stream's width, whatever head_dim says."""
    model = HUB_SMALL["olmoe_small"][1]().model
    family = family_of(model)
    assert family is not None
    assert family.architecture == "OlmoeForCausalLM"
    assert family_of(model.changed({"d_model": 64})) is None
    config = family.write(model, 128) | {"hidden_size": 64}
    with pytest.raises(ConfigError, match="head_dim=32 with num_attention_heads=4: OLMoE needs"):
        family.read(config)
