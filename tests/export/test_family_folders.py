"""Folders of published families come in and go out byte for byte, without what others fell into."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import meshed, model_on, saver_in
from published_case import (
    AWKWARD,
    DENSE,
    RECORDED,
    arrays_of,
    config_in,
    differences,
    folder_of,
    names_to_export,
    recorded_model,
    tensors_in,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from trained import assembled
from world import run_ranks

from moebius.distributed.checkpoint.atomic_directory import write_checkpoint
from moebius.distributed.checkpoint.format import CheckpointError, read_meta
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.checkpoint.pieces import DTYPES_FILE, PublishedFolder
from moebius.distributed.checkpoint.source import read_source
from moebius.export.hf.model_folder import export
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.families.import_run import import_source
from moebius.train.families.start import start_from
from moebius.train.families.table import FAMILY, open_family, shapes_of
from moebius.train.run import resume
from moebius.train.state import model_tensors

pytestmark = pytest.mark.needs_shared
OVERRIDES = ("data.seq_len=16",)
STEP_0 = "checkpoints/step_00000000"
CHANGED = ("config.json", "model.safetensors")


def round_trip(folder: Path, tmp_path: Path, **options: Any) -> Path:
    """Imports a folder and exports it after no step; returns the export, `out` beside `run`."""
    import_source(folder, tmp_path / "run", None, OVERRIDES)
    export(tmp_path / "run" / STEP_0, tmp_path / "out", **options)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def out_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the export of a recorded folder, made once."""
    return cache(lambda name: round_trip(folder_of(name), tmp_path_factory.mktemp("exported")))


def copied(name: str, tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()  # recordings are read-only
    for file in folder_of(name).iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def changed_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_in(folder) | values))


# In a process of its own: transformers would take this repository's kernels/ for the library of that name.
READER = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    found = info if isinstance(info, dict) else vars(info)
    assert not any(found.values()), found
    with torch.no_grad():
        logits = model.eval()(load_file(f"{folder}.ids")["ids"]).logits
    save_file({"logits": logits.contiguous()}, f"{folder}.logits")
    model.save_pretrained(f"{folder}.fused", save_original_format=False)
