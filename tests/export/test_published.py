"""Published weights: recorded runs of the official code become runs with the recorded logits.

Files that hold no weights or do not fit are refused.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family import tiny_config
from golden import Golden, load_golden
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained import assembled

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.checkpoint.atomic_directory import write_checkpoint
from moebius.distributed.checkpoint.format import open_verified, read_meta
from moebius.distributed.checkpoint.loading import load
from moebius.evaluation.generate import generate
from moebius.export.hf.model_folder import export
from moebius.model.execution.precision import store_in
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.families.import_run import import_published, read_tensors, translate
from moebius.train.optim import make_optimizer
from moebius.train.run import resume
from moebius.train.state import allocate_moments, model_tensors, state_tensors

VOCABULARY = 257
RECORDED = (
    *("moeut_tiny_g2", "moeut_tiny_dense_att", "moeut_tiny_noshare", "train_tiny_dense"),
    *("train_tiny_moeut_train", "train_tiny_moeut_preln", "train_tiny_sigma_moe"),
    "train_tiny_sut_act",
)


def published(golden: Golden) -> dict[str, Tensor]:
    """Returns the recorded weights under their own names."""
    keys = [key for key in golden.arrays if key.startswith("w/")]
    return {key.removeprefix("w/"): golden[key] for key in keys}


def step_0(out: Path) -> Path:
    return out / "checkpoints" / "step_00000000"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_weights_give_recorded_logits(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    torch.save({"model": published(golden), "iteration": 100_000}, tmp_path / "model.pth")
    # fewer tokens than any of our tokenizers has
    prepare = PrepareConfig(tokenizer="words.json", vocab_size=golden.config.vocab_size)
    config = Config(model=golden.config, prepare=prepare)
    imported = import_published(tmp_path / "model.pth", tmp_path / "out", config)
    assert imported.num_parameters == sum(w.numel() for w in published(golden).values())
    assert open_verified(step_0(tmp_path / "out")).meta.step == 0
    model = Transformer(golden.config)
    load(step_0(tmp_path / "out"), *model_tensors(model), allow_unexpected=True)
    with torch.no_grad():
        logits = model.eval()(golden["tokens"][:, :-1]).logits_BSV
    recorded = golden["logits_eval" if "logits_eval" in golden.arrays else "logits"]
    torch.testing.assert_close(logits, recorded, atol=1e-5, rtol=0)


def released(model: Transformer) -> dict[str, Tensor]:
    """Returns drawn weights of a MoEUT under the release's names."""
    generator = torch.Generator().manual_seed(1)
    names = {
        "attention.query.weight": "attention.q.weight",
        "attention.key.weight": "attention.k.weight",
        "attention.value.experts.weight": "attention.v",
        "attention.output.experts.weight": "attention.o",
        "attention.value_router.weight": "attention.sel_v",
        "attention.output_router.weight": "attention.sel_o",
        "feed_forward.sparse.experts.w_up": "ffn.keys",
        "feed_forward.sparse.experts.w_down": "ffn.values",
        "feed_forward.router.weight": "ffn.expert_sel",
        **{f"attention_norm.{part}": f"ln1.{part}" for part in ("weight", "bias")},
        **{f"feed_forward_norm.{part}": f"ln2.{part}" for part in ("weight", "bias")},
    }
    outer = {"embedding": "embedding.weight", "final_norm": "out_norm", "head": "lm_head"}
    weights = {}
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator) / 5
        if name.startswith("group."):
            _, member, rest = name.split(".", 2)
            weights[f"transformer.layers.{member}.{names[rest]}"] = value
        else:
            first, dot, rest = name.partition(".")
            weights[outer[first] + dot + rest] = value
    return weights


def tiny() -> tuple[dict[str, Tensor], Config]:
    """Returns a small model's weights under the release's names, and its configuration."""
    model = Transformer(tiny_config("moeut", {"vocab_size": VOCABULARY}))
    prepare = PrepareConfig(tokenizer="bytes")
    config = Config(model=model.config, data=DataConfig(seq_len=20), prepare=prepare)
    return released(model), config


@pytest.fixture
def release(tmp_path: Path) -> tuple[Path, Config]:
    """A small file in the release's format, and a fitting configuration."""
    weights, config = tiny()
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", config


def test_an_imported_run_is_trained_exported_and_written_with(
    release: tuple[Path, Config], tmp_path: Path
) -> None:
    file, config = release
    import_published(file, tmp_path / "out", config)
    model = Transformer(config.model)
    optimizer = make_optimizer(config.optim, model.named_parameters())
    meta = load(step_0(tmp_path / "out"), *state_tensors(model, optimizer))
    assert meta["progress"] == {"step": 0, "updates": 0, "samples": 0, "tokens": 0, "skipped": 0}
    assert meta["data"] is None
    export(step_0(tmp_path / "out"), tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["head.weight"], model.head.weight)
    assert len(list(generate(model.eval(), torch.tensor([1, 2]), num_tokens=3))) == 3


