"""Hugging Face folders: transformers itself, in a process of its own, gives our logits, with and
without its cache, padding and beams; and what cannot go out that way is refused.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from family import NAMES, tiny_config
from hf_case import (
    LENGTHS,
    PROMISED,
    STEP,
    TOKENS,
    checkpoint_of,
    logits,
    make_run,
    model_of,
    prepare_bands,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebius.data_pipeline.tokenizers.huggingface import HuggingFaceTokenizer
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import prepared_tokenizer
from moebius.evaluation.generate import generate
from moebius.export.hf.model_folder import CODE, check_promises, export
from moebius.export.hf.tokenizer import tokenizer_files
from moebius.kernels.reference import ACTIVATIONS, activate
from moebius.model.execution.precision import forward_in
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import ConfigError

pytestmark = pytest.mark.timeout(900)  # the first slow test starts transformers
READER = Path(__file__).parents[1] / "hf_reader.py"
TEXTS = [
    "the band number 7 closes upon itself",
    "  two  blanks\n\nand\ttabs ",
    "1234567890 3.14",
    "Ünïcödé, 漢字, 🙂\u200d🙂 e\u0301",
    "a<|end_of_document|>b",
    "",
]
# Not in any recipe: learned positions or none, norms of outputs alone, one gated head, gated units, shared experts.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "learned_positions": (
        "dense",
        {
            "attention.positions": {"kind": "learned", "max_positions": 40},
            "norm": "output",
            "head_bias": False,
            "final_norm": False,
            "feed_forward.activation": "swiglu",
            "feed_forward.dense_bias": False,
        },
    ),
    "head_gate": (
        "moeut",
        {
            "attention.num_experts": 1,
            "attention.top_k": 1,
            "attention.single_expert": "output_gate",
            "attention.positions": {"kind": "none"},
            "feed_forward.activation": "geglu",
            "feed_forward.expert_bias": True,
            "feed_forward.sparse_layers": "every_second",
        },
    ),
    "shared": (
        "deepseek",
        {
            "feed_forward.activation": "clamped_swiglu",
            "feed_forward.router.scores": "softmax",
            "feed_forward.router.group_score": "max",
            "feed_forward.router.renormalise": False,
            "feed_forward.router.route_scale": 2.0,
            "feed_forward.output_norm": True,
            "feed_forward.sparse_layers": 1,
        },
    ),
    "sphere": (
        "mh_moe",
        {
            "feed_forward.router.gate": "sigmoid",
            "feed_forward.router.d_routing": 3,
            "attention.positions": {"kind": "rotary", "width": 4, "base": 100.0},
        },
    ),
    "sphere_released": ("mh_moe", {"feed_forward.router.behaviour": "torchscale"}),
    "conditioned": (
        "moeut_sandwich",
        {
            "loops.inject": "add",
            "loops.start": "zero",
            "loops.condition": "scale_shift",
            "loops.residual_scale": 0.7,
            "loops.exit_entropy": 0.1,
        },
    ),
    "far": ("sut", {"attention.max_distance": 4, "feed_forward.activation": "gelu"}),
}
ALL = (*PROMISED, *VARIANTS)


BF16 = ("moeut", "sut", "dense", "top_k")


def model_for(name: str) -> Transformer:
    recipe, changes = VARIANTS.get(name, (name, {}))
    return model_of(recipe, json.dumps(changes))


@pytest.fixture(scope="module")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_bands(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def folders(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of every model."""
    runs, folders = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("hf")
    given = {"tokens": TOKENS, "lengths": torch.tensor(LENGTHS)}
    for name in ALL:
        data = str(text_data) if name == "moeut" else "nowhere"
        run = make_run(runs / name, model_for(name), data=data)
        export(checkpoint_of(run), folders / name)
        if name in BF16:
            export(checkpoint_of(run), folders / f"{name}_bf16", dtype="bf16")
    for folder in list(folders.iterdir()):
        save_file(given, folder.with_suffix(".given"))
    folders_of_bytes = tokenizer_files(BytesTokenizer(), max_length=20)
    for name, content in folders_of_bytes.items():
        (folders / "dense" / name).write_text(content)
    for name in ("moeut", "dense"):
        (folders / f"{name}.texts").write_text(json.dumps(TEXTS))
    return folders