"""


BORN = "born_hf_granitemoeshared_a"  # the others: test_born_models.py


@pytest.fixture(scope="module")
def read_by_transformers(
    out_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Returns by name an export that transformers has read.

    Beside it lie the logits as X.logits, and the same model under the names that transformers has in
    memory as X.fused.
    """
    folders = {name: out_of(name) for name in RECORDED + AWKWARD}
    run_dir = tmp_path_factory.mktemp("born") / "run"
    import_source(folder_of(BORN.removeprefix("born_")), run_dir, None, OVERRIDES)
    shutil.rmtree(run_dir / "source")  # as if it had been trained from drawn weights
    (run_dir / "source.json").unlink()
    folders[BORN] = run_dir.with_name("out")
    export(run_dir / STEP_0, folders[BORN], with_tokenizer=False)
    for name, folder in folders.items():
        save_file({"ids": arrays_of(name.removeprefix("born_"))["ids"]}, f"{folder}.ids")
    words = [sys.executable, "-I", "-c", READER, *folders.values()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("name", RECORDED)
def test_a_folder_comes_back_byte_for_byte(name: str, out_of: Callable[[str], Path]) -> None:
    """Every name once, and every file but config.json as it was."""
    source, out = folder_of(name), out_of(name)
    assert differences(tensors_in(source), tensors_in(out)) == []
    before, after = config_in(source), config_in(out)
    assert after.pop("num_nextn_predict_layers", 0) == 0
    before.pop("num_nextn_predict_layers", None)
    assert before == after
    ours, theirs = (
        {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in CHANGED}
        for folder in (out, source)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", [*RECORDED, *AWKWARD, BORN])
def test_transformers_loads_an_export_without_our_code(
    name: str, read_by_transformers: dict[str, Path]
) -> None:
    wanted = arrays_of(name.removeprefix("born_"))["logits"]
    found = load_file(f"{read_by_transformers[name]}.logits")["logits"]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_names_of_transformers_5_are_read_and_not_written(
    name: str, tmp_path: Path, read_by_transformers: dict[str, Path]
) -> None:
    fused = read_by_transformers[name].with_name("out.fused")
    out = round_trip(fused, tmp_path)
    assert differences(tensors_in(folder_of(name)), tensors_in(out)) == []
    # published under the names in memory
    has_others = name != "hf_gpt_oss_a" and name not in DENSE
    assert (tensors_in(fused).keys() != tensors_in(out).keys()) == has_others


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_folders_go_out_in_the_published_form(
    name: str, out_of: Callable[[str], Path]
) -> None:
    found, before = tensors_in(out_of(name)), tensors_in(folder_of(name))
    assert found.keys() == names_to_export(name)
    unlike = differences({key: before[key] for key in before.keys() & found.keys()}, found)
    assert all(key not in before for key in unlike), "those under other names are compared below"
    config = config_in(out_of(name))
    assert "quantization_config" not in config
    assert not config.get("num_nextn_predict_layers")
    if "mxfp4" in name:
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_tensors_keep_their_own_dtypes(tmp_path: Path) -> None:
    folder = copied("hf_ernie4_5_moe_a", tmp_path)
    odd = ("norm", "mlp.gate.weight", "bias")
    tensors = load_file(folder / "model.safetensors")
    mixed = {
        key: tensor if any(each in key for each in odd) else tensor.to(torch.float16)
        for key, tensor in tensors.items()
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    changed_config(folder, dtype="float16")
    out = round_trip(folder, tmp_path)
    assert differences(mixed, tensors_in(out)) == []
    assert config_in(out)["dtype"] == "float16"


# What others fell into ---------------------------------------------------------------------------


def test_the_balancing_loss_comes_back_as_it_was_trained_with(tmp_path: Path) -> None:
    """What the class adds is compared in test_families.py."""
    folder = copied("hf_mixtral_a", tmp_path)
    keys = ("router_aux_loss_coef", "output_router_logits")
    asked = "model.feed_forward.router.balance=0.2"
    for number, (is_on, overrides, coefficient) in enumerate(
        ((False, (), 0.05), (True, (), 0.05), (False, (asked,), 0.2), (True, (asked,), 0.2))
    ):
        changed_config(folder, output_router_logits=is_on)
        run_dir, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
        import_source(folder, run_dir, None, (*OVERRIDES, *overrides))
        export(run_dir / STEP_0, out)
        found = [config_in(out)[key] for key in keys]
        assert found == [coefficient, is_on or bool(overrides)]


def test_two_forms_of_one_tensor_are_refused(tmp_path: Path) -> None:
    folder = copied("hf_mixtral_a", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gate = tensors["model.layers.1.block_sparse_moe.gate.weight"]
    tensors["model.layers.1.mlp.gate.weight"] = gate.clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"is there twice, as .*block_sparse_moe.* and .*mlp\.gate"
    ):
        open_family(folder)


def saved_by_rank(folder: Path, ep: int, sharding: str) -> None:
    """Loads imported runs on this rank, and saves them as the ranks' own checkpoints."""
    with meshed(ep=ep) as (process, mesh):
        for run_dir in folder.iterdir():
            meta = read_meta(run_dir / STEP_0).meta
            model = model_on(mesh, Config.model_validate(meta["config"]).model, sharding=sharding)
            state = model_tensors(model)
            load(run_dir / STEP_0, *state, mesh=mesh)
            saver = saver_in(run_dir / "checkpoints", process, mesh)
            saver.save(7, *state, meta)
            saver.wait()


@pytest.mark.parametrize(
    ("ranks", "ep", "sharding"), [(2, 2, "none"), (4, 4, "none"), (4, 2, "fsdp")]
)
def test_every_rank_s_experts_come_back(
    ranks: int, ep: int, sharding: str, out_of: Callable[[str], Path], tmp_path: Path
) -> None:
    names = ("hf_folders_a/qwen3_moe_sharded", "hf_gpt_oss_a", "hf_deepseek_v3_a", *DENSE)
    for number, name in enumerate(names):
        shutil.copytree(out_of(name).with_name("run"), tmp_path / str(number))
    run_ranks(saved_by_rank, ranks, tmp_path, ep, sharding)
    for number, name in enumerate(names):
        run_dir = tmp_path / str(number)
        export(run_dir / "checkpoints" / "step_00000007", run_dir / "out")
        assert differences(tensors_in(folder_of(name)), tensors_in(run_dir / "out")) == []


def test_every_tensor_is_there_once_or_nothing_is_written(tmp_path: Path) -> None:
    folder = copied("hf_olmoe_a", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    lost, extra = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.0.extra.weight"
    for changes, said in (
        ({lost: None}, rf"{re.escape(str(folder))}: has no {lost}, shape \[20, 36\]"),
        ({extra: torch.zeros(3)}, rf"no place for {extra}"),
        ({lost: torch.zeros(20, 35)}, r"model.safetensors: .*\[20, 35\].* needs \[20, 36\]"),
    ):
        kept = {key: each for key, each in (tensors | changes).items() if each is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises((CheckpointError, ConfigError), match=said):
            import_source(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    "name", ["hf_folders_a/deepseek_v3_mtp", "hf_glm4_moe_a", "hf_ernie4_5_moe_a"]
)
def test_the_router_s_bias_stays_float32(
    name: str, out_of: Callable[[str], Path], tmp_path: Path
) -> None:
    before = tensors_in(folder_of(name))
    export(out_of(name).with_name("run") / STEP_0, tmp_path / "out", dtype="bf16")
    found = tensors_in(tmp_path / "out")
    biases = {key for key in found if key.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    assert differences({k: before[k] for k in biases}, {k: found[k] for k in biases}) == []
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert config_in(tmp_path / "out").get("dtype", "bfloat16") == "bfloat16"


def test_a_tied_head_is_one_parameter_with_one_gradient(
    out_of: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "hf_granitemoe_a"
    model = recorded_model(name)
    assert "head.weight" not in dict(model.named_parameters())
    assert "lm_head.weight" not in tensors_in(out_of(name))
    folder = copied(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.weight; it ties the head to the embedding"):
        open_family(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert open_family(folder).ignored == ("lm_head.weight",)
    changed_config(folder, tie_word_embeddings=False)
    assert "head.weight" in shapes_of(open_family(folder).model)


def test_an_imported_run_resumes_at_step_0_without_moments(tmp_path: Path) -> None:
    import_source(folder_of("hf_qwen3_moe_a"), tmp_path / "run", "own_text", OVERRIDES)
    kept_files = {path.name for path in (tmp_path / "run" / "source").iterdir()}
    kept = {"tokenizer.json", "generation_config.json", "chat_template.jinja", DTYPES_FILE}
    assert kept <= kept_files
    config = Config.load(tmp_path / "run" / "config.json")
    with assembled(config, tmp_path / "run") as run:
        assert resume(run) is not None
        assert run.progress.step == 0
        wanted = recorded_model("hf_qwen3_moe_a").state_dict()
        found = dict(run.model.named_parameters())
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_vocabulary_that_grew_and_other_changes_reach_config_json(tmp_path: Path) -> None:
    """A source's config.json is kept where it is right, and rewritten where the model differs."""
    run_dir = tmp_path / "run"
    import_source(
        folder_of("hf_mixtral_a"), run_dir, None, (*OVERRIDES, "model.attention.window=5")
    )
    export(run_dir / STEP_0, tmp_path / "out")
    config = config_in(tmp_path / "out")
    assert config["sliding_window"] == 5
    assert config["eos_token_id"] == 2, "unknown here, and kept"
    assert config["max_position_embeddings"] == 64, "longer than the run's own sequences"
    model, _ = FAMILY.get("mixtral").read(config)
    assert model.attention.window == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [5, 4096])  # 4096: the default of Mistral's class
def test_a_llama_with_a_window_goes_out_as_a_mistral(window: int, tmp_path: Path) -> None:
    run_dir, asked = tmp_path / "run", f"model.attention.window={window}"
    import_source(folder_of("hf_llama_a"), run_dir, None, (*OVERRIDES, asked))
    export(run_dir / STEP_0, tmp_path / "out")
    config = config_in(tmp_path / "out")
    assert (config["model_type"], config["sliding_window"]) == ("mistral", window)
    assert "mlp_bias" not in config
    assert config["max_position_embeddings"] == 64
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert open_family(tmp_path / "out").model.attention.window == window  # type: ignore[attr-defined]


def test_a_mistral_without_a_window_stays_one_from_run_to_run(tmp_path: Path) -> None:
    """It equals a Llama, and a run that began with another run knows no family of its own."""
    run_dir = tmp_path / "run"
    asked = (*OVERRIDES, "model.attention.window=none")
    import_source(folder_of("hf_mistral_a"), run_dir, None, asked)
    source = read_source(run_dir)
    assert source is not None
    (run_dir / "source.json").write_text(source.model_copy(update={"family": None}).as_text())
    export(run_dir / STEP_0, tmp_path / "out")
    config = config_in(tmp_path / "out")
    assert (config["model_type"], config["sliding_window"]) == ("mistral", None)


def test_what_a_family_lacks_is_not_lost_in_silence(tmp_path: Path) -> None:
    run_dir, changed = tmp_path / "run", tmp_path / "run/checkpoints/step_00000001"
    import_source(folder_of("hf_deepseek_v2_a"), run_dir, None, OVERRIDES)
    state = recorded_model("hf_deepseek_v2_a").state_dict()
    state["group.1.feed_forward.router.selection_bias"] += 1
    tensors = {f"model.{name}": tensor.clone for name, tensor in state.items()}
    meta = read_meta(run_dir / STEP_0).meta
    write_checkpoint(changed, tensors, step=1, num_experts={}, meta=meta)
    with pytest.raises(CheckpointError, match=r"selection_bias is not zero, and DeepseekV2"):
        export(changed, tmp_path / "out")


def test_a_folder_is_imported_wherever_it_lies_and_whatever_its_tokenizer(tmp_path: Path) -> None:
    """Nothing reads text yet, and other trainers name their folders as our checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    folder = copied("hf_qwen3_moe_a", tmp_path).rename(tmp_path / "checkpoints" / "step_5")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more than the model has"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert import_source(folder, tmp_path / "run", None, OVERRIDES).step == 0
    with pytest.raises(ConfigError, match="its tokenizer has 68 ids, more than"):
        start_from(str(folder), None, OVERRIDES)


def test_from_the_command_line(tmp_path: Path, moebius: Callable[..., Any]) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    folder = folder_of("hf_folders_a/deepseek_v3_mtp")
    asked = ("ckpt", "import", str(folder), "--run-dir", str(run_dir), "data.seq_len=16")
    answer = moebius(*asked, "train.steps=7")
    assert answer.code == 0, answer.text
    assert "left out: model.layers.0.self_attn.rotary_emb.inv_freq, model.layers.3." in answer.text
    assert Config.load(run_dir / "config.json").train.steps == 7
    said = json.loads((run_dir / "source.json").read_text())
    assert (said["kind"], said["family"], said["path"]) == ("folder", "deepseek_v3", str(folder))
    answer = moebius("ckpt", "export", str(run_dir), "--out", str(out), "--format", "hf")
    assert answer.code == 0, answer.text
    before = tensors_in(folder)
    assert differences({key: before[key] for key in tensors_in(out)}, tensors_in(out)) == []
    answer = moebius("ckpt", "import", str(folder / "model.safetensors"), "--run-dir", str(out))
    assert "name the recipe of its model" in answer.text


def test_an_imported_run_writes_text_before_any_data_is_prepared(
    out_of: Callable[[str], Path], moebius: Callable[..., Any]
) -> None:
    run_dir = out_of("hf_mixtral_a").with_name("run")
    answer = moebius("eval", str(run_dir), "--prompt", "ab ba", "--tokens", "5")
    assert answer.code == 0, answer.text
    assert answer.out.startswith("ab ba")


# Packed formats ----------------------------------------------------------------------------------


def test_an_unknown_packed_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = copied("hf_mixtral_a", tmp_path)
    for method in ({"quant_method": "awq"}, "awq"):
        changed_config(folder, quantization_config=method)
        with pytest.raises(CheckpointError, match="'awq' is not read; only mxfp4 and fp8 are"):
            open_family(folder)
    changed_config(folder, quantization_config="fp8")
    assert open_family(folder).dequantised == ()


def test_mxfp4_is_read_to_the_recorded_values_block_by_block() -> None:
    folder = PublishedFolder(folder_of("hf_folders_a/gpt_oss_mxfp4"))
    plan = open_family(folder_of("hf_folders_a/gpt_oss_mxfp4"))
    pieces = [piece for piece in plan.pieces if piece.key.endswith("1.mlp.experts.gate_up_proj")]
    assert [piece.phase for piece in pieces] == [0, 1]
    for piece in pieces:
        whole = folder.read(piece, piece.start, piece.sizes)
        first = (1, 5, piece.start[2] + 3)
        block = folder.read(piece, first, (2, 20, 7))
        assert torch.equal(block, whole[1:3, 5:25, 3:10])


def test_block_fp8_is_read_as_its_values_times_the_scales_of_its_blocks(tmp_path: Path) -> None:
    folder = copied("hf_deepseek_v3_a", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    packed, wanted = dict(tensors), {}
    generator = torch.Generator().manual_seed(0)
    for key, tensor in tensors.items():
        if re.search(r"(proj|proj_with_mqa)\.weight$", key):
            blocks = [-(-size // 8) for size in tensor.shape]
            scales = torch.rand(blocks, generator=generator) + 0.5
            wide = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)
            wide = wide[: tensor.shape[0], : tensor.shape[1]]
            packed[key] = (tensor / wide).to(torch.float8_e4m3fn)
            packed[f"{key}_scale_inv"] = scales
            wanted[key] = packed[key].float() * wide
    save_file(packed, folder / "model.safetensors")
    method = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    changed_config(folder, quantization_config=method)
    plan = open_family(folder)
    assert {*plan.dequantised} == {*wanted}
    for piece in plan.pieces:
        if piece.key in wanted:
            whole = plan.folder.read(piece, piece.start, piece.sizes)
            assert torch.equal(whole.squeeze(), piece.ours(wanted[piece.key]).squeeze())
            inner = tuple(slice(3, 9) if size > 9 else slice(0, size) for size in piece.sizes)
            first = [start + at.start for start, at in zip(piece.start, inner, strict=True)]
            sizes = [at.stop - at.start for at in inner]
            assert torch.equal(plan.folder.read(piece, first, sizes), whole[inner])
    out = tensors_in(round_trip(folder, tmp_path))
    assert out.keys() == tensors.keys()
    some = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert torch.equal(out[some], wanted[some].bfloat16())


OWN_FAMILY = """
from dataclasses import replace

from moebius.train.families.family import Rule
from moebius.train.families.mixtral import MIXTRAL

NIMBUS = replace(
    MIXTRAL,
    model_types=("nimbus",),
    rules=(Rule("embedding", "model.wte.weight"), *MIXTRAL.rules[1:]),
)
"""


def test_a_family_of_one_s_own_is_a_module_and_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/extend.md: another name of the embedding."""
    (tmp_path / "own_family.py").write_text(OWN_FAMILY)
    monkeypatch.setenv("MOEBIUS_FOLDER", str(tmp_path))
    folder = copied("hf_mixtral_a", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.wte.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    changed_config(folder, model_type="nimbus")
    with pytest.raises(ValueError, match="'nimbus' is not a family"):
        open_family(folder)
    import_source(folder, tmp_path / "run", None, OVERRIDES, family="own_family:NIMBUS")
    export(tmp_path / "run" / STEP_0, tmp_path / "out")
    assert differences(tensors, tensors_in(tmp_path / "out")) == []
    assert config_in(tmp_path / "out")["model_type"] == "nimbus"
