"""Runs that start from a model that grows: the same bits on every layout, killed, and in the middle."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grown_case import InMemory, logits_of, near, whole
from hf_case import make_run, model_of
from parts import make_config
from published_case import arrays_of, config_in, folder_of
from safetensors.torch import save_file
from small_model import MODEL
from starts import LAYOUTS, loaded, on, refusal
from torch import Tensor
from trained import by_step, column, different, newest_state, run_training
from world import run_ranks

from moebius import fit, start_from
from moebius.distributed.average import AVERAGE
from moebius.distributed.checkpoint import grown as module
from moebius.distributed.checkpoint.format import latest, read_meta
from moebius.distributed.checkpoint.grown import GrownReader, takes_from_json
from moebius.distributed.checkpoint.loading import read_chunk
from moebius.distributed.checkpoint.pieces import cut
from moebius.distributed.checkpoint.source import SOURCE, open_reader, read_source
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train import loop
from moebius.train.config.errors import ConfigError
from moebius.train.config.run_config import Config
from moebius.train.families.table import FAMILY, open_family, pieces_of, shapes_of
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run

WORDS = "split=2 experts=+4 noise=0.1"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Returns the folder of a run of 8 steps of Muon, with an average and checkpoints of steps 4 and 8."""
    config = make_config(
        data,
        model=MODEL,
        mesh={"ep": 2},
        train={"steps": 8, "eval_every": 4, "average": "ema"},
        optim={"kind": "muon", "schedule": "constant", "learning_rate": 3e-3},
        checkpoint__every=4,
    )
    run_dir = tmp_path_factory.mktemp("trunk") / "run"
    open_run(config, run_dir)
    run_ranks(run_training, 2, config, run_dir)
    return run_dir


def state_at(run: Path, step: int, tmp_path: Path) -> dict[str, Tensor]:
    at = f"checkpoints/step_{step:08d}"
    shutil.copytree(run / at, tmp_path / "at" / at)
    return newest_state(tmp_path / "at")


def grown_state(state: dict[str, Tensor], run_dir: Path) -> dict[str, Tensor]:
    """Returns what a run's source.json says that a state grows into, whole."""
    source, reader = read_source(run_dir), InMemory(state)
    assert source is not None
    for growth in source.grown:
        reader = GrownReader(reader, takes_from_json(growth.takes))  # type: ignore[assignment]
    names = [f"model.{name}" for name in shapes_of(ModelConfig(**source.grown[-1].model))]
    names += [name for name in state if not name.startswith("model.")]
    return {name: whole(reader, name) for name in names}


def meta_of(run_dir: Path) -> dict[str, Any]:
    path = latest(run_dir / "checkpoints")
    assert path is not None
    return read_meta(path).meta


