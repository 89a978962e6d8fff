"""The hottest rank's factor: recorded, drawn, balanced."""

import json
from pathlib import Path

import numpy as np
import pytest

from moebius.planning.routing_skew import BALANCED, RoutingSkew, dirichlet_skew, recorded_skew
from moebius.planning.workload import Bank

BANK = Bank("feed_forward", "feed_forward", 16, 4, 8, 8, 1, 1)


def test_drawn_factors_are_those_of_drawn_loads() -> None:
    """Drawing blocks of a Dirichlet distribution equals drawing every expert."""
    found = dirichlet_skew(2.0).factor(BANK, 4)
    loads = np.random.default_rng(7).dirichlet(np.full(16, 2.0), 20_000).reshape(-1, 4, 4).sum(2)
    hottest = loads.max(1) * 4
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == pytest.approx(np.quantile(hottest, quantile), rel=0.04)


def test_heads_are_drawn_apart() -> None:
    heads = Bank("value", "value", 4, 2, 8, 8, 1, 1, heads=4)
    assert dirichlet_skew(0.5).factor(heads, 4) == pytest.approx(
        BALANCED
    )  # a rank holds one head, and every head is as busy
    assert dirichlet_skew(0.5).factor(heads, 2)["p99"] == pytest.approx(1)
    assert dirichlet_skew(0.5).factor(heads, 8)["p50"] > 1.1


def test_skew_grows_with_ranks_and_falls_with_concentration() -> None:
    factors = [dirichlet_skew(3.0).factor(BANK, ranks)["p90"] for ranks in (1, 2, 4, 8, 16)]
    assert factors == sorted(factors)
    assert factors[0] == 1
    evener = [
        dirichlet_skew(concentration).factor(BANK, 8)["p90"] for concentration in (0.5, 2, 8, 100)
    ]
    assert evener == sorted(evener, reverse=True)


def test_what_is_balanced_by_construction_is_not_skewed() -> None:
    balanced = Bank("feed_forward", "feed_forward", 16, 4, 8, 8, 1, 1, balanced=True)
    assert dirichlet_skew(0.1).factor(balanced, 8) == BALANCED
    assert RoutingSkew().factor(BANK, 8) == BALANCED


def write_run(folder: Path, loads: list[list[list[float]]]) -> None:
    lines = [{"kind": "start", "step": 0}] + [
        {"kind": "train", "step": step, "expert_load": load} for step, load in enumerate(loads)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_recorded_loads_of_a_run(tmp_path: Path) -> None:
    """Two depth steps at two steps: four observations of 4 experts on 2 ranks."""
    write_run(
        tmp_path, [[[0.4, 0.3, 0.2, 0.1], [0.25] * 4], [[0.1, 0.1, 0.4, 0.4], [0.0, 0.5, 0.5, 0.0]]]
    )
    skew = recorded_skew(tmp_path)
    bank = Bank("feed_forward", "feed_forward", 4, 2, 8, 8, 1, 1)
    skew.check([bank])
    hottest = [1.4, 1.0, 1.6, 1.0]
    assert skew.factor(bank, 2)["p50"] == pytest.approx(np.quantile(hottest, 0.5))
    assert skew.factor(bank, 2)["p90"] == pytest.approx(np.quantile(hottest, 0.9))
    assert "4 loads recorded in" in skew.source


def test_recorded_loads_of_a_bank_that_was_rounded_up(tmp_path: Path) -> None:
    write_run(tmp_path, [[[0.5, 0.25, 0.25]]])
    skew = recorded_skew(tmp_path / "metrics.jsonl")
    assert skew.factor(Bank("feed_forward", "feed_forward", 4, 2, 8, 8, 1, 1), 2)[
        "p50"
    ] == pytest.approx(1.5)


def test_loads_of_another_model_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [[[0.5, 0.5]]])
    with pytest.raises(
        ValueError, match=r"2 feed_forward experts were recorded, but the model has 16"
    ):
        recorded_skew(tmp_path).check([BANK])
    with pytest.raises(ValueError, match="no loads of the value experts"):
        recorded_skew(tmp_path).check([Bank("value", "value", 2, 1, 8, 8, 1, 1)])


def test_no_loads_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        recorded_skew(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="has no expert loads"):
        recorded_skew(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "tr\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: is not JSON lines: Unterminated string"):
        recorded_skew(tmp_path)
    with pytest.raises(ValueError, match="above 0"):
        dirichlet_skew(0)