@pytest.fixture(scope="module")
def answers(folders: Path) -> dict[str, dict[str, Tensor]]:
    """Returns transformers' outputs for every folder."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    read = subprocess.run(
        [sys.executable, "-I", str(READER), str(folders)],
        cwd=folders,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr[-3000:]
    return {path.stem: load_file(path) for path in folders.glob("*.answers")}


def close(found: Tensor, expected: Tensor, name: str = "") -> None:
    # ouro_moe: in float64 both agree to 4e-14, and in float32 each is 1.7e-5 away from that
    atol = 4e-5 if name == "ouro_moe" else 1e-5
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_transformers_gives_our_logits_text_and_loss(
    name: str, answers: dict[str, dict[str, Tensor]]
) -> None:
    found, expected = answers[name], logits(model_for(name))
    assert expected.abs().max() > 0.5
    for how in ("logits", "cached", "again", "embedded"):
        close(found[how], expected, name)
    close(found["last"], expected[:, -1:], name)
    assert found["cache_entries"] == model_for(name).config.num_layers
    for row, length in enumerate(LENGTHS):
        close(found["left"][row, max(LENGTHS) - length :], expected[row, :length], name)
        close(found["right"][row, :length], expected[row, :length], name)
        prompt = TOKENS[row, : min(length, 8)]
        written = list(generate(model_for(name), prompt, num_tokens=6, temperature=0))
        assert found["generated"][row, -6:].tolist() == written
    assert torch.equal(found["beams"], found["beams_without_cache"])
    assert len(found["beams"]) == 2 * len(LENGTHS)
    predicted, targets = expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()
    close(found["loss"], F.cross_entropy(predicted, targets))
    assert found["fresh"].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_exported_activations_are_those_of_training(activation: str) -> None:
    """Also beyond the bounds of gpt-oss's, which a small model does not reach."""
    code = pytest.importorskip("moebius.export.hf.experts_moebius", reason="needs transformers")
    z = 6 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(code.activate(z, activation), activate(z, activation))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moeut", "huginn_moe", "parcae_moe", "ouro_moe", "conditioned"])
@pytest.mark.parametrize("loops", [1, 3])
def test_transformers_takes_the_number_of_loops(
    name: str, loops: int, answers: dict[str, dict[str, Tensor]]
) -> None:
    model = deepcopy(model_for(name))
    model.config = model.config.with_loops(loops)
    close(answers[name][f"loops{loops}"], logits(model), name)
    written = list(generate(model, TOKENS[0, :8], num_tokens=6, temperature=0))
    assert answers[name][f"generated{loops}"][0, -6:].tolist() == written


@pytest.mark.slow
@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "dense",
            ["num_loops=3: the model repeats no layer", "", "num_loops=9: the model repeats"],
        ),
        ("sut", ["num_loops=3: the model halts by itself", "=1: the model halts", "=9: the model"]),
        (
            "huginn_moe",
            ["", "has 10 depth steps, .* has 4: continue a", "10 depth steps, .* has 20"],
        ),
    ],
)
def test_a_number_of_loops_that_cannot_be_is_refused(
    name: str, words: list[str], folders: Path
) -> None:
    """0, then 3, then a cache of the trained number continued with 1 and with 9."""
    said = json.loads((folders / f"{name}.refused").read_text())
    for found, expected in zip(said, ["num_loops=0 must be at least 1$", *words], strict=True):
        assert re.search(expected, found) if expected else not found


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_low_precision_is_as_exact_as_training_in_it(
    name: str, answers: dict[str, dict[str, Tensor]]
) -> None:
    with torch.no_grad():
        expected = forward_in(model_of(name), torch.bfloat16, TOKENS).logits_BSV
    exact = logits(model_of(name))
    found = answers[f"{name}_bf16"]
    # Medians, because rounding can flip a choice of experts and then changes all later readers of
    # the token: in few layers of the two models below, in most of MoEUT's.
    error, usual = ((one - exact).abs().median() for one in (found["logits"], expected))
    assert usual > 1e-4
    assert found["other_dtypes"] == 0
    if name in ("dense", "top_k"):
        assert error < 1.2 * usual


@pytest.mark.slow
@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("name", ["moeut", "dense"])
def test_auto_tokenizer_gives_our_ids(name: str, folders: Path, text_data: Path) -> None:
    found = json.loads((folders / f"{name}.ids").read_text())
    ours = prepared_tokenizer(text_data) if name == "moeut" else BytesTokenizer()
    assert found["ids"] == [ids.tolist() for ids in ours.encode_batch(TEXTS)]
    assert found["texts"] == TEXTS
    assert found["eos"] == ours.end_of_document_id
    assert "Once upon a time" in found["card"]  # the card's example was run


# Without transformers ------------------------------------------------------------------------------


def test_the_recipes_that_promise_it_go_out_and_no_others() -> None:
    kept = {name for name in NAMES if not refusal(name)}
    assert kept == set(PROMISED)