def opened(given: Path | str, run_dir: Path, *overrides: str, **options: Any) -> Config:
    start = start_from(given, *overrides, **options)
    open_run(start.config, run_dir, start.source)
    return start.config


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "mesh"), LAYOUTS, ids=str)
def test_every_layout_grows_the_same_bits(
    world: int, mesh: dict[str, Any], trunk: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = opened(trunk, run_dir, *on({"ep": 1} | mesh), grow=WORDS)
    found = loaded(world, config, run_dir)
    state = {n: v for n, v in newest_state(trunk).items() if n.startswith("model.")}
    assert different(found, grown_state(state, run_dir)) == []
    assert config.model.experts is not None
    assert (config.model.experts.num_experts, config.model.experts.d_expert) == (20, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh"), [LAYOUTS[at] for at in (0, 1, 2, 5)], ids=str)
@pytest.mark.parametrize(
    "words", ["mixture=8/4 drop=0.5", "prelude=0:1 core=1:3 coda=3:4 loops=2 mixture=8/2"]
)
def test_a_dense_model_grows_the_same_bits(
    words: str, world: int, mesh: dict[str, Any], tmp_path: Path
) -> None:
    dense, run_dir = make_run(tmp_path / "dense", model_of("dense")), tmp_path / "run"
    own = ("train.device=cpu", "train.global_batch=32")
    config = opened(dense, run_dir, *own, *on(mesh), grow=words)
    state = {n: v for n, v in newest_state(dense).items() if n.startswith("model.")}
    assert different(loaded(world, config, run_dir), grown_state(state, run_dir)) == []


def published(folder: Path) -> dict[str, Tensor]:
    """Writes drawn weights of DeepSeek-V2, which has no selection bias; returns them by our names."""
    small = {"d_model": 32, "feed_forward.d_expert": 16, "vocab_size": 257}
    model = Transformer(RECIPES["deepseek_v2_small"]().model.changed(small))
    initialise(model, 5)
    ours, tensors = model.state_dict(), dict[str, Tensor]()
    family = FAMILY.get("deepseek_v2")
    for piece in pieces_of(family, model.config):
        whole = tensors.setdefault(piece.key, torch.zeros(piece.shape))
        whole[..., piece.phase :: piece.step] = cut(ours[piece.name], piece)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.write(model.config, 64)))
    return {f"model.{name}": value for name, value in ours.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh"), [LAYOUTS[at] for at in (0, 2, 4)], ids=str)
def test_a_folder_grows_the_same_bits(
    world: int, mesh: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    folder, run_dir = tmp_path / "folder", tmp_path / "run"
    weights = published(folder)
    own = (
        "own_text",
        "train.device=cpu",
        "train.micro_batch=2",
        "data.seq_len=16",
        f"data.directory={data}",
    )
    config = opened(folder, run_dir, *own, *on(mesh), grow="split=2 experts=x2")
    expected = grown_state(weights, run_dir)
    assert different(loaded(world, config, run_dir), expected) == []
    zeros = {name for name in expected if name.endswith("selection_bias")}
    assert zeros
    assert not any(expected[name].any() for name in zeros)


def test_a_chunk_with_a_whole_bank_is_read_once(
    trunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(
        module, "read_chunk", lambda *given: read.append(given[2]) or read_chunk(*given)
    )
    start = start_from(trunk, grow="split=4 experts=x2 noise=0")
    reader, name = open_reader(start.source), "model.group.0.feed_forward.sparse.experts.w_up"
    shape = (64, 24, 4)
    assert reader.shape(name) == shape
    read.clear()
    whole(reader, name)
    assert len(read) == 2  # each rank of the trunk has written a chunk


# In the middle of a run ----------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "mesh"), [LAYOUTS[at] for at in (1, 2, 4)], ids=str)
def test_a_branch_grows_all_of_its_trunks_state(
    world: int, mesh: dict[str, Any], trunk: Path, tmp_path: Path
) -> None:
    config = opened(f"{trunk}@4", tmp_path / "run", *on({"ep": 1} | mesh), grow=WORDS)
    found, state = loaded(world, config, tmp_path / "run"), state_at(trunk, 4, tmp_path)
    assert different(found, grown_state(state, tmp_path / "run")) == []
    slots = {name.split(".")[1] for name in found if name.startswith("optimizer.")}
    assert slots == {"momentum_buffer", "exp_avg", "exp_avg_sq", AVERAGE}
    meta, expected = meta_of(tmp_path / "run"), meta_of(tmp_path / "at")
    assert (meta["progress"], meta["data"]) == (expected["progress"], expected["data"])


class Killed(Exception):
    pass


def killed_after_the_first_step(config: Config, run_dir: Path) -> None:
    def kill(run: Any, result: Any) -> None:
        raise Killed

    loop.HOOKS = (kill,)
    with pytest.raises(Killed):
        run_training(config, run_dir)


@pytest.mark.slow
def test_a_branch_that_grows_goes_on_with_data_and_schedule_and_survives_a_kill(
    trunk: Path, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        config = opened(f"{trunk}@4", tmp_path / name, grow=WORDS)
    run_ranks(killed_after_the_first_step, 2, config, tmp_path / "killed")
    for name in ("whole", "killed"):
        run_ranks(run_training, 2, config, tmp_path / name)
    whole, killed = (newest_state(tmp_path / name) for name in ("whole", "killed"))
    assert different(whole, killed) == []
    assert [*by_step(tmp_path / "whole")] == [5, 6, 7, 8]
    for name in ("digest", "learning_rate", "tokens"):
        assert column(tmp_path / "whole", name) == column(trunk, name)[4:]
    again = opened(tmp_path / "whole", tmp_path / "again", grow="split=2")  # grown once more
    assert again.model.experts is not None
    assert again.model.experts.num_experts == 40


@pytest.mark.slow
def test_a_branch_with_new_moments_begins_them_and_its_average(trunk: Path, tmp_path: Path) -> None:
    config = opened(f"{trunk}@4", tmp_path / "run", grow="split=2", moments="new")
    found = loaded(2, config, tmp_path / "run")
    assert {name.partition(".")[0] for name in found} == {"model"}
    assert meta_of(tmp_path / "run")["progress"]["step"] == 4
    config = opened(f"{trunk}@4", tmp_path / "on", grow="split=2", moments="new")
    run_ranks(run_training, 2, config, tmp_path / "on")
    first = by_step(tmp_path / "on")[5]["loss"]
    assert first == pytest.approx(by_step(trunk)[5]["loss"], abs=1e-4)
    with pytest.raises(ConfigError, match=r"--moments keep: only a run that goes on, --from RUN@"):
        start_from(trunk, grow="split=2", moments="keep")


# What is told, and refused -------------------------------------------------------------------------


@pytest.mark.slow
def test_measures_of_usefulness_choose_and_losses_are_said(trunk: Path) -> None:
    for by in ("load", "norm", "saliency"):
        start = start_from(trunk, grow=f"experts=+4 by={by}")
        assert start.config.model.experts is not None
        assert start.config.model.experts.num_experts == 12
        assert "validation rows: " in start.notes[-1]
    exact = start_from(trunk, grow="split=4")
    assert exact.notes == ("grows by split=4: the logits stay equal, up to rounding; E=32, K=12",)


@pytest.mark.slow
def test_a_grown_run_is_written_evaluated_and_says_what_it_grew_from(
    moebius: Any, trunk: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ("split=2", "experts=x2")
    answer = moebius("ckpt", "grow", f"{trunk}@8", "--run-dir", run, *words, "noise=0")
    assert answer.code == 0, answer.text
    assert "as the checkpoint of step 8" in answer.text
    assert "grows by experts=x2 noise=0" in answer.text
    source = read_source(run)
    assert source is not None
    assert ", grown by split=2 (digest " in source.words()
    state = {n: v for n, v in newest_state(trunk).items() if n.startswith("model.")}
    again = start_from(trunk, grow=[*words, "noise=0"])
    open_run(again.config, tmp_path / "again", again.source)
    assert different(newest_state(run), grown_state(state, tmp_path / "again")) == []
    assert "step 8, validation: loss" in moebius("eval", run).text
    assert moebius("ckpt", "export", run, "--out", tmp_path / "out", "--no-tokenizer").code == 0
    assert "| grown | starts from" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_growth_that_was_changed_is_refused(trunk: Path, tmp_path: Path) -> None:
    config = opened(trunk, tmp_path / "run", "mesh.ep=2", grow="split=2")
    file = tmp_path / "run" / SOURCE
    values = json.loads(file.read_text())
    values["grown"][0]["takes"][0][4][0] += 1
    file.write_text(json.dumps(values))
    assert "is not the one of its digest" in refusal(config, tmp_path / "run")
    del values["grown"][0]["takes"][0]
    file.write_text(json.dumps(values))
    assert "is not the one of its digest" in refusal(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    other = opened(trunk, tmp_path / "run", "mesh.ep=2", grow="split=4")
    opened(trunk, tmp_path / "run", "mesh.ep=2", grow="split=2")  # no step was made yet
    assert "does not give every element of the model once" in refusal(other, tmp_path / "run")


# Out again ---------------------------------------------------------------------------------------

# In a process of its own: transformers would take this repository's kernels/ for another library.
READER = """
import sys, torch
from transformers import AutoModelForCausalLM

model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
found = info if isinstance(info, dict) else vars(info)
assert not any(found.values()), found
torch.save(model.eval()(torch.load(sys.argv[2])).logits.detach(), sys.argv[3])
"""


def read_by_transformers(folder: Path, ids: Tensor, tmp_path: Path) -> Tensor:
    """Returns the logits of the model that transformers makes of a folder."""
    torch.save(ids, tmp_path / "ids")
    words = [sys.executable, "-I", "-c", READER, folder, tmp_path / "ids", tmp_path / "logits"]
    done = subprocess.run(
        words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "logits")


@pytest.fixture
def upcycled(moebius: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Returns a Mistral with a card, and the run that became a Mixtral and was trained on."""
    folder, run, trained = (tmp_path / name for name in ("folder", "run", "trained"))
    folder.mkdir()  # recordings are read-only
    for file in folder_of("hf_mistral_a").iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text("# The dense model")
    own = ("train.device=cpu", "train.precision=float32", "mesh.sharding=none", "data.seq_len=16")
    answer = moebius("ckpt", "grow", folder, "mixture=8/1", "--run-dir", run, *own)
    assert answer.code == 0, answer.text
    rows = torch.randint(67, (16, 17), generator=torch.Generator().manual_seed(0))
    start = start_from(run, "train.steps=2", "train.global_batch=4", "train.micro_batch=4")
    assert fit(start, trained, data=(rows, rows[:4]), show=False).step == 2
    return folder, trained


@pytest.mark.slow
@pytest.mark.needs_shared
def test_a_published_dense_model_grows_trains_on_and_goes_out_as_a_mixture(
    moebius: Any, upcycled: tuple[Path, Path], tmp_path: Path
) -> None:
    (folder, run), out, first = upcycled, tmp_path / "out", tmp_path / "first"
    for source, exported in ((run, out), (tmp_path / "run", first)):
        assert moebius("ckpt", "export", source, "--out", exported).code == 0
    assert not (out / "README.md").exists()
    assert (first / "README.md").read_text().count("grown by mixture=8/1") == 1
    before, after = config_in(folder), config_in(out)
    assert (after["model_type"], after["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    ids = {key for key in before if key.endswith("_token_id")}
    kept = {"max_position_embeddings", "sliding_window", *ids}
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    plan = open_family(out)
    assert after.keys() <= {*FAMILY.get(plan.family).write(plan.model, 1), *ids, "torch_dtype"}
    state = {name: plan.tensor(name, torch.float32) for name in shapes_of(plan.model)}
    trained = {n.removeprefix("model."): value for n, value in newest_state(run).items()}
    ids_BS = arrays_of("hf_mistral_a")["ids"]
    logits = logits_of(plan.model, {name: trained[name] for name in state}, ids_BS)
    assert torch.equal(logits_of(plan.model, state, ids_BS), logits)
    near(read_by_transformers(out, ids_BS, tmp_path), logits)
    assert (logits - arrays_of("hf_mistral_a")["logits"]).abs().max() > 1e-3  # it was trained
