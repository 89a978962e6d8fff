"""The page's figures contain the measured values."""

from typing import Any

import pytest
from measured_runs import (
    journal_line,
    train_line,
    with_loads,
    write_lines,
    write_run,
)

pytest.importorskip("plotly")

import plotly.graph_objects as go

from moebius_dashboard.curves import FollowedRun
from moebius_dashboard.figures import (
    COLOURS,
    imbalance_figure,
    load_figure,
    loss_figure,
    score_figure,
    throughput_figure,
    value_figure,
)


def traces(figure: go.Figure) -> list[dict[str, Any]]:
    return figure.to_dict()["data"]


def layout(figure: go.Figure) -> dict[str, Any]:
    return figure.to_dict()["layout"]


def followed(folder, *lines) -> FollowedRun:
    run = FollowedRun(write_run(folder, *lines), folder.name)
    run.refresh()
    return run


@pytest.mark.parametrize("none", ["nan", None])  # None: no target of the step counted
def test_the_loss_is_drawn_smoothed_and_as_it_was_with_its_validation(none, tmp_path):
    lines = [train_line(1, loss=4.0), train_line(2, loss=2.0), train_line(3) | {"loss": none}]
    validation = {"kind": "eval", "step": 2, "time": 1002.0, "loss": 3.5}
    run, other = followed(tmp_path / "a", *lines, validation), followed(tmp_path / "b", lines[0])
    raw, smooth, points, *_ = traces(loss_figure([run, other], "step", 0.5))
    assert list(raw["y"]) == [4.0, 2.0, None]
    both = [(4 + 0.5 * 2) / 1.5, (0.5 * 4 + 2) / 1.5, (0.25 * 4 + 0.5 * 2) / 0.75]
    assert list(smooth["y"]) == pytest.approx(both)
    assert (list(points["x"]), list(points["y"])) == ([2], [3.5])
    drawn = traces(loss_figure([run, other], "tokens", 0))
    assert [line["line"]["color"] for line in drawn if "validation" not in line["name"]] == list(
        COLOURS[:2]
    )
    assert list(drawn[0]["x"]) == [100, 200, 300]


def test_rate_and_gradient_norm_are_those_of_the_records(tmp_path):
    lines = [train_line(1) | {"learning_rate": 1e-3, "grad_norm": "inf"}, train_line(2)]
    run = followed(tmp_path / "a", *lines)
    [rate] = traces(value_figure([run], "step", "learning rate", "learning_rate"))
    [norm] = traces(value_figure([run], "step", "gradient norm", "grad_norm"))
    assert (list(rate["x"]), list(rate["y"]), list(norm["y"])) == ([1], [1e-3], [None])


def test_scores_are_drawn_by_task(tmp_path):
    lines = [
        {"kind": "scores", "time": 1001.0, "step": step, "piqa": 0.5, "items": 9, "seconds": 2.5}
        for step in (1, 2)
    ]
    [piqa] = traces(score_figure([followed(tmp_path / "a", train_line(1), *lines)], "step"))
    assert (piqa["name"], list(piqa["x"]), list(piqa["y"])) == ("a: piqa", [1, 2], [0.5, 0.5])


def test_what_interrupted_a_run_is_marked(tmp_path):
    run = followed(tmp_path / "a", train_line(1), train_line(2))
    lost = journal_line("RECOVERING", 1002.5, "rank 0 was killed", step=2)
    write_lines(tmp_path / "a" / "journal.jsonl", lost)
    run.refresh()
    [line] = layout(throughput_figure([run], "step"))["shapes"]
    assert (line["x0"], line["x1"]) == (2, 2)


def test_the_load_of_every_expert_is_drawn_in_units_of_the_mean(tmp_path):
    run = followed(
        tmp_path / "a",
        {"kind": "start", "step": 0, "time": 999.0, "generation": 1, "expert_depths": [2, 4]},
        with_loads(1, [0.5, 0.25, 0.25, 0.0], [0.25] * 4),
        with_loads(2, [1.0, 0.0, 0.0, 0.0], [0.25] * 4),
    )
    figure = load_figure(run, "step")
    first, second = traces(figure)
    assert [list(row) for row in first["z"]] == [[2.0, 4.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    assert [list(row) for row in second["z"]] == [[1.0, 1.0]] * 4
    assert [note["text"] for note in layout(figure)["annotations"]] == ["depth 2", "depth 4"]
    [most, *_] = traces(imbalance_figure([run], "step"))
    assert list(most["y"]) == [2.0, 4.0]


def test_a_run_without_experts_says_so(tmp_path):
    figure = load_figure(followed(tmp_path / "dense", train_line(1)), "step")
    assert not traces(figure)
    assert layout(figure)["annotations"][0]["text"] == "no expert loads recorded"
    assert layout(load_figure(None, "step"))["annotations"]
