"""Looking into prepared folders: what is told agrees with the shards, and every damage is told."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from token_stream import TokenStream

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.manifest import manifest_name, read_manifest
from moebius.data_pipeline.verify import (
    count_source,
    data_folder,
    document_lengths,
    find_folders,
    stats,
    verify,
)


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def problems(folder: Path) -> list[str]:
    return list(verify(folder, read_manifest(folder), lambda more: None))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_an_intact_folder_has_no_problems_and_every_byte_is_read_twice(prepared):
    manifest = read_manifest(prepared)
    read = []
    assert list(verify(prepared, manifest, read.append)) == []
    num_bytes = sum(entry.num_bytes for entry in manifest.shards)
    assert 1.9 * num_bytes < sum(read) <= 2 * num_bytes


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_a_flipped_bit_is_told_with_its_record_batch(copy, share):
    entry = max(read_manifest(copy).shards, key=lambda shard: shard.num_bytes)
    flip(copy / entry.name, int(share * entry.num_bytes))
    told = problems(copy)
    assert "has blake2b" in told[0]
    assert len(told) == 2
    assert f"{entry.name}, record batch" in told[1]


def test_a_flipped_bit_in_the_footer_is_told_by_the_hash(copy):
    entry = read_manifest(copy).shards[0]
    flip(copy / entry.name, entry.num_bytes - 20)
    assert [entry.name in problem for problem in problems(copy)] == [True]


@pytest.mark.parametrize("suffix", [".tok.arrow", ".idx.arrow"])
def test_a_missing_file_is_told_once_and_the_rest_is_read(copy, suffix):
    shards = read_manifest(copy).shards
    lost = shards[0].name.removesuffix(".tok.arrow") + suffix
    (copy / lost).unlink()
    flip(copy / shards[-1].name, shards[-1].num_bytes // 2)
    told = problems(copy)
    assert sum(lost in problem for problem in told) == 1
    assert any(shards[-1].name in problem for problem in told)


def test_another_tokenizer_is_told(copy):
    flip(copy / "tokenizer.json", 40)
    assert "tokenizer" in problems(copy)[0]


def test_lengths_are_those_of_the_documents(prepared):
    manifest = read_manifest(prepared)
    expected = []
    stream = TokenStream(prepared, "train", manifest)
    for batch in range(stream.num_batches):
        rows = stream.read_documents(batch).column("tokens").to_pylist()
        expected += [len(tokens) for tokens in rows]
    stream.close()
    found = document_lengths(prepared, manifest, "text", "train")
    assert found.num_documents == len(expected)
    assert (found.shortest, found.longest) == (min(expected), max(expected))
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.percentiles[50] == sorted(expected)[len(expected) // 2]
    assert found.histogram == Counter(2 ** (length.bit_length() - 1) for length in expected)


def test_stats_are_json_and_add_up(prepared):
    manifest = read_manifest(prepared)
    found = json.loads(json.dumps(stats(prepared, manifest, lengths=True)))
    (source,) = found["sources"]
    for split in ("train", "validation"):
        counts = source["splits"][split]
        assert counts["num_tokens"] == manifest.num_tokens(split)
        assert counts["num_documents"] == counts["document_tokens"]["num_documents"]
        assert counts == counts | vars(count_source(manifest, "text", split))
        assert sum(era[f"{split}_tokens"] for era in source["eras"]) == counts["num_tokens"]
    assert found["dropped"]["text"] == manifest.dropped
    assert found["complete"]


def test_folders_are_found_two_levels_deep_with_what_is_wrong(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "b" / "data")
    shutil.copytree(prepared, tmp_path / "a")
    shutil.copytree(prepared, tmp_path / "too" / "deep" / "data")
    flip(tmp_path / "a" / manifest_name(1), 30)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text("{}")
    found = list(find_folders(tmp_path))
    assert [folder.path.relative_to(tmp_path).as_posix() for folder in found] == [
        *("a", "old", "b/data")
    ]
    assert "is damaged" in found[0].problem
    assert "prepare the data again" in found[1].problem
    assert found[2].manifest == read_manifest(prepared)
    assert [folder.path for folder in find_folders(prepared)] == [prepared]


def test_a_run_leads_to_its_data(prepared, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"directory": str(prepared)}}))
    assert data_folder(tmp_path) == prepared
    assert data_folder(prepared) == prepared
    for config in ("", "[]", '{"data": {"directory": ""}}', '{"data": {"directory": 3}}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ShardError, match="holds no prepared data and is no run folder"):
            data_folder(tmp_path)
