"""Tests the configuration of `moebius prepare`: the file, then options, then single keys."""

import json
import os

import pytest
from small_corpus import dropped
from token_stream import documents_of

from moebius.cli.data.prepare import prepare_config
from moebius.cli.main import main, parse
from moebius.cluster import prepare_data
from moebius.cluster.places.ray_session import ALLOW_UNAUTHENTICATED
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig

FILE = """
[prepare]
tokenizer = "bytes"
validation_fraction = 0.0
encoding_faults = "drop"
filters = ["filters_of_the_command:too_short"]

[[prepare.sources]]
name = "asked"
input = ["asked.jsonl"]
prompt_field = "q"
answer_field = "a"
id_field = "id"

[[prepare.sources]]
name = "web"
input = ["web.jsonl"]
"""


def _config(*words: str) -> PrepareConfig:
    """Returns the configuration of a command line."""
    return prepare_config(parse(["prepare", "--output", "shards", *words]))


def test_without_anything_it_is_the_embedded_corpus():
    assert _config() == PrepareConfig()


def test_options_and_keys_may_stand_anywhere():
    config = _config(
        *("prepare.vocab_size=300", "--input", "a.jsonl", "b.jsonl", "prepare.prompt_field=q"),
        *("--tokenizer", "./mine", "prepare.answer_field=a"),
        "prepare.decontaminate.evaluation_sets=['e.jsonl']",
    )
    assert config.input == ("a.jsonl", "b.jsonl")
    assert (config.tokenizer, config.vocab_size) == ("./mine", 300)
    assert (config.prompt_field, config.answer_field) == ("q", "a")
    assert config.decontaminate is not None
    assert config.decontaminate.evaluation_sets == ("e.jsonl",)


def test_a_name_with_an_equals_sign_is_a_name():
    assert _config("--input", "s3://b/date=2024/a.jsonl").input == ("s3://b/date=2024/a.jsonl",)


def test_keys_go_before_options_and_options_before_the_file(tmp_path):
    file = tmp_path / "data.toml"
    file.write_text('[prepare]\ntokenizer = "bpe"\nsplit_bytes = 9\n[other]\nx = 1\n')
    config = _config("--config", str(file), "--tokenizer", "./mine", "prepare.tokenizer=bytes")
    assert (config.tokenizer, config.split_bytes) == ("bytes", 9)
    assert _config("--config", str(file), "--tokenizer", "./mine").tokenizer == "./mine"
    file.write_text('recipe = "smoke"\n[prepare]\nvocab_size = 300\n')
    assert _config("--config", str(file)).vocab_size == 300, "a run's own file will do"


def test_an_input_takes_the_place_of_the_files_sources(tmp_path):
    file = tmp_path / "data.toml"
    file.write_text(FILE)
    config = _config("--config", str(file), "--input", "other.jsonl")
    assert (config.input, config.sources) == (("other.jsonl",), ())
    assert config.filters == ("filters_of_the_command:too_short",)
    file.write_text('[prepare]\ninput = ["a.jsonl"]\n')
    sources = "prepare.sources=[{name='web', input=['web.jsonl']}]"
    config = _config("--config", str(file), sources)
    assert [source.name for source in config.all_sources] == ["web"]


def test_the_first_three_tries_of_a_newcomer(tmp_path, monkeypatch, capfd):
    """The third one prepares, into the folder of the two before."""
    monkeypatch.chdir(tmp_path)
    records = [{"id": str(n), "content": f"the text number {n}, long enough"} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    words = ["prepare", "--input", "a.jsonl", "--output", "shards", "--tokenizer", "bytes"]
    said = []
    for more in ([], ["text_field=content"], ["prepare.text_field=content"]):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        said.append((end.value.code, " ".join("".join(capfd.readouterr()).split())))
    assert [code for code, _ in said] == [2, 2, 0]
    assert "write prepare.text_field=content" in said[0][1]
    assert "write the whole key, prepare.text_field=content" in said[1][1]
    assert "had sealed nothing and is started over" in said[2][1]
    assert len(list(documents_of(tmp_path / "shards"))) == 8, "one is held out"


def test_a_default_text_is_said_and_what_is_left_out(tmp_path, capsys):
    (tmp_path / "web").mkdir()
    for name in ("a.txt", "b.csv", "c.CSV", "d.pdf", ".e"):
        (tmp_path / "web" / name).write_text("some words of a text\n\n" * 3)
    for number, words in enumerate((["--input", str(tmp_path / "web")], [])):
        output = ["--output", str(tmp_path / str(number)), "--tokenizer", "bytes"]
        with pytest.raises(SystemExit):
            main(["prepare", *words, *output])
        said = " ".join(capsys.readouterr().out.split())
        assert ("Python's own documentation" in said) == (not words)
        assert ("4 of 5 left out: 2 .csv, 1 hidden, 1 .pdf (readable are .txt," in said) == bool(
            words
        )


def test_a_file_of_several_sources_is_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [
        {"q": "one two ", "a": "three", "id": "x/1"},
        {"q": "four", "a": "", "id": "x/2"},
        {"q": "a", "a": "b", "id": "x/3"},
    ]
    web = [{"text": "some text of the web"}, {"text": "half \ud83d of a pair of it"}]
    for name, records in (("asked", asked), ("web", web)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    (tmp_path / "data.toml").write_text(FILE)
    (tmp_path / "filters_of_the_command.py").write_text(
        "def too_short(text):\n    return None if len(text.split()) > 2 else 'too short'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["prepare", "--config", "data.toml", "--output", "shards", "prepare.batch_tokens=50"])
    assert not end.value.code
    manifest = read_manifest(tmp_path / "shards")
    assert dropped(manifest) == {
        "empty": 1,
        "too short": 1,
        "not Unicode (lone surrogates)": 1,
    }
    (row,) = (one for one in documents_of(tmp_path / "shards") if "record_id" in one)
    assert row["record_id"] == "x/1"
    assert row["loss_mask"] == [False] * 8 + [True] * 6
    said = capsys.readouterr().out
    assert "asked" in said
    assert "1 documents dropped: empty" in " ".join(said.split())


@pytest.mark.parametrize("allowed", [True, False])
def test_a_cluster_that_asks_for_no_token_is_used_if_that_is_said(allowed, tmp_path, monkeypatch):
    said = []

    def prepare_on_cluster(*_: object, **__: object) -> None:
        said.append(os.environ.get(ALLOW_UNAUTHENTICATED))
        raise ValueError("seen")

    monkeypatch.setattr(prepare_data, "prepare_on_cluster", prepare_on_cluster)
    monkeypatch.setenv(ALLOW_UNAUTHENTICATED, "")
    words = ["prepare", "--output", str(tmp_path / "d"), "--address", "10.0.0.1:6379"]
    with pytest.raises(SystemExit):
        main([*words, *(["--allow-unauthenticated"] if allowed else [])])
    assert said == ["1" if allowed else ""]
