"""Full segments are sealed in the order of the units, and the chain records everything."""

from pathlib import Path

import pytest
from made_folder import shard_entry

from moebius.data_pipeline.make import commit
from moebius.data_pipeline.make.commit import Committer
from moebius.data_pipeline.manifest import (
    is_prepared,
    read_manifest,
)
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import save_tokenizer


@pytest.fixture
def make(tmp_path):
    """Returns a factory of committers for a folder, and the list of reported segments."""
    save_tokenizer(tmp_path, BytesTokenizer())
    told: list[str] = []

    def made(**num_units: int) -> tuple[Committer, Path, list[str]]:
        config = PrepareConfig(
            sources=tuple(SourceConfig(name=name, input=("x",)) for name in num_units),
            tokenizer="bytes",
            segment_tokens=1000,
        )
        committer = Committer(config, tmp_path, num_units=num_units, on_segment=told.append)
        return committer, tmp_path, told

    return made


def segments(folder: Path, source: str) -> list[list[int]]:
    """Returns the numbers of the train shards of each segment."""
    manifest = read_manifest(folder)
    return [
        [shard.number for shard in segment.of("train")] for segment in manifest.segments(source)
    ]


def test_a_segment_is_sealed_when_it_has_its_tokens_or_its_source_ends(make):
    committer, folder, told = make(a=5, b=2)
    committer.commit("a", [shard_entry("a", 0, num_tokens=600)])
    assert not is_prepared(folder), "nothing can be read yet"
    committer.commit(
        "b",
        [shard_entry("b", 0, num_tokens=999), shard_entry("b", 0, "validation", num_tokens=10**6)],
    )
    assert not is_prepared(folder), "validation fills no segment"
    committer.commit("a", [shard_entry("a", 1, num_tokens=400)])
    assert segments(folder, "a") == [[0, 1]]
    committer.commit("a", [])  # the whole source is dropped
    committer.commit("a", [shard_entry("a", 3, num_tokens=5000)])
    committer.commit("a", [])
    assert segments(folder, "a") == [[0, 1], [3]], "it ends without an empty segment"
    assert segments(folder, "b") == []
    committer.commit("b", [])
    assert segments(folder, "b") == [[0]]
    assert told == ["a", "a", "b"]


def test_a_segment_has_so_many_shards_at_most(make, monkeypatch):
    monkeypatch.setattr(commit, "MAX_SEGMENT_SHARDS", 3)
    committer, folder, _ = make(a=7)
    for number in range(7):
        committer.commit("a", [shard_entry("a", number, num_tokens=1)])
    assert segments(folder, "a") == [[0, 1, 2], [3, 4, 5], [6]]
