"""`moebius data`: tables for people, JSON for scripts, exit codes for both."""

import json
import shutil
from pathlib import Path

import pytest
from small_corpus import shards_of_words

from moebius.cli.main import main


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("words"), 40)


def run(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == code, said
    return said.out, said.err


def test_ls_names_every_folder(shards, capsys, tmp_path):
    out, _ = run(capsys, "ls", str(shards.parent))
    assert "complete" in out
    assert "bytes 257" in out
    listed = json.loads(run(capsys, "ls", "--json", str(shards), str(shards.parent))[0])
    assert [entry["directory"] for entry in listed] == [str(shards)] * 2
    assert listed[0]["train"]["num_documents"] + listed[0]["validation"]["num_documents"] == 40
    _, err = run(capsys, "ls", str(tmp_path), code=2)
    assert f"no prepared data in {tmp_path}" in err


def test_stats_count_and_measure(shards, capsys):
    out, _ = run(capsys, "stats", str(shards), "--lengths")
    found = json.loads(run(capsys, "stats", str(shards), "--lengths", "--json")[0])
    train = found["sources"][0]["splits"]["train"]
    for number in (train["num_tokens"], train["document_tokens"]["longest"]):
        assert f"{number:,}" in out
    assert "document_tokens" not in run(capsys, "stats", str(shards), "--json")[0]


def test_verify_says_intact_or_what_is_damaged(shards, capsys, tmp_path):
    out, _ = run(capsys, "verify", str(shards))
    assert out.startswith(f"{shards}: intact (2 shards in 1 eras")
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    shard = copy / "text.train-00000.tok.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    _, err = run(capsys, "verify", str(copy), code=2)
    assert "text.train-00000.tok.arrow, record batch 0" in err
    verdict = json.loads(run(capsys, "verify", "--json", str(copy), code=1)[0])
    assert not verdict["intact"]
    assert len(verdict["problems"]) == 2
    assert json.loads(run(capsys, "verify", "--json", str(shards))[0])["intact"]


def test_a_path_that_is_no_data_is_one_clear_error(capsys, tmp_path):
    for action in ("stats", "verify"):
        _, err = run(capsys, action, str(tmp_path), code=2)
        assert "holds no prepared data and is no run folder" in err
