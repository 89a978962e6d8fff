"""Exports: every architecture comes back with the same bits, files are as documented, errors leave
nothing behind.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family import NAMES
from hf_case import STEP, VOCABULARY, checkpoint_of, make_run, model_of, prepare_bands
from pairwise import slow_but
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.distributed.checkpoint.format import CheckpointError
from moebius.export import safetensors as module
from moebius.export.safetensors import Precision, export, load_export
from moebius.model.execution.precision import enters_a_product, forward_in
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, ConfigError

TOKENS = torch.arange(8 * 16).view(8, 16) * 37 % VOCABULARY
PAPER, DENSE = "moeut", "dense"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every recipe; MoEUT's has a trained tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    shards = str(prepare_bands(folder))
    for name in NAMES:
        tokenizer = "bpe" if name == PAPER else "bytes"
        make_run(folder / name, model_of(name), data=shards, tokenizer=tokenizer)
    return {name: checkpoint_of(folder / name) for name in NAMES}


def logits(model: Transformer, dtype: torch.dtype | None = None) -> Tensor:
    with torch.no_grad():
        return (model(TOKENS) if dtype is None else forward_in(model, dtype, TOKENS)).logits_BSV


@pytest.mark.parametrize("name", slow_but(NAMES, *NAMES[::4]))
def test_every_architecture_comes_back_with_the_same_bits(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    precisions: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for dtype, precision in precisions.items():
        export(runs[name], tmp_path / dtype, dtype=dtype, max_file_bytes=40_000)
        loaded = load_export(tmp_path / dtype)
        assert torch.equal(logits(loaded), logits(model_of(name), precision)), dtype
        for key, tensor in model_of(name).state_dict().items():
            stored = precision if enters_a_product(key) else torch.float32
            assert loaded.state_dict()[key].dtype == stored
            assert torch.equal(loaded.state_dict()[key], tensor.to(stored)), key


BUFFERS = {
    "group.0.seen": torch.tensor([2**53 + 1, -1]),  # not representable in float64
    "group.0.is_open": torch.tensor([True, False]),
    "group.1.exact": torch.tensor([1 / 3], dtype=torch.float64),
    "group.1.mean": torch.tensor([1 / 3]),  # its name could be a matrix's
}


class Buffered(Transformer):
    """A model with buffers of all kinds."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        for name, buffer in BUFFERS.items():
            member, _, attribute = name.rpartition(".")
            self.get_submodule(member).register_buffer(attribute, buffer.to(self.embedding.device))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_no_weight_is_kept_as_it_is(
    dtype: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Buffered(model_of(DENSE).config)
    initialise(model, 1)
    make_run(tmp_path / "run", model)
    monkeypatch.setattr(module, "Transformer", Buffered)
    export(checkpoint_of(tmp_path / "run"), tmp_path / "out", dtype=dtype)
    stored, loaded = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_export(tmp_path / "out").state_dict(),
    )
    for name, buffer in BUFFERS.items():
        for found in (stored[name], loaded[name]):
            assert found.dtype == buffer.dtype, name
            assert torch.equal(found, buffer), name
    assert loaded["head.weight"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


def test_the_keys_are_those_of_the_documents(runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs[PAPER], tmp_path / "out")
    stored, model = load_file(tmp_path / "out" / "model.safetensors"), model_of(PAPER)
    group = dict(model.get_submodule("group.0").named_parameters())
    up, down = (
        group["feed_forward.sparse.experts.w_up"],
        group["feed_forward.sparse.experts.w_down"],
    )
    value = group["attention.value.experts.weight"]
    for expert in range(up.shape[0]):
        prefix = f"group.0.feed_forward.sparse.experts.{expert}"
        assert torch.equal(stored.pop(f"{prefix}.w_up.weight"), up[expert].T)
        assert torch.equal(stored.pop(f"{prefix}.w_down.weight"), down[expert].T)
    for expert in range(value.shape[0]):
        assert torch.equal(
            stored.pop(f"group.0.attention.value.experts.{expert}.weight"), value[expert].T
        )
    assert torch.equal(stored.pop("embedding.weight"), model.embedding)
    assert torch.equal(stored.pop("head.weight"), model.head.weight)
    assert torch.equal(
        stored.pop("group.0.feed_forward.router.weight"), group["feed_forward.router.weight"]
    )
    assert not [key for key in stored if "optimizer" in key]


def test_files_are_small_enough_and_the_index_says_where_everything_is(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    exported = export(runs[PAPER], tmp_path / "out", max_file_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == exported.files
    assert files == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
        assert {key for key, place in index["weight_map"].items() if place == file} == set(tensors)
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        total += size
    assert index["metadata"]["total_size"] == total == exported.num_bytes


def test_what_stands_beside_the_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs[PAPER], tmp_path / "out", dtype="bf16")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["model"] == model_of(PAPER).config.model_dump(mode="json")
    assert (described["dtype"], described["vocab_size"], described["step"]) == (
        "bfloat16",
        VOCABULARY,
        STEP,
    )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        runs[PAPER].parents[2] / "shards" / "tokenizer.json"
    ).read_bytes()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end_of_document|>"
    assert described["eos_token_id"] == 0


def test_from_the_command_line(
    runs: dict[str, Path], tmp_path: Path, moebius: Callable[..., Any]
) -> None:
    run_dir = runs[PAPER].parents[1]
    answer = moebius("ckpt", "export", str(run_dir), "--out", str(tmp_path / "out"))
    assert answer.code == 0
    words = rf"weights of step {STEP}, \d+ keys, 0\.\d MB model\.safetensors"
    assert re.search(words, answer.text), answer.text
    assert "tokenizer.json with 257 ids" in answer.text
    assert torch.equal(logits(load_export(tmp_path / "out")), logits(model_of(PAPER)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CHECKPOINT", "--out", "taken"], "taken exists already and is not overwritten"),
        (
            ["CHECKPOINT", "--out", "step_00000007"],
            "only a checkpoint may be called step_<number>; choose another name",
        ),
        (["nowhere", "--out", "out"], "nowhere: has no checkpoint"),
        (
            ["RUN", "--out", "out", "--step", "3"],
            "has no checkpoint of step 3; it has those of 7",
        ),
        (
            ["CHECKPOINT", "--out", "out", "--step", "7"],
            "is a checkpoint: give a run folder to select a step",
        ),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str],
    message: str,
    runs: dict[str, Path],
    tmp_path: Path,
    moebius: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    places = {"CHECKPOINT": str(runs[PAPER]), "RUN": str(runs[PAPER].parents[1])}
    answer = moebius("ckpt", "export", *(places.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in answer.text, answer.text
    assert os.listdir() == ["taken"]


def test_a_tokenizer_of_bytes_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepared_tokenizer", lambda directory: BytesTokenizer())
    config = Config()
    tokenizer, words = module.tokenizer_of(config)
    assert words.endswith("ids are UTF-8 bytes, and 256 ends a document")
    assert tokenizer is not None
    assert tokenizer.end_of_document_id == 256
    assert module._tokenizer_files(tokenizer, config) == {}


def test_what_no_run_has_written_is_not_exported() -> None:
    meta = SimpleNamespace(meta={"config": {}})
    stored: Any = SimpleNamespace(path=Path("checkpoint"), meta=meta)
    with pytest.raises(CheckpointError, match=r"^checkpoint: lacks configuration or progress"):
        module.config_of(stored)


def test_without_the_library_the_line_that_installs_it(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for act in (lambda: export(runs[PAPER], tmp_path / "out"), lambda: load_export(tmp_path)):
        with pytest.raises(ConfigError, match=re.escape("pip install 'moebius[export]'")):
            act()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = module.require_safetensors()

    def full(tensors, file, **_):
        save_file(dict(list(tensors.items())[:1]), file)
        raise library.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(library.torch, "save_file", full)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors could not be written: .*No space left"
    ):
        export(runs[PAPER], tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_a_disk_that_loses_bytes_is_noticed(
    how: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = module._save

    def lossy(tensors, file: Path) -> None:
        save(tensors, file)
        content = bytearray(file.read_bytes())
        content[-3] ^= 64
        file.write_bytes(content if how == "flipped" else content[:-8])

    monkeypatch.setattr(module, "_save", lossy)
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors reads back differently \(.*check the disk",
    ):
        export(runs[PAPER], tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def exported(runs: dict[str, Path], tmp_path: Path) -> Path:
    export(runs[PAPER], tmp_path / "out")
    return tmp_path / "out"


EXPERT = "group.0.feed_forward.sparse.experts.3.w_up.weight"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (EXPERT, None, rf"lacks the key {EXPERT} \(differences from its model: 1\)"),
        ("more", lambda found: torch.zeros(1), "has the unexpected key more"),
        (
            EXPERT,
            lambda found: found.T.contiguous(),
            rf"{EXPERT} has shape \[24, 8\], but its model needs \[8, 24\]",
        ),
        (
            EXPERT,
            lambda found: found.to(torch.int32),
            rf"{EXPERT} is torch.int32, but its model needs torch.float32",
        ),
    ],
)
def test_an_export_that_lacks_something_is_not_loaded(
    key: str, change: Callable[[Any], Tensor] | None, message: str, exported: Path
) -> None:
    tensors = load_file(exported / "model.safetensors")
    found = tensors.pop(key, None)
    if change is not None:
        tensors[key] = change(found)
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        load_export(exported)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (INDEX, {"metadata": {}}, "has no weight_map from keys to files"),
        (INDEX, {"weight_map": [EXPERT]}, "has no weight_map from keys to files"),
        (INDEX, {"weight_map": {EXPERT: 3}}, "has no weight_map from keys to files"),
        (INDEX, [], "is not a JSON object"),
        (
            INDEX,
            {"weight_map": {EXPERT: "../model.safetensors"}},
            "names a file outside its folder: ../model",
        ),
        (
            INDEX,
            {"weight_map": {EXPERT: "model-1.safetensors", "b": "model.safetensors"}},
            "out: lacks model-1.safetensors of 2 weight files",
        ),
        ("config.json", {"step": 3}, "does not describe a moebius model: it has no 'model'"),
        ("config.json", {"model": {}, "step": None}, "does not describe a moebius model"),
    ],
)
def test_an_export_that_is_described_wrongly_is_not_loaded(
    file: str, content: object, message: str, exported: Path
) -> None:
    (exported / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_export(exported)


def test_a_key_that_its_file_has_not_is_named(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    del tensors[EXPERT]
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"model.safetensors: cannot be read: .*{re.escape(EXPERT)}"
    ):
        load_export(exported)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_an_export_with_a_damaged_file_is_not_loaded(file: str, exported: Path) -> None:
    content = (exported / file).read_bytes()
    (exported / file).write_bytes(content[: len(content) // 3])
    with pytest.raises(ConfigError, match=re.escape(file)):
        load_export(exported)
    (exported / file).unlink()
    with pytest.raises(ConfigError, match=re.escape(file)):
        load_export(exported)
