"""Runs that start from a model that grows: the same bits on every layout, killed, and in the middle."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import hf_case
import pytest
import torch
from grown_case import State, grow, logits_of, near, whole
from parts import make_config
from published_case import arrays_of, config_in, folder_of, state_of
from small_model import MODEL
from starts import LAYOUTS, loaded, on, refusal
from torch import Tensor
from trained import by_step, column, different, newest_state, run_training
from world import run_ranks

from moebius import fit, start_from
from moebius.distributed.average import AVERAGE
from moebius.distributed.checkpoint import grown as module
from moebius.distributed.checkpoint.loading import read_chunk
from moebius.distributed.checkpoint.source import SOURCE, open_reader
from moebius.model.config.model_config import ModelConfig
from moebius.train import loop
from moebius.train.config.run_config import Config
from moebius.train.families.table import FAMILY, open_family
from moebius.train.growth import growth
from moebius.train.record.run_folder import open_run

WORDS = "split=2 experts=+4 noise=0.1"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Returns the folder of a run of 8 steps of Muon, with an average and checkpoints of steps 4 and 8."""
    optim = {"kind": "muon", "schedule": "constant", "learning_rate": 3e-3}
    own = {"train": {"steps": 8, "eval_every": 4, "average": "ema"}, "checkpoint__every": 4}
    config = make_config(data, model=MODEL, mesh__ep=2, optim=optim, **own)
    run_dir = tmp_path_factory.mktemp("trunk") / "run"
    open_run(config, run_dir)
    run_ranks(run_training, 2, config, run_dir)
    return run_dir