@pytest.mark.parametrize(
    "how", ["plain", "nested", "prefixed", "compiled", "half", "stored in half"]
)
def test_files_as_people_write_them(how: str, release: tuple[Path, Config]) -> None:
    file, config = release
    plain = read_tensors(file)
    content = {
        "nested": {"state_dict": plain, "epoch": 3},
        "prefixed": {f"module.{key}": value for key, value in plain.items()},
        "compiled": {"model": {f"_orig_mod.{key}": value for key, value in plain.items()}},
        "half": {key: value.bfloat16() for key, value in plain.items()},
    }.get(how, plain)
    torch.save(content, file.with_suffix(".pth"))
    out = file.parent / "out"
    if how == "stored in half":
        low = config.train.model_copy(update={"precision": "bfloat16_only"})
        config = config.model_copy(update={"train": low})
    import_published(file.with_suffix(".pth"), out, config)
    model = Transformer(config.model)
    store_in(model, torch.bfloat16 if how == "stored in half" else torch.float32)
    load(step_0(out), *model_tensors(model), allow_unexpected=True)
    expected = translate(plain, config.model, origin="")
    for name, parameter in model.named_parameters():
        wanted = expected[name].bfloat16().float() if "half" in how else expected[name]
        assert torch.equal(parameter, wanted.to(parameter.dtype)), name


def test_an_import_of_an_older_version_with_zero_moments_resumes(
    release: tuple[Path, Config], tmp_path: Path
) -> None:
    file, config = release
    import_published(file, tmp_path / "new", config)
    model = Transformer(config.model)
    optimizer = make_optimizer(config.optim, model.named_parameters())
    load(step_0(tmp_path / "new"), *model_tensors(model))
    allocate_moments(model, optimizer, 0)
    tensors, _ = state_tensors(model, optimizer)
    (tmp_path / "old").mkdir()
    config.save(tmp_path / "old" / "config.json")
    old = {name: partial(torch.clone, tensor.detach()) for name, tensor in tensors.items()}
    meta = read_meta(step_0(tmp_path / "new")).meta
    write_checkpoint(step_0(tmp_path / "old"), old, step=0, num_experts={}, meta=meta)
    for folder in ("old", "new"):
        with assembled(config, tmp_path / folder) as run:
            assert resume(run) is not None
            assert run.progress.step == 0


class Malicious:
    """An object that pickles as a function call."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_runs_something_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "was_run"
    torch.save({"embedding.weight": Malicious(mark)}, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match=r"GLOBAL posix.mkdir .* reads it with weights_only=True"):
        read_tensors(tmp_path / "model.pth")
    assert not mark.exists()


def test_from_the_command_line(
    release: tuple[Path, Config], tmp_path: Path, moebius: Callable[..., Any]
) -> None:
    file, config = release
    weights = read_tensors(file) | {"transformer.layers.0.counter": torch.zeros(3)}
    save_file(weights, file)
    config.save(tmp_path / "tiny.json")
    out = tmp_path / "out"
    asked = (str(file), str(tmp_path / "tiny.json"), "--out", str(out))
    answer = moebius("ckpt", "import", *asked, "train.steps=7", "--ignore", "*.counter")
    assert answer.code == 0, answer.text
    assert "ignored: transformer.layers.0.counter" in answer.text
    assert Config.load(out / "config.json").train.steps == 7


@pytest.mark.parametrize(
    ("changes", "argument", "message"),
    [
        (
            {"transformer.layers.0.ln12.bias": torch.zeros(1)},
            "",
            "1 of 32 keys are unknown for this kind of model: "
            "transformer.layers.0.ln12.bias; check the recipe",
        ),
        ({"lm_head.bias": None}, "", "it lacks head.bias"),
        (
            {},
            "model.feed_forward.num_experts=9",
            "group.0.feed_forward.router.weight is [28, 24] in the file and [9, 24] in the model",
        ),
        ({}, "model.head_bias=false", "the recipe's model has no head.bias"),
        ({"lm_head.bias": torch.zeros(VOCABULARY).long()}, "", "not floating point: head.bias"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Tensor | None],
    argument: str,
    message: str,
    release: tuple[Path, Config],
    tmp_path: Path,
    moebius: Callable[..., Any],
) -> None:
    file, config = release
    weights = read_tensors(file) | changes
    save_file({key: value for key, value in weights.items() if value is not None}, file)
    config.save(tmp_path / "tiny.json")
    out = tmp_path / "out"
    words = [argument] if argument else []
    answer = moebius("ckpt", "import", file, tmp_path / "tiny.json", *words, "--out", out)
    assert answer.code == 2
    assert message in answer.text, answer.text
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.pth", None, "absent.pth: is not a file"),
        ("text.pth", b"no weights", "holds more than tensors (Unsupported operand 110"),
        ("short.pth", b"", "cannot be read as a torch.save file: it ends too early"),
        ("text.safetensors", b"no weights", "text.safetensors: cannot be read"),
        ("list.pth", [torch.zeros(3)], "holds a list instead of named tensors"),
        ("empty.pth", {"epoch": 3}, "holds no named tensors; its keys are epoch"),
    ],
)
def test_what_is_no_file_of_weights(
    name: str, content: object, message: str, tmp_path: Path, moebius: Callable[..., Any]
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    answer = moebius(
        "ckpt", "import", str(tmp_path / name), "moeut", "--out", str(tmp_path / "out")
    )
    assert answer.code == 2
    assert message in answer.text, answer.text


def test_what_is_there_is_not_overwritten(
    release: tuple[Path, Config], tmp_path: Path, moebius: Callable[..., Any]
) -> None:
    (tmp_path / "out").mkdir()
    answer = moebius("ckpt", "import", str(release[0]), "moeut", "--out", str(tmp_path / "out"))
    assert (answer.code, json.dumps(os.listdir(tmp_path / "out"))) == (2, "[]")
    assert "exists already and is not overwritten" in answer.text
