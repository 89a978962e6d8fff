"""A run that recomputes is the run that does not, step by step, and with compiled parts up to
rounding.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from parts import make_config
from small_model import MODEL
from world import run_ranks

from moebius.train import run as parts_of_a_run
from moebius.train.config.run_config import Config
from moebius.train.loop import train

DROPOUT = MODEL.changed({"feed_forward.router.expert_dropout": 0.2})


def losses(data: Path, run_dir: Path, settings: dict[str, Any]) -> list[float]:
    """Of the steps and evaluations; with the names of compiled parts, if there are any, in a file
    of the run's folder.
    """
    run_dir.mkdir()
    settings = {"steps": 3, **settings}
    config = make_config(data, model=DROPOUT, mesh__ep=2, train=settings)
    run_ranks(start, 2, config, run_dir)
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def start(config: Config, run_dir: Path) -> None:
    compile_whole = parts_of_a_run.compile_dense_parts

    def compile_quickly(model: Any) -> None:
        compile_whole(model, backend="aot_eager")
        (run_dir / "compiled").touch()

    parts_of_a_run.compile_dense_parts = (
        compile_quickly  # a process of its own: nothing is to be put back
    )
    train(config, run_dir)


@pytest.mark.slow  # tests/model/test_recompute.py compares single passes
def test_the_losses_of_a_run_do_not_depend_on_it(data: Path, tmp_path: Path) -> None:
    expected = losses(data, tmp_path / "none", {})
    assert len(expected) == 5
    assert losses(data, tmp_path / "selective", {"recompute": "selective"}) == expected
    compiled = losses(data, tmp_path / "full", {"recompute": "full", "compile": True})
    assert compiled == pytest.approx(expected, rel=1e-5)
    assert [path.name for path in sorted(tmp_path.glob("*/compiled"))] == ["compiled"]