def plain(state: State) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors under the names of parameters and "optimizer.<slot>.<name>"."""
    return {name.removeprefix("model."): value for name, value in state.items()}


def weights_in(run_dir: Path) -> dict[str, Tensor]:
    return {n: v for n, v in plain(newest_state(run_dir)).items() if not n.startswith("optimizer.")}


def opened(given: Path | str, run_dir: Path, *overrides: str, **options: Any) -> Config:
    start = start_from(given, *overrides, **options)
    open_run(start.config, run_dir, start.source)
    return start.config


# The same bits -----------------------------------------------------------------------------------

Case = tuple[Any, tuple[str, ...], ModelConfig, dict[str, Tensor]]


@pytest.fixture
def before(request: pytest.FixtureRequest, trunk: Path, tmp_path: Path) -> Case:
    """Returns what a run starts from, its overrides, and the model and state before it grows."""
    if request.param == "dense":
        run = hf_case.make_run(tmp_path / "dense", model := hf_case.model_of("dense"))
        return run, ("train.device=cpu", "train.global_batch=32"), model.config, weights_in(run)
    if request.param == "folder":
        plan = open_family(folder := folder_of("hf_deepseek_v2_a"))
        state = state_of(plan)
        own = ("own_text", "train.device=cpu", "train.micro_batch=2", "data.seq_len=16")
        return folder, own, plan.model, state
    at = "checkpoints/step_00000004"
    shutil.copytree(trunk / at, tmp_path / "at" / at)
    return f"{trunk}@4", (), MODEL, plain(newest_state(tmp_path / "at"))


GROWTHS = {
    "trunk@4": WORDS,
    "dense": "prelude=0:1 core=1:2 coda=3:4 loops=2 mixture=8/4 drop=.4",
    "folder": "split=2 experts=x2",
}


@pytest.mark.quick(3)
@pytest.mark.parametrize(("world", "mesh"), LAYOUTS, ids=str)
@pytest.mark.parametrize(("before", "words"), GROWTHS.items(), indirect=["before"])
def test_every_layout_grows_the_same_bits(
    before: Case, words: str, world: int, mesh: dict[str, Any], tmp_path: Path
) -> None:
    given, overrides, model, state = before
    config = opened(given, tmp_path / "run", *overrides, *on({"ep": 1} | mesh), grow=words)
    after, wanted, _ = grow(model, state, words)
    assert config.model == after
    assert different(plain(loaded(world, config, tmp_path / "run")), wanted) == []


def test_a_chunk_is_read_once(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(
        module, "read_chunk", lambda *given: read.append(given[2]) or read_chunk(*given)
    )
    reader = open_reader(start_from(trunk, grow="split=4 experts=x2 noise=0").source)
    read.clear()
    bank = whole(reader, "model.group.0.feed_forward.sparse.experts.w_up")
    assert bank.shape == (64, 24, 4)
    assert len(read) == 2  # each rank of the trunk has written a chunk


# In the middle of a run ----------------------------------------------------------------------------


def killed_after_the_first_step(config: Config, run_dir: Path) -> None:
    def kill(run: Any, result: Any) -> None:
        raise RuntimeError("killed")

    with mock.patch.object(loop, "HOOKS", (kill,)), pytest.raises(RuntimeError, match="killed"):
        run_training(config, run_dir)


@pytest.mark.slow
def test_a_branch_goes_on_with_data_and_survives_a_kill(trunk: Path, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        config = opened(f"{trunk}@4", tmp_path / name, grow=WORDS)
    run_ranks(killed_after_the_first_step, 2, config, tmp_path / "killed")
    for name in ("whole", "killed"):
        run_ranks(run_training, 2, config, tmp_path / name)
    state, killed = (newest_state(tmp_path / name) for name in ("whole", "killed"))
    assert different(state, killed) == []
    slots = {name.split(".")[1] for name in state if name.startswith("optimizer.")}
    assert slots == {"momentum_buffer", "exp_avg", "exp_avg_sq", AVERAGE}
    assert [*by_step(tmp_path / "whole")] == [5, 6, 7, 8]
    for name in ("digest", "learning_rate", "tokens"):
        assert column(tmp_path / "whole", name) == column(trunk, name)[4:]
    again = start_from(tmp_path / "whole", grow="split=2")  # grown once more
    assert again.notes[0].endswith("; E=40, K=12")


@pytest.mark.slow
def test_a_branch_with_new_moments_begins_them_and_its_average(trunk: Path, tmp_path: Path) -> None:
    for name in ("run", "on"):
        config = opened(f"{trunk}@4", tmp_path / name, grow="split=2", moments="new")
    found = loaded(2, config, tmp_path / "run")
    assert {name.partition(".")[0] for name in found} == {"model"}
    run_ranks(run_training, 2, config, tmp_path / "on")
    losses = [by_step(run)[5]["loss"] for run in (tmp_path / "on", trunk)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


# What is told, and refused -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("by", ["load", "norm", "saliency"])
def test_measures_of_usefulness_choose_and_losses_are_said(by: str, trunk: Path) -> None:
    start = start_from(trunk, grow=f"experts=+4 by={by}")
    assert start.notes[0].startswith(f"grows by experts=+4 by={by}: E=12, ")
    assert "validation rows: " in start.notes[-1]
    assert len(start_from(trunk, grow="split=4").notes) == 1  # its logits are equal


def test_a_loss_that_takes_long_is_left_to_the_first_evaluation(
    trunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_MOST_PRODUCTS", 1000)
    note = start_from(trunk, grow="experts=+4").notes[-1]
    assert note.startswith("the first evaluation says the loss after it (")
    assert "tokens are too many to measure" in note


@pytest.mark.slow
def test_a_grown_run_says_what_it_grew_from(moebius: Any, trunk: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", "split=2 experts=x2 noise=0"
    answer = moebius("ckpt", "grow", f"{trunk}@8", "--run-dir", run, *words.split())
    assert answer.code == 0, answer.text
    assert "as the checkpoint of step 8 grows by split=2: the logits stay equal" in answer.text
    wanted = grow(MODEL, weights_in(trunk), words)[1]
    assert different(plain(newest_state(run)), wanted) == []
    assert "step 8, validation: loss" in moebius("eval", run).text
    assert moebius("ckpt", "export", run, "--out", tmp_path / "out", "--no-tokenizer").code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert ", grown by split=2 (digest " in card.partition("| grown | starts from")[2]


@pytest.mark.slow
def test_a_growth_that_was_changed_is_refused(trunk: Path, tmp_path: Path) -> None:
    config = opened(trunk, tmp_path / "run", "mesh.ep=2", grow="split=2")
    file = tmp_path / "run" / SOURCE
    values = json.loads(file.read_text())
    values["grown"][0]["takes"][0][4][0] += 1
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


@pytest.fixture
def mixtral(moebius: Any, tmp_path: Path) -> Path:
    """Returns an export of a Mixtral that grew out of a Mistral with a card and was trained on."""
    folder, grown, out = (tmp_path / name for name in ("folder", "grown", "out"))
    folder.mkdir()  # recordings are read-only
    for file in folder_of("hf_mistral_a").iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text("# The dense model")
    own = ("train.device=cpu", "train.precision=float32", "mesh.sharding=none", "data.seq_len=16")
    answer = moebius("ckpt", "grow", folder, "mixture=8/1", "--run-dir", grown, *own)
    assert answer.code == 0, answer.text
    rows = torch.randint(67, (16, 17), generator=torch.Generator().manual_seed(0))
    start = start_from(grown, "train.steps=2", "train.global_batch=4", "train.micro_batch=4")
    assert fit(start, tmp_path / "trained", data=(rows, rows[:4]), show=False).step == 2
    for run, exported in ((tmp_path / "trained", out), (grown, tmp_path / "first")):
        assert moebius("ckpt", "export", run, "--out", exported).code == 0
    return out


@pytest.mark.slow
@pytest.mark.needs_shared
def test_a_published_dense_model_grows_trains_on_and_goes_out_as_a_mixture(mixtral: Path) -> None:
    folder, run, first = (mixtral.with_name(name) for name in ("folder", "trained", "first"))
    assert not (mixtral / "README.md").exists()  # the card says what the last start grew
    assert "grown by mixture=8/1" in (first / "README.md").read_text()
    before, after, plan = config_in(folder), config_in(mixtral), open_family(mixtral)
    assert (after["model_type"], after["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    ids = {key for key in before if key.endswith("_token_id")}
    for key in ("max_position_embeddings", "sliding_window", *ids):
        assert after[key] == before[key]
    assert after.keys() <= {*FAMILY.get("mixtral").write(plan.model, 1), *ids, "torch_dtype"}
    recorded, trained = arrays_of("hf_mistral_a"), weights_in(run)
    state = state_of(plan)
    logits = logits_of(plan.model, {name: trained[name] for name in state}, recorded["ids"])
    assert torch.equal(logits_of(plan.model, state, recorded["ids"]), logits)
    assert (logits - recorded["logits"]).abs().max() > 1e-3  # it was trained
    files = [mixtral.with_name(name) for name in ("ids", "logits")]
    torch.save(recorded["ids"], files[0])
    words = [sys.executable, "-I", "-c", READER, mixtral, *files]
    subprocess.run(words, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    near(torch.load(files[1]), logits)
