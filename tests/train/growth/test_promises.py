"""Every operator keeps its promise about the first logits: a table of operators and models."""

import published_case
import pytest
import torch
from grown_case import DENSE, LAYERS, MIXTURES, TOKENS, TOLERANCE, drawn, grow, logits_of, model_of
from published_case import arrays_of, folder_of, state_of
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.train.families.table import family_of, open_family

RANGES = (
    "prelude=0:1 core=2:4 coda=5:6",
    "prelude=0:2 core=2:5 coda=5:6",
    "prelude=0:1 core=3:6",
    "core=0:2 coda=4:6",
    "core=0:6",
)
SHORT = ("core=0:1 coda=2:3 loops=1", "prelude=0:1 core=1:2 coda=2:3 loops=1")
SLEEPERS = ("V3", "V3, groups", "V3, not renormalised")
FAMILIES = published_case.DENSE
MOES = ("hf_olmoe_a", "hf_qwen2_moe_a", "hf_gpt_oss_a")
TABLE = {
    ("split=2", "split=3"): MIXTURES,
    ("split=2",): (*MOES, "hf_mixtral_a", "hf_deepseek_v2_a"),
    ("experts=×2", "experts=+4 asleep"): SLEEPERS,
    ("experts=x2",): ("hf_deepseek_v3_a", "hf_glm4_moe_a", "hf_folders_a/deepseek_v3_mtp"),
    ("experts=x3 noise=0",): ("one of σ",),
    tuple(f"mixture={sizes}" for sizes in ("4/1", "6/1", "4/2", "8/4", "4/4")): DENSE,
    ("mixture=8/4",): FAMILIES,
    (*(f"{ranges} loops=3" for ranges in RANGES), "core=0:6 loops=1"): LAYERS,
    SHORT: (*MOES, "hf_deepseek_v3_a", *FAMILIES),
    ("mixture=8/2 split=2", "mixture=8/4 core=0:3 loops=1"): ("llama",),
    ("prelude=0:1 core=1:3 loops=1 mixture=4/2 split=3",): ("llama",),
    ("experts=x2 split=2", "split=3 experts=+8 asleep"): SLEEPERS,
}
CASES = [(words, kind) for rows, kinds in TABLE.items() for words in rows for kind in kinds]


def before(kind: str, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor], Tensor, Tensor]:
    """Returns a model, its weights, tokens and their logits, which a folder has recorded."""
    if kind.startswith("hf_"):
        plan, arrays = open_family(folder_of(kind)), arrays_of(kind)
        return plan.model, state_of(plan, dtype), arrays["ids"], arrays["logits"]
    model = model_of(kind)
    state = drawn(model, dtype)
    return model, state, TOKENS, logits_of(model, state)


def left_out(words: str, num_layers: int) -> set[int]:
    """Returns the layers that are in no range of the words; none, if there are no ranges."""
    ranges = [each.partition("=")[2].split(":") for each in words.split() if ":" in each]
    kept = {layer for first, end in ranges for layer in range(int(first), int(end))}
    return {*range(num_layers)} - kept if ranges else set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize(("words", "kind"), CASES)
def test_the_first_logits_are_promised(words: str, kind: str, dtype: torch.dtype) -> None:
    """They are those of the layers that are left, whose others add nothing: all zeros."""
    model, state, tokens, logits = before(kind, dtype)
    after, weights, growths = grow(model, state, words)
    lost, has_loops = left_out(words, model.num_layers), "loops=" in words
    zeroed = tuple(f"group.{layer}." for layer in lost)
    pruned = {name: value * (not name.startswith(zeroed)) for name, value in state.items()}
    found = logits_of(after.with_loops(1) if has_loops else after, weights, tokens)
    tolerance = min(TOLERANCE[dtype], 1e-6 if has_loops and "mixture" not in words else 1)
    torch.testing.assert_close(found, logits_of(model, pruned, tokens), atol=tolerance, rtol=0)
    is_exact = not lost and "loops=3" not in words and "noise" not in words
    assert all(growth.is_exact for growth in growths) == is_exact
    if not lost:
        torch.testing.assert_close(found, logits, atol=2e-5, rtol=0, check_dtype=False)


BECOMES = dict.fromkeys(FAMILIES, "") | {"hf_llama_a": "mixtral", "hf_mistral_a": "mixtral"}
BECOMES |= {"hf_qwen3_a": "qwen3_moe"}  # others have moebius' own code, or its safetensors
STAY = ("olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "ernie4_5_moe", "glm4_moe")
BECOMES |= {f"hf_{name}_a": name for name in STAY}


@pytest.mark.parametrize("kind", BECOMES)
def test_what_grows_is_of_the_family_that_can_say_it(kind: str) -> None:
    model, state, _, _ = before(kind, torch.float32)
    family = family_of(grow(model, state, "mixture=8/4" if kind in FAMILIES else "split=2")[0])
    assert (family.model_types[0] if family else "") == BECOMES[kind]
