"""`moebius data peek` and `order`: lines for people, JSON for scripts, one clear error."""

import json
from pathlib import Path

import pytest
from small_corpus import shards_of_words

from moebius.cli.main import main
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run

SMALL = ("data.seq_len=32", "train.global_batch=4")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("words"), 40)


@pytest.fixture(scope="module")
def run_dir(shards, tmp_path_factory) -> Path:
    """A run on those shards that was opened and never started."""
    values = RECIPES["dense"]().model_dump(mode="json")
    values["model"]["vocab_size"] = 257
    values["data"] |= {"directory": str(shards), "seq_len": 32, "seed": 5}
    values["prepare"] |= {"tokenizer": "bytes", "vocab_size": 257}
    values["train"] |= {"global_batch": 4, "micro_batch": 4, "steps": 90}
    folder = tmp_path_factory.mktemp("run")
    open_run(Config.model_validate(values), folder / "run")
    return folder / "run"


def run(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, arguments)])
    said = capsys.readouterr()
    assert ended.value.code == code, said
    return said.out, said.err


def test_a_step_and_its_documents_agree_and_so_does_the_way_back(run_dir, capsys):
    step = json.loads(run(capsys, "order", run_dir, "--step", "7", "--json")[0])
    assert step["order"]["seed"] == 5
    assert [row["sample"] for row in step["rows"]] == [24, 25, 26, 27]
    peeked = json.loads(run(capsys, "peek", run_dir, "--step", "7", "--json")[0])
    assert [row["sample"]["row"] for row in peeked["rows"]] == [row["row"] for row in step["rows"]]
    document = step["rows"][2]["documents"][0]
    for name in (document["doc_id"], document["place"]):
        found = json.loads(run(capsys, "order", run_dir, "--document", name, "--json")[0])
        assert found["document"]["doc_id"] == document["doc_id"]
        assert any(7 in one["steps"] and 26 in one["samples"] for one in found["epochs"])
    out, _ = run(capsys, "order", run_dir, "--document", document["place"], "--epochs", "1")
    assert document["doc_id"][:12] in out
    assert "later epochs (--epochs)" in out
    out, _ = run(capsys, "order", run_dir, "--sample", "26")
    assert f"step 7, sample 26: source {document['source']}" in out


def test_rows_are_shown_as_text(shards, run_dir, capsys):
    out, _ = run(capsys, "peek", shards, "--rows", "2", *SMALL)
    assert out.count("source text, era 0, row") == 2
    assert "── text/0/" in out
    words = {"one", "two", "three", "many", "band", "expert", "route"}
    assert len(words & set(out.split())) > 3
    assert "step 1, sample 0:" in run(capsys, "peek", run_dir, "--rows", "1")[0]
    assert "step 3, sample 9:" in run(capsys, "peek", shards, "--sample", "9", *SMALL)[0]
    out, _ = run(capsys, "peek", run_dir, "--split", "validation", "--json")
    assert json.loads(out)["order"] is None
    packed = ["peek", run_dir, "--step", "1", "data.packing=best_fit", "data.seq_len=400"]
    assert "places of padding]" in run(capsys, *packed)[0]


def test_what_cannot_be_answered_is_one_clear_error(shards, run_dir, capsys, tmp_path):
    (tmp_path / "begun" / "unfinished").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    held_out = json.loads(run(capsys, "peek", shards, "--split", "validation", "--json")[0])
    doc_id = held_out["rows"][0]["documents"][0]["doc_id"]
    for arguments, message in (
        (["order", run_dir, "--step", "91"], "step 91 is none of the run's 90"),
        (["order", run_dir, "--document", "nobody:1"], "no document 'nobody:1' among the 29"),
        (["order", run_dir, "--document", doc_id], "is held out for validation"),
        (["order", run_dir, "--document", doc_id, "--epochs", "0"], "--epochs 0: at least 1"),
        (["peek", run_dir, "--sample", "360"], "samples 360 to 360 are not all of the run's 360"),
        (["peek", run_dir, "--rows", "0"], "--rows 0: at least 1"),
        (["peek", run_dir, "--split", "validation", "--step", "1"], "are of training"),
        (["peek", tmp_path / "begun"], "is being prepared, and no era is sealed yet"),
        (["order", tmp_path / "begun", "--step", "1"], "no era is sealed yet"),
        (["peek", tmp_path / "empty"], "holds no prepared data and is no run folder"),
        (["peek", "nowhere"], "nowhere is no run, no prepared folder and no recipe"),
        (["peek", run_dir, "data.directory=/nowhere"], "nowhere holds no prepared data"),
        (["peek", shards, "data.seq_lem=3"], "data.seq_lem: unknown key"),
    ):
        _, err = run(capsys, *arguments, code=2)
        assert message in " ".join(err.split()), err
