"""The table of tiles, and the script that measures a new one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu import tune_tiles
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton.tiles import OTHERS, TILES, Tile, choose, target_of


def test_a_tile_is_chosen_by_rows_per_expert() -> None:
    assert choose("rows", torch.bfloat16, 299 * 8, 8) == TILES["rows", "bf16", "few"]
    assert choose("rows", torch.bfloat16, 300 * 8, 8) == TILES["rows", "bf16", "many"]
    assert choose("ragged", torch.float32, 0, 8) == TILES["ragged", "fp32", "few"]


def test_other_chips_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, table in OTHERS.items():
        assert table.keys() <= TILES.keys()
        monkeypatch.setattr(triton_tiles, "target", lambda target=target: target)
        for (kernel, precision, load), tile in table.items():
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            rows = triton_tiles.FEW * 8 - (load == "few")
            assert choose(kernel, dtype, rows, 8) == tile
        assert choose("gather_back", torch.float32, 0, 8) == TILES["gather_back", "fp32", "few"]


def test_a_capability_takes_the_column_of_the_next_older_one() -> None:
    columns = {
        80: 80,
        86: 89,
        87: 89,
        89: 89,
        90: 90,
        100: 100,
        103: 100,
        120: 120,
        121: 120,
        75: 80,
    }
    assert {c: target_of(c) for c in columns} == {c: f"sm_{sm}" for c, sm in columns.items()}


def test_a_tile_is_no_longer_than_what_there_is() -> None:
    tile = Tile(128, 128, 64, 8, 4)
    assert tile.fit(columns=82, depth=1024) == tile
    assert tile.fit(columns=33, depth=5) == Tile(128, 64, 16, 8, 4)
    assert tile.fit(rows=3) == Tile(16, 128, 64, 8, 4)


def test_every_kernel_has_a_tile_for_each_precision_and_load() -> None:
    kernels = set(tune_tiles.ORDER)
    assert set(TILES) == {
        (kernel, precision, load)
        for kernel in kernels
        for precision in ("bf16", "fp32")
        for load in ("many", "few")
    }


def test_candidates_begin_with_the_present_tile_and_differ() -> None:
    for key, present in TILES.items():
        tiles = list(tune_tiles.candidates(key))
        assert tiles[0] == present
        assert len(set(tiles)) == len(tiles)
        assert 5 < len(tiles) <= 16


def test_the_new_table_is_the_module_with_other_entries(tmp_path: Path) -> None:
    table = TILES | {("rows", "bf16", "many"): replace(TILES["rows", "bf16", "many"], stages=3)}
    source = Path(triton_tiles.__file__).read_text(encoding="utf-8")
    written = tune_tiles.rewritten(source, table, 'on a "GPU"')
    again = tune_tiles.rewritten(written, TILES, triton_tiles.ORIGIN)
    assert again == source
    parts: dict = {
        "__package__": "moebius.kernels.triton",
        "__name__": "moebius.kernels.triton.other_tiles",
    }
    exec(compile(written, "triton_tiles.py", "exec", dont_inherit=True), parts)
    assert {key: str(tile) for key, tile in parts["TILES"].items()} == {
        key: str(tile) for key, tile in table.items()
    }
    assert parts["ORIGIN"] == "on a 'GPU'"


def test_the_fastest_is_among_those_that_were_timed() -> None:
    slow, fast, broken = (Tile(64, 64, 64, 4, stages) for stages in (2, 3, 4))
    assert tune_tiles.fastest({slow: 2.0, fast: 1.0, broken: "out of shared memory"}) == fast
    assert tune_tiles.fastest({broken: "out of shared memory"}) is None
