"""Figures of evenness, checked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from moebius_science.load_evenness import evenness_of, last_load


def test_figures_by_hand() -> None:
    found = evenness_of(np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, 0.0]]))
    assert found.perplexity == pytest.approx((1 + 0.5) / 2)
    assert found.hottest == pytest.approx(2)
    assert found.idle == pytest.approx(2 / 8)


def test_the_last_three_lines_are_read(tmp_path: Path) -> None:
    loads = [[[9.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]]]
    common = {"kind": "train", "time": 1.0, "loss": 1.0}
    measured = {"max_violation": [0.0], "effective_experts": [2.0]}
    lines = [
        common | measured | {"step": step, "expert_load": load}
        for step, load in enumerate(loads, start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_load(tmp_path).tolist() == [[0.5, 0.5]]
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"kind": "train", "step": 1, "loss": 1.0}) + "\n"
    )
    with pytest.raises(ValueError, match="no run with experts"):
        last_load(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        last_load(tmp_path / "nowhere")
