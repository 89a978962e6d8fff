"""A run that starts from a published folder: every layout reads its own blocks, and all the same bits."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Answer
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from starts import LAYOUTS, loaded, on, refusal
from tiny_job import write_paragraphs
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from trained import assembled, by_step, different, newest_state

from moebius import Start, load, load_config, start_from
from moebius.cli.jobs import control
from moebius.cli.main import parse
from moebius.distributed.checkpoint.format import CheckpointError
from moebius.distributed.checkpoint.pieces import cut
from moebius.distributed.checkpoint.source import SOURCE_FILES, read_source
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.plugins import PluginError
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.families.import_run import import_source
from moebius.train.families.table import FAMILY, family_of, pieces_of
from moebius.train.recipes.hub import HUB, continuation
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run
from moebius.train.run import resume

LETTERS = "abcdefghijklmnopqrstuvwxyz "
DOCS = Path(__file__).resolve().parents[2] / "docs"
SPECIAL = ("<pad>", "<s>", "</s>")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "llama", "olmo2")


def model_of(family: str) -> ModelConfig:
    """Returns a family's small model with fewer channels, and padding rows in its vocabulary."""
    small = RECIPES[f"{family}_small"]().model
    hidden = "d_expert" if small.experts else "d_feed_forward"
    return small.changed({"d_model": 32, f"feed_forward.{hidden}": 16, "vocab_size": 35})


