"""The script that measures tiles, without a GPU: every entry's call runs, and gives what the
present tile gives.
"""

import pytest
from rich.console import Console

from benchmarks.gpu import tune_tiles
from moebius.kernels.triton.tiles import TILES


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "WIDTH": 20,
        "HIDDEN": 16,
        "EXPERTS": 5,
        "TOP_K": 2,
        "ODD_WIDTH": 7,
        "ODD_HEAD": 3,
        "DEVICE": "cpu",
    }
    for name, value in ({"TOKENS": {"many": 9, "few": 4}} | sizes).items():
        monkeypatch.setattr(tune_tiles, name, value)
    monkeypatch.setattr(tune_tiles, "_expected", {})


@pytest.mark.slow
def test_every_entry_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000, 0, -1))  # each candidate is faster than the one before
    monkeypatch.setattr(tune_tiles, "_graph_ms", lambda call: float(next(times)))
    monkeypatch.setattr(
        tune_tiles, "candidates", lambda key: [TILES[key], tune_tiles.replace(TILES[key], stages=9)]
    )
    before = dict(TILES)
    keys = [(kernel, "fp32", "many") for kernel in tune_tiles.ORDER]
    try:
        measured = tune_tiles.measure_all(keys, float("inf"), Console(quiet=True))
        assert {key: TILES[key].stages for key in keys} == dict.fromkeys(keys, 9)
    finally:
        TILES.update(before)
    assert set(measured) == set(keys)
    assert all(isinstance(ms, float) for times in measured.values() for ms in times.values()), (
        measured
    )


def test_an_entry_without_time_stays_as_it_was() -> None:
    before = dict(TILES)
    assert tune_tiles.measure_all([("rows", "fp32", "few")], 0.0, Console(quiet=True)) == {}
    assert before == TILES


def test_a_tile_with_another_answer_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("rows", "fp32", "few")
    monkeypatch.setattr(tune_tiles, "_graph_ms", lambda call: 1.0)
    assert tune_tiles._timed(key) == 1.0
    tune_tiles._expected[key] *= 1.1
    assert "another output: off by" in str(tune_tiles._timed(key))
