"""The benchmark of the data pipeline runs, on a little text."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from small_corpus import sentences, write_jsonl

from benchmarks import data as benchmark
from benchmarks import data_prepare
from benchmarks.report import save_parts
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig


@pytest.mark.slow
def test_every_way_of_reading_gives_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", sentences(0, 400))
    monkeypatch.setattr(benchmark, "save_parts", partial(save_parts, folder=tmp_path))
    monkeypatch.setattr(benchmark, "SEQ_LEN", 64)
    monkeypatch.setattr(benchmark, "BATCH", 8)
    monkeypatch.setattr(benchmark, "SPLIT_BYTES", text.stat().st_size // 2 + 1)
    monkeypatch.setattr(benchmark, "SEGMENT_TOKENS", 1)  # a segment of each of the two shards
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "data",
            "--input",
            str(text),
            "--rounds",
            "1",
            "--steady",
            "--only",
            "read",
            "random",
            "first",
            "memory",
        ],
    )
    benchmark.main()
    found = json.loads((tmp_path / "data.json").read_text())
    floors = ["floor of concat", "floor of best_fit"]
    names = [one["name"] for one in found["read"]]
    assert names == ["memmap", "decode", *floors, "concat", "best_fit"]
    assert all(one["fastest"] > 0 for one in found["read"])
    assert found["random_row_ms"]["median"] > 0
    assert [bool(one["steady"]) for one in found["read"]] == [False] * 4 + [True, True]
    assert found["memory"]["index_bytes_per_1000_tokens"] > 0
    assert found["memory"]["fixed_bytes"] > 0
    assert [one["shards"] for one in found["memory"]["many_shards"]] == [400, 400]
    assert set(found["first_batch_s"]) == {"0", "1000000000"}
    assert "prepare" not in found


@pytest.mark.slow
def test_every_way_of_preparing_is_timed_in_each_round(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", sentences(0, 400))
    config = PrepareConfig(
        input=(str(text),),
        vocab_size=300,
        split_bytes=text.stat().st_size // 3 + 1,
    )
    prepare(config, tmp_path / "shards")
    again = config.model_copy(update={"tokenizer": str(tmp_path / "shards")})
    found = data_prepare.compare(again, tmp_path, 1)
    assert set(found) >= {"bare", "local", "local again"}
    assert all(len(one["wall_s"]) == len(one["processor_s"]) == 1 for one in found.values())
    assert all(min(one["wall_s"] + one["processor_s"]) > 0 for one in found.values())
    for folder in (tmp_path / "round-0").iterdir():
        shard = folder / "text.train-00000.tok.arrow"
        assert shard.read_bytes() == (tmp_path / "shards" / shard.name).read_bytes()
