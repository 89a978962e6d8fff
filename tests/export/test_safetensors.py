"""Exported weights: every tensor has the same bits under the documented keys, and errors leave
nothing behind.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import NAMES
from hf_case import (
    PROMISED,
    checkpoint_of,
    make_run,
    model_of,
    prepare_bands,
)
from pairwise import slow_but
from published_case import config_in, differences, tensors_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebius import start_from
from moebius.distributed.checkpoint.format import CheckpointError
from moebius.distributed.checkpoint.grown import PublishedReader
from moebius.distributed.parallelize import expert_names
from moebius.export import safetensors as module
from moebius.export.hf.model_folder import export
from moebius.export.safetensors import Precision
from moebius.model.execution.precision import enters_a_product
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import ConfigError
from moebius.train.families.import_run import import_source
from moebius.train.families.table import open_family
from moebius.train.record.run_folder import checkpoint_config

PAPER, DENSE = "moeut", "dense"
NAMES_OF_EXPERTS = {"w_up": "w_up.weight", "w_down": "w_down.weight", "weight": "weight"} | {
    "b_up": "w_up.bias",
    "b_down": "w_down.bias",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of MoEUT, with a trained tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    shards = str(prepare_bands(folder))
    return checkpoint_of(make_run(folder / PAPER, model_of(PAPER), data=shards, tokenizer="bpe"))


def documented(model: Transformer) -> dict[str, tuple[str, Tensor]]:
    """Returns each documented key with the tensor's name in the model and its value."""
    found, banks = {}, expert_names(model)
    for name, tensor in model.state_dict().items():
        if name not in banks:
            key = name + ".weight" * (name in ("embedding", "position_embedding"))
            found[key] = name, tensor
            continue
        bank, _, last = name.rpartition(".")
        for expert, value in enumerate(tensor):
            value = value.T if value.dim() == 2 else value
            found[f"{bank}.{expert}.{NAMES_OF_EXPERTS[last]}"] = name, value
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", slow_but(NAMES, *NAMES[::4]))
def test_every_architecture_goes_out_comes_back_and_goes_out_with_the_same_bits(
    name: str, dtype: Precision, tmp_path: Path
) -> None:
    model, out, again = model_of(name), tmp_path / "out", tmp_path / "again"
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    layout = "hf" if name in PROMISED else "safetensors"  # which takes any model
    run = make_run(tmp_path / "run", model)
    export(checkpoint_of(run), out, dtype=dtype, layout=layout)
    stored, wanted, plan = tensors_in(out), documented(model), open_family(out)
    assert stored.keys() == wanted.keys()
    assert plan.model == model.config
    for key, (own, tensor) in wanted.items():
        is_cast = enters_a_product(own) and not own.startswith("loops.exit_gate")
        kept = precision if is_cast else torch.float32
        assert stored[key].dtype == kept, key
        assert torch.equal(stored[key], tensor.to(kept)), key
    reader = PublishedReader(plan.folder, plan.pieces)
    for key, tensor in model.state_dict().items():
        found, kept = reader.weight(key), tensor
        if enters_a_product(key) and not key.startswith("loops.exit_gate"):
            kept = tensor.to(precision).float()
        assert torch.equal(found, kept), key
    import_source(out, tmp_path / "in")
    export(tmp_path / "in" / "checkpoints" / "step_00000000", again, layout=layout)
    assert differences(stored, tensors_in(again)) == []
    assert config_in(out)["model"] == config_in(again)["model"]


def test_an_export_starts_a_run_with_its_tokenizer_and_runs_none_of_its_code(
    checkpoint: Path, tmp_path: Path
) -> None:
    export(checkpoint, tmp_path / "out")
    for code in (tmp_path / "out").glob("*.py"):
        code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    start = start_from(tmp_path / "out", None, "prepare.input=text.txt", "train.steps=3")
    assert start.config.prepare.tokenizer == str(tmp_path / "out")
    assert start.source.family == "moebius"
    assert start.source.tokenizer is not None
    import_source(tmp_path / "out", tmp_path / "in")
    export(tmp_path / "in" / "checkpoints" / "step_00000000", tmp_path / "again")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        one, other = ((tmp_path / each / file).read_text() for each in ("out", "again"))
        assert json.loads(one).get("eos_token_id") == json.loads(other).get("eos_token_id")
        assert file == "tokenizer_config.json" or one == other
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an export to edit, with its config.json as before.json, too."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export(checkpoint, out)
    (out / "before.json").write_text((out / "config.json").read_text())
    return out


EDITS: list[tuple[str, dict[str, Any], str]] = [
    ("model.d_model", {"d_model": -4}, r"model\.d_model: must be an integer > 0, .*\(given: -4\)"),
    ("a word", {"norm": "sideways"}, r"model\.norm: .*\(given: 'sideways'\)"),
    ("unknown", {"d_modell": 4}, r"model\.d_modell: unknown key"),
    ("another width", {"d_model": 36}, r"hidden_size=\d+ and model\.d_model=36 differ"),
    ("huge", {"num_layers": 10**9}, r"model\.num_layers=1000000000 must be at most"),
    ("code", {"norm_layer": "os:system"}, r"model\.norm_layer='os:system' names code"),
    ("more layers", {"layers_per_group": 4}, r"sparse_members=\[0, 1\] and .* differ"),
    ("another form", {"norm": "sandwich"}, r"has no tensor group\.0\.attention_output_norm"),
]


@pytest.mark.parametrize(("what", "edit", "message"), EDITS, ids=[edit[0] for edit in EDITS])
def test_an_edited_export_is_checked(
    what: str, edit: dict[str, Any], message: str, exported: Path
) -> None:
    config = config_in(exported, "before.json")
    config["model"] |= edit
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as refused:
        open_family(exported)
    assert str(exported) in str(refused.value)


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
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, buffer in BUFFERS.items():
        assert stored[name].dtype == buffer.dtype, name
        assert torch.equal(stored[name], buffer), name
    assert stored["head.weight"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


def test_files_are_small_enough_and_the_index_says_where_everything_is(
    checkpoint: Path, tmp_path: Path
) -> None:
    exported = export(checkpoint, tmp_path / "out", max_file_bytes=30_000)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CHECKPOINT", "--out", "taken"], "taken exists already and is not overwritten"),
        (
            ["CHECKPOINT", "--out", "step_00000007"],
            "only a checkpoint may be called step_<number>; choose another name",
        ),
        (["nowhere", "--out", "out"], "nowhere: there is no such folder"),
        (
            ["RUN", "--out", "out", "--step", "3"],
            "has no checkpoint of step 3; it has those of 7",
        ),
        (
            ["CHECKPOINT", "--out", "out", "--step", "3"],
            "step 3 name two steps: leave one of them out",
        ),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    moebius: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    places = {"CHECKPOINT": str(checkpoint), "RUN": str(checkpoint.parents[1])}
    answer = moebius("ckpt", "export", *(places.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in answer.text, answer.text
    assert os.listdir() == ["taken"]


def test_what_no_run_has_written_is_not_exported() -> None:
    with pytest.raises(CheckpointError, match=r"^checkpoint: lacks configuration or progress"):
        checkpoint_config(Path("checkpoint"), {"config": {}})


def test_without_the_library_the_line_that_installs_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'moebius[export]'")):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = module.require_safetensors()

    def full(tensors, file, **_):
        save_file(dict(list(tensors.items())[:1]), file)
        raise library.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(library.torch, "save_file", full)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors could not be written: .*No space left"
    ):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_a_disk_that_loses_bytes_is_noticed(
    how: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == []
