"""The benchmark of the data pipeline runs, on a little text."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from small_corpus import sentences, write_jsonl

from benchmarks import data as benchmark
from benchmarks.report import save_parts


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
    words = f"data --input {text} --rounds 1 --steady --only read random first memory"
    monkeypatch.setattr(sys, "argv", words.split())
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
