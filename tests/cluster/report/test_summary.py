"""Tests the closing lines of a run, and its picture."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from jobs import write_lines
from matplotlib.figure import Figure
from pairwise import slow_but
from rich.console import Console

from moebius.cluster.job import JobStatus, Journal, RootCause, State
from moebius.cluster.report.history import read_history
from moebius.cluster.report.summary import (
    _continued,
    _draw_loss,
    _running_mean,
    closing_words,
    draw_summary,
)


def write_metrics(run_dir: Path, *, steps: int, has_experts: bool = True) -> None:
    """Writes a run whose loss is not a number at most steps, and that was resumed from half of them."""
    loads = {"expert_load": [[0.4, 0.6]], "max_violation": [0.2], "effective_experts": [1.9]}
    lines = [
        {"kind": "start", "generation": 1, "resumed_from_step": None},
        {"kind": "eval", "step": 0, "loss": 8.0},
        *(
            {"kind": "train", "step": step, "loss": "nan" if step % 3 else 5.0, "tokens": step}
            | {"tokens_per_s": 9.0}
            | (loads if has_experts else {})
            for step in range(1, steps + 1)
        ),
        {"kind": "start", "generation": 2, "resumed_from_step": steps // 2},
        {"kind": "eval", "step": steps, "loss": 4.0},
    ]
    if has_experts:
        scores = {"kind": "scores", "items": 9, "seconds": 2.5}
        lines += [
            scores | {"step": 1, "piqa": 0.25, "copa": 0.5},
            scores | {"step": 2, "piqa": 0.75},
        ]
    write_lines(run_dir / "metrics.jsonl", lines)


@pytest.mark.parametrize("half", [0, 1, 7, 100])
def test_running_mean_is_that_of_the_finite_neighbours(half):
    values = [
        math.nan if step % 3 == 1 else math.inf if step == 50 else step**0.5 for step in range(99)
    ]
    values[20:40] = [math.nan] * 20
    for index, mean in enumerate(_running_mean(values, half)):
        near = [
            value
            for value in values[max(0, index - half) : index + half + 1]
            if math.isfinite(value)
        ]
        expected = sum(near) / len(near) if near else math.nan
        assert mean == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("shape", [{"steps": 1}, {"steps": 50}, {"steps": 9, "has_experts": False}])
def test_picture_of_runs_of_many_shapes(tmp_path, shape):
    from matplotlib.image import imread

    write_metrics(tmp_path, **shape)
    path = draw_summary(tmp_path)
    assert path == tmp_path / "summary.png"
    height, width, _ = (pixels := imread(path)).shape
    assert width > 1000
    assert (height > 800) == shape.get("has_experts", True), (
        "without experts, only the loss and the rate"
    )
    assert pixels[..., :3].std() > 0.05, "something is drawn"


def words(status: JobStatus, **values) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(closing_words(status, **values), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_closing_words_of_a_success(tmp_path):
    write_metrics(tmp_path, steps=50)
    drill = RootCause("fault drill: rank 3 was killed on purpose at step 30", on_purpose=True)
    status = JobStatus(
        tmp_path,
        State.SUCCEEDED,
        generation=2,
        restarts=1,
        step=50,
        reason="finished at step 50",
        root_cause=drill,
        submitted_at=100.0,
        ended_at=165.0,
    )
    text = words(status, picture=tmp_path / "summary.png")
    assert "SUCCEEDED  finished at step 50" in text
    assert f"8.0000 → 4.0000   (perplexity {math.exp(8):,.1f} → 54.6)" in text
    assert "piqa 0.750, copa 0.500" in text
    assert "50 steps, 50 tokens, 9 tokens/s, 1 min 05 s in all" in text
    assert (
        "1   fault drill: rank 3 was killed on purpose at step 30; generation 2 continued from the checkpoint of step 25"
        in text
    )
    assert str(tmp_path / "summary.png") in text
    assert "root cause:" not in text


def test_closing_words_say_what_the_records_lack(tmp_path):
    lines = [
        {"kind": "eval", "step": step, "loss": loss} for step, loss in ((340, 4.0), (500, 3.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    text = words(JobStatus(tmp_path, State.SUCCEEDED, step=500, gaps=("wandb lacks 2 lines",)))
    assert "4.0000 (step 340) → 3.0000" in text
    assert "wandb lacks 2 lines" in text


FOREIGN = "[/x] [/__w/pytorch/gloo.cc:542] [bold"  # what rich would take for markup


def foreign_cause() -> RootCause:
    return RootCause(
        summary=f"summary {FOREIGN}",
        rank=1,
        node=0,
        error=f"error {FOREIGN}",
        where=f"where {FOREIGN}",
        traceback=f"traceback {FOREIGN}",
        log=f"log {FOREIGN}",
    )


@pytest.mark.parametrize("state", slow_but(State, State.SUCCEEDED, State.FAILED, State.LOST))
def test_brackets_in_what_comes_from_elsewhere_are_shown_as_they_are(tmp_path, state):
    run_dir = tmp_path / "run [" / "x] $[ [a]"
    run_dir.mkdir(parents=True)
    write_metrics(run_dir, steps=3)
    picture = draw_summary(run_dir)
    status = JobStatus(
        run_dir=run_dir,
        state=state,
        restarts=1,
        step=3,
        reason=f"reason {FOREIGN}",
        root_cause=foreign_cause(),
    )
    screen = io.StringIO()
    console = Console(file=screen, width=400)
    console.print(closing_words(status, picture=picture), crop=False)
    said = screen.getvalue()
    shown = ["reason", "summary"]
    if state in (State.FAILED, State.LOST):
        shown = ["reason", "root cause: summary", "at where", "traceback", f"log: {run_dir}/log"]
    assert all(f"{field} {FOREIGN}" in said for field in shown), said
    assert str(run_dir) in said
    assert str(picture) in said


def test_the_picture_tells_a_restart_from_a_continuation_and_draws_few_points_once(
    tmp_path: Path,
) -> None:
    lines: list[dict[str, object]] = []
    for generation, steps in ((1, range(1, 21)), (2, range(11, 31)), (3, range(31, 41))):
        lines.append({"kind": "start", "step": steps[0] - 1, "generation": generation})
        lines += [
            {"kind": "train", "step": step, "loss": 1 / step, "learning_rate": step / 1000}
            for step in steps
        ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    journal = Journal(tmp_path)
    for state, generation in (
        (State.SUBMITTED, 0),
        (State.STARTING, 1),
        (State.RECOVERING, 1),
        (State.STARTING, 2),
        (State.SUCCEEDED, 2),
        (State.SUBMITTED, 2),
        (State.STARTING, 3),
    ):
        journal.append(state, generation=generation, reason="")
    continued, history = _continued(tmp_path), read_history(tmp_path)
    assert continued == {1, 3}
    assert history.learning_rate == {step: step / 1000 for step in range(1, 41)}
    for curve, labels in (
        (history.loss, ["training", "restart", "continued"]),
        (
            dict.fromkeys(range(100), 1.0),
            ["training, each step", "training, running mean", "restart", "continued"],
        ),
    ):
        history.loss = curve
        axes = Figure().subplots()
        _draw_loss(axes, history, title="run", continued=continued)
        assert axes.get_legend_handles_labels()[1] == labels
    assert draw_summary(tmp_path).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("model", "ceiling"),
    [
        ({"feed_forward": {"router": {"top_k": 1}}}, 2.0),
        ({"feed_forward": {"router": {"p": 0.5}}}, 0.0),
        (None, 0.0),
    ],
)
def test_panels_line_up_and_the_load_has_its_ceiling(tmp_path: Path, model, ceiling) -> None:
    write_metrics(tmp_path, steps=50)
    (tmp_path / "config.json").write_text(json.dumps({"model": model}))
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
        draw_summary(tmp_path)
    loss, rate, scores, load = figures[0].axes
    assert loss.get_xlim() == rate.get_xlim() == scores.get_xlim() == load.get_xlim()
    assert [np.asarray(line.get_ydata()).tolist() for line in scores.lines] == [[0.25, 0.75], [0.5]]
    lines = [np.asarray(line.get_ydata())[0] for line in load.lines[1:]]
    assert lines == [ceiling] * bool(ceiling)


@pytest.mark.parametrize(
    ("submitted_at", "told"),
    [
        (0.5, "30 steps, 300 tokens, 1 min 00 s"),
        (50.0, "10 steps (from 20 to 30), 100 tokens, 10 s"),
    ],
)
def test_a_summary_counts_the_steps_of_its_own_seconds(
    tmp_path: Path, submitted_at: float, told: str
) -> None:
    lines = [
        {"kind": "start", "step": 0, "time": 1.0, "generation": 1},
        {"kind": "train", "step": 20, "time": 40.0, "loss": 1.0, "tokens": 200},
        {"kind": "start", "step": 20, "time": 51.0, "generation": 2, "resumed_from_step": 20},
        {"kind": "train", "step": 30, "time": 60.0, "loss": 1.0, "tokens": 300},
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    status = JobStatus(tmp_path, State.SUCCEEDED, step=30, submitted_at=submitted_at, ended_at=60.0)
    assert told in words(status)
