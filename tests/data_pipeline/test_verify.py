"""Finding prepared folders, and naming every damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.manifest import manifest_name, read_manifest
from moebius.data_pipeline.verify import data_folder, find_folders, verify


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def problems(folder: Path) -> list[str]:
    return list(verify(folder, read_manifest(folder), lambda more: None))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_an_intact_folder_has_no_problems_and_every_byte_is_read_twice(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    read: list[int] = []
    assert not list(verify(prepared, manifest, read.append))
    num_bytes = sum(entry.num_bytes for entry in manifest.shards)
    assert 1.9 * num_bytes < sum(read) <= 2 * num_bytes


def _largest(folder: Path) -> tuple[Path, int]:
    entry = max(read_manifest(folder).shards, key=lambda shard: shard.num_bytes)
    return folder / entry.name, entry.num_bytes


def _flip_in_batch(folder: Path) -> list[str]:
    path, size = _largest(folder)
    flip(path, size // 2)
    return [f"{path.name} has blake2b", f"{path.name}, record batch"]


def _flip_in_footer(folder: Path) -> list[str]:
    path, size = _largest(folder)
    flip(path, size - 20)
    return [path.name]


def _lose_shard(folder: Path) -> list[str]:
    path, _ = _largest(folder)
    path.unlink()
    return [path.name]


def _lose_index(folder: Path) -> list[str]:
    path = folder / read_manifest(folder).shards[0].index_name
    path.unlink()
    return [path.name]


def _change_tokenizer(folder: Path) -> list[str]:
    flip(folder / "tokenizer.json", 40)
    return ["tokenizer"]


def _lose_end(folder: Path) -> list[str]:
    (folder / manifest_name(2)).unlink()
    return ["manifest-000002.json is missing, and nothing is preparing the folder"]


@pytest.mark.parametrize(
    "damage",
    [_lose_end, _flip_in_batch, _flip_in_footer, _lose_shard, _lose_index, _change_tokenizer],
)
def test_every_damage_is_named_once(copy: Path, damage: Callable[[Path], list[str]]) -> None:
    expected = damage(copy)
    told = problems(copy)
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
