"""Finding prepared folders, and naming every damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.manifest import manifest_name, read_manifest
from moebius.data_pipeline.verify import data_folder, find_folders, verify


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def test_an_intact_folder_has_no_problems_and_every_byte_is_read_twice(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    read: list[int] = []
    assert not list(verify(prepared, manifest, read.append))
    num_bytes = sum(entry.num_bytes for entry in manifest.shards)
    assert 1.9 * num_bytes < sum(read) <= 2 * num_bytes


SHARD, INDEX = "text.train-00000.tok.arrow", "text.train-00000.idx.arrow"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "lost end": (
        lambda folder: (folder / manifest_name(2)).unlink(),
        ["manifest-000002.json is missing, and nothing is preparing the folder"],
    ),
    "a bit of a batch": (
        lambda folder: flip(folder / SHARD),
        [f"{SHARD} has blake2b", f"{SHARD}, record batch"],
    ),
    "a bit of a footer": (
        lambda folder: flip(folder / SHARD, (folder / SHARD).stat().st_size - 20),
        [SHARD],
    ),
    "a bit of an index": (lambda folder: flip(folder / INDEX), [f"{INDEX} has blake2b"]),
    "lost shard": (lambda folder: (folder / SHARD).unlink(), [SHARD]),
    "lost index": (lambda folder: (folder / INDEX).unlink(), [INDEX]),
    "tokenizer": (lambda folder: flip(folder / "tokenizer.json", 40), ["tokenizer"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named_once(copy: Path, damage: str) -> None:
    do_damage, expected = DAMAGES[damage]
    do_damage(copy)
    told = list(verify(copy, read_manifest(copy), lambda more: None))
    assert len(told) == len(expected)
    assert all(part in problem for part, problem in zip(expected, told, strict=True)), told


def test_folders_are_found_two_levels_deep_with_what_is_wrong(
    prepared: Path, tmp_path: Path
) -> None:
    for place in ("b/data", "a", "too/deep/data"):
        shutil.copytree(prepared, tmp_path / place)
    flip(tmp_path / "a" / manifest_name(1), 30)
    (tmp_path / "b" / "data" / "unfinished").mkdir()
    (tmp_path / "b" / "data" / manifest_name(2)).unlink()
    damaged, growing = find_folders(tmp_path)
    assert growing.manifest is not None
    assert not growing.manifest.complete
    (tmp_path / "b" / "data" / "unfinished").rmdir()
    assert "000002.json is missing" in list(find_folders(tmp_path))[1].problem
    shutil.copy(prepared / manifest_name(2), tmp_path / "b" / "data")
    damaged, intact = find_folders(tmp_path)
    assert (damaged.path, intact.path) == (tmp_path / "a", tmp_path / "b" / "data")
    assert "is damaged" in damaged.problem
    assert intact.manifest == read_manifest(prepared)
    assert [folder.path for folder in find_folders(prepared)] == [prepared]


def test_a_run_leads_to_its_data(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"data": {"directory": str(prepared)}}))
    assert data_folder(tmp_path) == prepared
    assert data_folder(prepared) == prepared
    for config in ("", "[]", '{"data": {"directory": ""}}', '{"data": {"directory": 3}}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ShardError, match="no prepared data and is no run folder"):
            data_folder(tmp_path)