def refusal(name: str) -> str:
    try:
        check_promises(tiny_config(name))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("soft_moe", "a later position can change"),
        ("mixture_of_tokens", "the other sequences of a batch can change"),
        ("switch_causal", r"evaluation_capacity_factor=2.0; a model trained with"),
        ("switch", "a later position .* and the other sequences"),
    ],
)
def test_a_refusal_says_why(name: str, words: str) -> None:
    assert re.search(words, refusal(name))


@pytest.fixture(scope="module")
def exported(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder beside its run."""
    folder = tmp_path_factory.mktemp("one")
    run = make_run(folder / "run", model_of("moeut"), data=str(text_data))
    export(checkpoint_of(run), folder / "out", max_file_bytes=40_000)
    return folder / "out"


def test_the_folder_holds_code_tokenizer_and_card_and_no_pickle(exported: Path) -> None:
    found = {path.name for path in exported.iterdir()}
    weights = {name for name in found if name.endswith(".safetensors")}
    assert len(weights) > 1
    assert found - weights == {
        *CODE,
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "README.md"),
    }
    for name in CODE:
        imported = re.findall(r"^(?:from|import) (\S+)", (exported / name).read_text(), re.M)
        assert {one.split(".")[0] for one in imported} <= {
            *("math", "torch", "transformers", "typing", "")
        }
    described = json.loads((exported / "config.json").read_text())
    assert described["architectures"] == ["MoebiusForCausalLM"]
    assert described["model"] == model_of("moeut").config.model_dump(mode="json")
    assert described["num_hidden_layers"] == model_of("moeut").config.num_layers
    assert described["eos_token_id"] == described["pad_token_id"] == 0


def test_the_card_says_what_the_run_knows(exported: Path) -> None:
    said = (exported / "README.md").read_text()
    for words in (
        "# tiny",
        f"| steps | {STEP} of {STEP} |",
        f"| training loss | {6 - STEP / 4:.4f} nats per token |",  # of the exported step
        "| validation loss | 4.5000 nats per token |",
        "| bands | CC0-1.0 |",
    ):
        assert words in said, words
    loads = said.count(
        ".from_pretrained("
    )  # without trust_remote_code the call would wait for input
    assert loads == said.count(", trust_remote_code=True)") == 2
    assert str(exported.parent) not in said


def test_a_card_of_a_checkpoint_alone_says_what_is_absent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model_of("dense"))
    checkpoint_of(run).rename(tmp_path / "alone")
    export(tmp_path / "alone", tmp_path / "out")
    said = (tmp_path / "out" / "README.md").read_text()
    for words in ("data was not available", "loss | unknown", "no tokenizer"):
        assert words in said


def test_bytes_have_a_tokenizer_of_their_own() -> None:
    files = tokenizer_files(BytesTokenizer(), max_length=20)
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    library.encode_special_tokens = True
    for text, ids in zip(TEXTS, BytesTokenizer().encode_batch(TEXTS), strict=True):
        assert library.encode(text).ids == ids.tolist()
    assert library.token_to_id("<|end_of_document|>") == 256


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_no_more(text_data: Path) -> None:
    described = json.loads((text_data / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "<|end_of_document|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, text],
        "pair": [end, text, text],
        "special_tokens": {
            "<|end_of_document|>": {
                "id": "<|end_of_document|>",
                "ids": [0],
                "tokens": ["<|end_of_document|>"],
            }
        },
    }
    tokenizer = HuggingFaceTokenizer(json.dumps(described))
    library = tokenizers.Tokenizer.from_str(tokenizer_files(tokenizer, 20)["tokenizer.json"])
    ids = tokenizer.encode_batch(["the band"])[0].tolist()
    assert library.encode("the band").ids == ids


def test_from_the_command_line(exported: Path, tmp_path: Path, moebius: Callable[..., Any]) -> None:
    out, options = tmp_path / "out", "--format hf --dtype bf16 --no-tokenizer"
    answer = moebius("ckpt", "export", exported.parent / "run", *options.split(), "--out", out)
    assert answer.code == 0
    words = rf"weights of step {STEP}, \d+ keys, 0\.\d MB model\.safetensors no tokenizer, as req"
    assert re.search(words, answer.text), answer.text
    assert not (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    mixed = make_run(tmp_path / "mixed", model_of("mixture_of_tokens"))
    answer = moebius("ckpt", "export", mixed, "--out", tmp_path / "refused")
    assert answer.code == 2
    assert "cannot be exported to Hugging Face: the other" in answer.text, answer.text
    assert not (tmp_path / "refused").exists()
