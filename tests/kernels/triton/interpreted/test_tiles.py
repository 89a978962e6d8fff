"""The table of tiles, and the script that measures a new one, without a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import tune_tiles
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton.tiles import OTHERS, TILES, Tile, choose, target_of

KEY = ("rows", "fp32", "few")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the table's tiles, not those of the interpreter."""
    monkeypatch.setattr(triton_tiles, "INTERPRETED", False)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_tile_is_chosen_by_rows_per_expert() -> None:
    assert choose("rows", torch.bfloat16, 299 * 8, 8) == TILES["rows", "bf16", "few"]
    assert choose("rows", torch.bfloat16, 300 * 8, 8) == TILES["rows", "bf16", "many"]
    assert choose("ragged", torch.float32, 0, 8) == TILES["ragged", "fp32", "few"]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("target", OTHERS)
def test_other_chips_have_tiles_of_their_own(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OTHERS[target].keys() <= TILES.keys()
    monkeypatch.setattr(triton_tiles, "target", lambda: target)
    for (kernel, precision, load), tile in OTHERS[target].items():
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        rows = triton_tiles.FEW * 8 - (load == "few")
        assert choose(kernel, dtype, rows, 8) == tile
    assert choose("gather_back", torch.float32, 0, 8) == TILES["gather_back", "fp32", "few"]


def test_a_capability_takes_the_column_of_the_next_older_one() -> None:
    older = {75: 80, 80: 80, 86: 89, 87: 89, 89: 89, 90: 90, 100: 100, 103: 100, 120: 120, 121: 120}
    assert {c: target_of(c) for c in older} == {c: f"sm_{sm}" for c, sm in older.items()}


def test_a_tile_is_no_longer_than_what_there_is() -> None:
    tile = Tile(128, 128, 64, 8, 4)
    assert tile.fit(columns=82, depth=1024) == tile
    assert tile.fit(columns=33, depth=5) == Tile(128, 64, 16, 8, 4)
    assert tile.fit(rows=3) == Tile(16, 128, 64, 8, 4)


def test_every_kernel_has_a_tile_for_each_precision_and_load() -> None:
    wanted = {
        (kernel, precision, load)
        for kernel in tune_tiles.ORDER
        for precision in ("bf16", "fp32")
        for load in ("many", "few")
    }
    assert set(TILES) == wanted


# The script ---------------------------------------------------------------------------------------


@pytest.fixture
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDTH": 20, "HIDDEN": 16, "EXPERTS": 5, "TOP_K": 2, "ODD_WIDTH": 7, "ODD_HEAD": 3}
    for name, value in (sizes | {"DEVICE": "cpu", "TOKENS": {"many": 9, "few": 4}}).items():
        monkeypatch.setattr(tune_tiles, name, value)
    monkeypatch.setattr(tune_tiles, "_expected", {})
    for key, tile in TILES.items():
        monkeypatch.setitem(TILES, key, tile)  # put back


def test_the_new_table_is_the_module_with_other_entries() -> None:
    table = TILES | {("rows", "bf16", "many"): replace(TILES["rows", "bf16", "many"], stages=3)}
    source = Path(triton_tiles.__file__).read_text(encoding="utf-8")
    written = tune_tiles.rewritten(source, table, 'on a "GPU"')
    assert tune_tiles.rewritten(written, TILES, triton_tiles.ORIGIN) == source
    parts: dict = {"__package__": "moebius.kernels.triton", "__name__": "other_tiles"}
    exec(compile(written, "tiles.py", "exec", dont_inherit=True), parts)
    assert str(parts["TILES"]) == str(table)
    assert parts["ORIGIN"] == "on a 'GPU'"


@pytest.mark.usefixtures("toy_sizes")
def test_an_entry_without_time_and_a_tile_with_another_answer_are_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, measured = dict(TILES), {}
    tune_tiles.measure_all([KEY], measured, 0.0, lambda: None)
    assert not measured
    assert before == TILES
    monkeypatch.setattr(tune_tiles, "_graph_ms", lambda call: 1.0)
    assert tune_tiles._timed(KEY) == 1.0
    tune_tiles._expected[KEY] *= 1.1
    assert "another output: off by" in str(tune_tiles._timed(KEY))
