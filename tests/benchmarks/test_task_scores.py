"""The table and the picture of test sets, from logs that are written here."""

import json
from pathlib import Path

import pytest

from benchmarks.task_scores import TaskRun, draw, read_run, table


def write_run(folder: Path, arm: str, seed: int, scores: dict[int, float], torn: str = "") -> Path:
    folder.mkdir()
    config = {"job": {"name": arm}, "train": {"seed": seed}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"kind": "train", "step": 1, "loss": 3.0}]
    for step, score in scores.items():
        figures = {"exact_match": score, "accuracy": (1 + score) / 2, "loss": 1 - score, "items": 8}
        named = {f"in_distribution/{key}": value for key, value in figures.items()}
        lines.append({"kind": "task", "step": step, "time": 0.0, **named})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n" + torn)
    return folder


def runs(tmp_path: Path) -> list[TaskRun]:
    found = [
        read_run(write_run(tmp_path / "a0", "p_hop_dense", 0, {0: 0.0, 10: 0.25}, torn='{"kind"')),
        read_run(write_run(tmp_path / "a1", "p_hop_dense", 1, {0: 0.0, 10: 0.75})),
        read_run(write_run(tmp_path / "b0", "p_hop_moeut", 0, {0: 0.0, 10: 0.5, 20: 1.0})),
    ]
    return [run for run in found if run is not None]


def test_the_table_has_the_last_scores_over_seeds(tmp_path: Path) -> None:
    head, _, *rows = table(runs(tmp_path)).splitlines()
    assert head == "| test set | | p_hop_dense (2 × 10 steps) | p_hop_moeut (1 × 20 steps) |"
    assert rows == [
        "| in_distribution | exact match % | 50.0 ± 35.4 (25.0, 75.0) | 100.0 (100.0) |",
        "| in_distribution | accuracy % | 75.0 ± 17.7 (62.5, 87.5) | 100.0 (100.0) |",
        "| in_distribution | loss | 0.500 ± 0.354 (0.750, 0.250) | 0.000 (0.000) |",
    ]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    found = runs(tmp_path)
    pictures = [draw(found, figure=figure) for figure in ("exact_match", "accuracy")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]


def test_runs_that_have_not_begun(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "c", "p_hop_dense", 0, {})) is None
    with pytest.raises(ValueError, match="is no run that has begun"):
        read_run(tmp_path / "nothing")