def publish(family: str, folder: Path) -> dict[str, Tensor]:
    """Writes drawn weights and a tokenizer as a family's folder; returns the weights by our names."""
    model = Transformer(model_of(family))
    initialise(model, 5)
    for buffer in model.buffers():
        buffer.uniform_(-0.1, 0.1)
    ours = {name: value.detach() for name, value in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for piece in pieces_of(FAMILY.get(family), model.config):
        whole = tensors.setdefault(piece.key, torch.zeros(piece.shape))
        whole[..., piece.phase :: piece.step] = cut(ours[piece.name], piece)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = FAMILY.get(family).write(model.config, 64) | {"eos_token_id": [2, 1]}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "LICENSE").write_text("as is")
    words = {word: index for index, word in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {f"model.{name}": value for name, value in ours.items()}


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Returns a folder of each family, and its weights by our names."""
    root = tmp_path_factory.mktemp("published")
    return {family: (root / family, publish(family, root / family)) for family in FAMILIES}


OWN = ("train.device=cpu", "train.micro_batch=2", "data.seq_len=32", "prepare.input=text.txt")


def opened(folder: Path | str, run_dir: Path, *overrides: str) -> Config:
    """Opens the folder of a run that starts from a published one."""
    start = start_from(folder, "own_text", *OWN, *overrides)
    open_run(start.config, run_dir, start.source)
    return start.config


# The same bits -----------------------------------------------------------------------------------


CASES = [  # every layout and every family, fused and interleaved experts also in shards
    *(("qwen3_moe", *LAYOUTS[at], "float32") for at in (0, 2)),
    *(("gpt_oss", *LAYOUTS[at], "float32") for at in (1, 4)),
    *(("granitemoe", *LAYOUTS[at], "float32") for at in (4, 5)),
    ("deepseek_v3", *LAYOUTS[4], "float32"),
    ("deepseek_v3", *LAYOUTS[1], "bfloat16_only"),
    ("llama", *LAYOUTS[3], "float32"),
    ("olmo2", *LAYOUTS[5], "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world", "mesh", "precision"), CASES, ids=str)
def test_every_layout_reads_the_same_bits(
    family: str, world: int, mesh: dict, precision: str, published: dict, tmp_path: Path
) -> None:
    folder, weights = published[family]
    config = opened(folder, tmp_path / "run", *on(mesh), f"train.precision={precision}")
    if precision == "bfloat16_only":
        weights = {
            name: value if name.endswith("selection_bias") else value.bfloat16()
            for name, value in weights.items()
        }
    assert different(loaded(world, config, tmp_path / "run"), weights) == []


# Refused before anything is changed --------------------------------------------------------------


@pytest.mark.slow
def test_ranks_refuse_a_folder_that_has_changed_or_does_not_cover_the_model(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "folder", tmp_path / "run"
    publish("qwen3_moe", folder)
    config = opened(folder, run_dir, "mesh.ep=2")
    source = read_source(run_dir)
    assert source is not None
    for pieces in (source.pieces[:-1], source.pieces + source.pieces[-1:]):
        other = source.model_copy(update={"pieces": pieces})
        (run_dir / "source.json").write_text(other.as_text())
        said = refusal(config, run_dir)
        assert "does not give every element of the model once" in said
        assert "head.weight" in said
    (run_dir / "source.json").write_text(source.as_text())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    assert "has changed since this run was started with it" in refusal(config, run_dir)
    shutil.rmtree(folder)
    assert "what this run starts from is not there" in refusal(config, run_dir)


def test_folders_that_cannot_start_a_run_are_refused(published: dict, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published["qwen3_moe"][0], tmp_path / "folder"))

    def said_of(*overrides: str) -> str:
        with pytest.raises((ConfigError, CheckpointError, PluginError)) as refused:
            start_from(folder, "own_text", *OWN, *overrides)
        return str(refused.value)

    assert "embedding is [35, 32] there and [36, 32] here" in said_of("model.vocab_size=36")
    other = ("prepare.tokenizer=bytes", "prepare.vocab_size=257")
    assert "vocab_size=35 is smaller than the 257 token ids" in said_of(*other)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer that can be read; name that of its model" in said_of()
    (folder / "config.json").write_text('{"model_type": "qwen4_moe"}')
    assert "'qwen4_moe'" in said_of()
    (folder / "config.json").unlink()
    assert "is neither a run (checkpoints/), a checkpoint (manifest.json), nor" in said_of()


# Whose settings ----------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", HUB)
def test_a_published_size_trains_on_with_its_recipe_at_a_lower_rate(name: str) -> None:
    recipe = RECIPES[name]()
    family = family_of(recipe.model)
    assert family is not None
    padded = family.write(recipe.model, 4096) | {"vocab_size": recipe.model.vocab_size + 512}
    found, words, config = continuation(family.read(padded)[0], 1024, RECIPES)
    assert found == name == words.split()[2]
    assert config.optim.learning_rate == pytest.approx(recipe.optim.learning_rate / 10)
    assert config.optim.weight_decay_on == "matrices"
    same = (recipe.train.precision, recipe.mesh, recipe.train.global_batch)
    assert (config.train.precision, config.mesh, config.train.global_batch) == same
    assert config.data.seq_len == 1024, "not longer than the model was trained for"


def test_a_start_says_whose_settings_it_has(published: dict) -> None:
    folder, _ = published["granitemoe"]
    nobodys = (
        "settings: those of olmoe_1b_7b with a tenth of its rate, because no recipe has this size"
    )
    for name, rate, words in (
        (
            None,
            3e-5,
            f"{nobodys}: learning rate 3e-05, 65,536 tokens a step, bfloat16, sharding fsdp",
        ),
        ("own_text", 1e-3, "settings: those of own_text: learning rate 0.001, 512 tokens a step"),
        ("olmoe_1b_7b", 3e-4, "settings: those of olmoe_1b_7b: learning rate 0.0003"),
    ):
        start = start_from(folder, name, *(("data.seq_len=64",) if name else ()))
        assert start.config.optim.learning_rate == pytest.approx(rate)
        assert start.notes[-1].startswith(words)


# From a command to a finished run ----------------------------------------------------------------


def trained(moebius: Any, folder: Path | str, run_dir: Path, *overrides: str) -> Answer:
    text = write_paragraphs(run_dir.parent, paragraphs=60)
    return moebius(
        *("train", "--from", folder, "own_text", "--run-dir", run_dir, *OWN[:3]),
        *(
            f"prepare.input={text}",
            "mesh.ep=2",
            "mesh.dp_replicate=2",
            "job.ranks_per_node=4",
            "train.log_every=1",
        ),
        *("optim.warmup_steps=2", "train.eval_every=6", "train.steps=12", "checkpoint.every=4"),
        *("optim.learning_rate=3e-3", "job.max_restarts=1", *overrides),
    )


@pytest.mark.slow
def test_a_folder_is_trained_killed_and_resumed_with_the_same_bits(
    moebius: Any, published: dict, tmp_path: Path
) -> None:
    """Killed before its first checkpoint, and after it."""
    folder, _ = published["qwen3_moe"]
    whole = tmp_path / "whole"
    for name, kill in (("whole", "none"), ("early", 2), ("late", 6)):
        answer = trained(moebius, folder, tmp_path / name, f"job.rehearse_failure_at_step={kill}")
        assert answer.code == 0, answer.text
        assert "starts from" in answer.text
        assert f"{folder}, qwen3_moe (digest".replace(" ", "") in answer.text.replace(" ", "")
        assert ("restarts 1" in answer.text) == (name != "whole")
        assert different(newest_state(whole), newest_state(tmp_path / name)) == []
    losses = by_step(whole, "eval")
    assert losses[12]["loss"] < losses[0]["loss"] - 0.3
    for file in ("config.json", "tokenizer.json", "LICENSE"):
        assert (whole / SOURCE_FILES / file).read_bytes() == (folder / file).read_bytes()
    assert not (whole / SOURCE_FILES / "model.safetensors").exists()
    again = trained(
        moebius, whole / "checkpoints" / "step_00000008", tmp_path / "next", "train.steps=2"
    )
    assert again.code == 0, again.text
    assert (tmp_path / "next" / SOURCE_FILES / "LICENSE").exists()


# The hub -----------------------------------------------------------------------------------------


@pytest.fixture
def cached(published: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a cache of the hub with one repository, without a network; returns its commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(published["qwen3_moe"][0], repository / "blobs")
    snapshot.mkdir(parents=True)
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return commit


def test_a_repository_of_the_hub_is_read_from_its_cache(
    cached: str, published: dict, tmp_path: Path
) -> None:
    start: Start = start_from("hf://org/name", "own_text", *OWN)
    assert start.source.given == f"hf://org/name@{cached}"
    assert start_from(f"hf://org/name@{cached}", "own_text", *OWN).source == start.source
    assert start.config.prepare.tokenizer == start.source.path
    config = opened("hf://org/name", tmp_path / "run", "mesh.ep=2")
    found = loaded(2, config, tmp_path / "run")
    assert different(found, published["qwen3_moe"][1]) == []
    for wrong in ("hf://org/other", "hf://org/name@v2"):
        with pytest.raises(
            ConfigError, match=r"cannot be fetched .*check the name and your access"
        ):
            start_from(wrong, "own_text", *OWN)
    with pytest.raises(ConfigError, match=r"write hf://org/name or hf://org/name@revision"):
        start_from("hf://name", "own_text", *OWN)


# Commands of the documents -----------------------------------------------------------------------


def commands_with(words: str) -> list[list[str]]:
    """Returns the documented commands with some words, and where their SOURCE is the tiny folder."""
    pages = [
        Path(page) for name in ("families", "train", "export") for page in DOCS.glob(f"{name}.md")
    ]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    found = [
        shlex.split(line, comments=True) for line in lines if line.startswith(f"moebius {words}")
    ]
    return [command[1:] for command in found if any("OLMoE" in word for word in command)]


def test_the_documented_starts_from_published_weights_work_as_typed(
    cached: str, published: dict, moebius: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model stands in for the published one, on the hub, too."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(published["granitemoe"][0], tmp_path / "OLMoE-1B-7B-0924")
    (tmp_path / "models--org--name").rename(tmp_path / "models--allenai--OLMoE-1B-7B-0924")
    starts = commands_with("train --from")
    assert len(starts) >= 2
    for words in starts:
        assert "own_text" not in words, "no toy recipe for published weights"
        config, _, source = control._resolve(parse(words))
        assert config.train.precision == "bfloat16"
        assert source is not None
        assert config.world_size == config.mesh.ep
    imports = commands_with("ckpt import")
    assert len(imports) >= 1
    for words in imports:
        assert moebius(*words).code == 0
    answer = moebius("ckpt", "export", "runs/olmoe", "--out", "olmoe-continued")
    assert answer.code == 0, answer.text


@pytest.fixture(scope="module")
def imported(published: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run that was imported without a tokenizer."""
    root = tmp_path_factory.mktemp("imported")
    folder = Path(shutil.copytree(published["granitemoe"][0], root / "folder"))
    (folder / "tokenizer.json").unlink()
    import_source(folder, root / "run", None, ("train.precision=float32",))
    return root / "run"


def test_an_imported_run_and_its_folder_say_what_to_type(moebius: Any, imported: Path) -> None:
    run, folder = str(imported), str(imported.with_name("folder"))
    published = f"holds published weights and is not a recipe; `moebius train --from {folder}`"
    to_import = f"`moebius ckpt import {folder} --run-dir RUN`"
    for words, said in (
        (("plan", folder), published),
        (("train", folder), published),
        (("eval", folder), f"it holds published weights: {to_import}"),
        (("resume", folder), f"{to_import} makes a run of them"),
        (("train", run), f"is a run, not a recipe; `moebius resume {run}` continues it"),
        (("eval", run), "no text was prepared for it, so there is none to measure the loss on"),
        (("eval", run, "--prompt", "a"), "had no tokenizer: copy its model's tokenizer"),
    ):
        answer = moebius(*words)
        assert answer.code == 2
        assert said in answer.text


def test_an_imported_run_without_a_tokenizer_is_loaded(imported: Path) -> None:
    model = load(imported)
    assert model.logits(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 35)
    for asks in (lambda: model.generate("a"), lambda: model.tokenizer.encode("a")):
        with pytest.raises(ConfigError, match="source: the imported folder had no tokenizer"):
            asks()


def test_an_imported_run_takes_other_settings_until_its_first_step(
    imported: Path, tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(imported, tmp_path / "run"))
    kept = sorted(path.name for path in (run_dir / SOURCE_FILES).iterdir())
    changes = ("optim.learning_rate=0.5", "prepare.input=other.txt", "mesh.sharding=none")
    config = load_config(run_dir, *changes)
    open_run(config, run_dir, read_source(run_dir))
    assert Config.load(run_dir / "config.json") == config
    assert sorted(path.name for path in (run_dir / SOURCE_FILES).iterdir()) == kept
    with assembled(config, run_dir) as run:
        assert resume(run) is not None
    other = load_config(run_dir, "model.norm_eps=0.1")
    with pytest.raises(ConfigError, match="holds another run"):
        open_run(other, run_dir, read_source(run_dir))
    (run_dir / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ConfigError, match=r"holds another run \(optim.learning_rate"):
        open_run(load_config(run_dir, "optim.learning_rate=0.1"), run_dir)


@pytest.mark.slow
def test_an_imported_run_is_trained_and_evaluated(
    moebius: Any, published: dict, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert moebius("ckpt", "import", published["qwen3_moe"][0], "--run-dir", run).code == 0
    text = write_paragraphs(tmp_path, paragraphs=60)
    settings = (f"prepare.input={text}", "train.global_batch=4", "train.steps=2", *OWN[:3])
    assert moebius("resume", run, *settings).code == 0
    assert "step 2, validation: loss" in moebius("eval", run).text
    assert moebius("eval", run, "--prompt", "a b", "--tokens", "3").code == 0
