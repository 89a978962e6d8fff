"""Tests `moebius data`: table, rows as text, verification, and one clear error per mistake."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from parts import make_config
from small_corpus import shards_of_words

from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.read.corruption import open_fetcher
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.distributed.checkpoint.format import CheckpointMeta
from moebius.distributed.layout import Layout
from moebius.train.config.run_config import Config
from moebius.train.record.run_folder import open_run

WORDS = {"one", "two", "three", "many", "band", "expert", "route"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("words"), 40)


@pytest.fixture(scope="module")
def run_dir(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on these shards that never started."""
    config = make_config(shards, data__seq_len=32, train__steps=90, train__global_batch=4)
    folder = tmp_path_factory.mktemp("run") / "run"
    open_run(config, folder)
    return folder


def test_folders_are_listed_by_source(shards: Path, moebius: Callable, terminal: None) -> None:
    answer = moebius("data", "ls", shards.parent)
    manifest = read_manifest(shards)
    assert answer.code == 0
    assert ": complete, tokenizer bytes with 257 ids" in answer.text
    *_, line = answer.out.splitlines()  # a source takes one line of a terminal's 80 columns
    name, tokens, *_, licence = line.split()
    assert (name, tokens, licence) == ("text", f"{manifest.num_tokens('train'):,}", "–")
    assert moebius("data", "ls", "/nowhere").code == 2


def test_rows_are_shown_as_text(shards: Path, run_dir: Path, moebius: Callable) -> None:
    of_folder = moebius("data", "peek", shards, "--rows", "2")
    assert of_folder.text.count("train row") == 2
    assert len(WORDS & set(of_folder.text.split())) > 3
    assert "■" in of_folder.text
    of_step = moebius("data", "peek", run_dir, "--step", "3")
    assert [f"sample {sample}:" in of_step.text for sample in (7, 8, 11, 12)] == [
        *(False, True, True, False)
    ]
    held_out = moebius("data", "peek", run_dir, "--split", "validation")
    assert "validation row 0 of" in held_out.text


@pytest.mark.parametrize("options", [["--step", "3"], ["--split", "validation"]])
def test_rows_of_a_folder_that_was_replaced_are_not_shown_as_those_of_a_run(
    options: list[str], run_dir: Path, tmp_path: Path, moebius: Callable
) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    config = Config.load(run / "config.json")
    position = OrderedSamples(config.data, open_fetcher(config.data)).position(20)
    later = [(9, {"spec": {}})] if "--step" in options else []  # override_position changed the data
    for step, data in ((5, position), *later):
        values = {"num_experts": {}, "versions": {}, "meta": {"data": data}}
        meta = CheckpointMeta(step=step, generation=1, layout=Layout(1, 1), **values)
        (checkpoint := run / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (checkpoint / "meta.json").write_text(meta.model_dump_json())
    assert moebius("data", "peek", run, *options).code == 0
    other = config.data.model_copy(update={"directory": str(shards_of_words(tmp_path, 30))})
    config.model_copy(update={"data": other}).save(run / "config.json")
    answer = moebius("data", "peek", run, *options)
    assert answer.code == 2
    assert "is not as it was when" in answer.text
    assert "segments.text.sha256" in answer.text


def test_a_damaged_folder_is_told_by_the_exit_code(
    shards: Path, tmp_path: Path, moebius: Callable
) -> None:
    assert "intact" in moebius("data", "verify", shards).text
    copy = shutil.copytree(shards, tmp_path / "copy")
    shard = copy / read_manifest(copy).shards[0].name
    shard.write_bytes(shard.read_bytes()[:-9])
    answer = moebius("data", "verify", copy)
    assert answer.code == 2
    assert shard.name in answer.text


@pytest.mark.parametrize("name", ["manifest-000000.json", "manifest-000001.json"])
def test_a_missing_manifest_is_told_by_the_exit_code(
    name: str,
    shards: Path,
    tmp_path: Path,
    moebius: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    copy = shutil.copytree(shards, tmp_path / "copy")
    (copy / name).unlink()
    for command, code in (("verify", 2), ("peek", 2), ("ls", 0)):
        answer = moebius("data", command, copy)
        assert answer.code == code
        assert f"{name} is missing" in answer.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["peek", "RUN", "--step", "91"], "steps 1 to 90"),
        (["peek", "SHARDS", "--step", "1"], "is not a run"),
        (["peek", "RUN", "--rows", "0"], "--rows 0: must be at least 1"),
        (["peek", "BEGUN"], "is being prepared"),
        (["verify", "BEGUN"], "is being prepared"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_error(
    words: list[str], message: str, shards: Path, run_dir: Path, tmp_path: Path, moebius: Callable
) -> None:
    (tmp_path / "begun" / "unfinished").mkdir(parents=True)
    places = {"RUN": run_dir, "SHARDS": shards, "BEGUN": tmp_path / "begun"}
    answer = moebius("data", *(places.get(word, word) for word in words))
    assert answer.code == 2
    assert message in answer.text
