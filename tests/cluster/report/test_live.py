"""Tests following a job: the live view and the plain lines."""

import io
import json
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from jobs import wait_for, write_lines
from rich.console import Console

from moebius.cluster.job import Journal, RootCause, State, as_details, read_status
from moebius.cluster.liveness import beat
from moebius.cluster.report.history import ExpertLoad
from moebius.cluster.report.live import (
    View,
    expert_load_table,
    follow,
    render,
    show_preparation,
)
from moebius.cluster.report.run_report import read_report
from moebius.cluster.report.summary import closing_words
from moebius.data_pipeline.make.units import PrepareProgress, SourceProgress


def console(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def text_of(output: Console) -> str:
    assert isinstance(output.file, io.StringIO)
    return output.file.getvalue()


def printed(renderable: object, *, width: int = 120) -> str:
    output = console(width)
    output.print(renderable)
    return text_of(output)


SOON = time.time() + 86_400.0  # after the journal's first line, however long tests take


def train_line(step: int, *, loss: float | str | None = 5.0) -> dict:
    return {
        "kind": "train",
        "time": SOON + 0.0 + step,
        "step": step,
        "loss": loss,
        "learning_rate": 2e-3,
        "grad_norm": 0.5,
        "tokens": step * 64,
        "tokens_per_s": 12345.6,
        "step_s": 0.5,
        "data_wait_s": 0.0,
        "expert_load": [[0.25] * 4, [0.7, 0.1, 0.1, 0.1]],
        "max_violation": [0.0, 1.8],
        "effective_experts": [4.0, 2.6],
    }


def write_run(run_dir: Path, *, state: State = State.SUCCEEDED) -> None:
    """Writes a run of 10 steps that was killed at step 7 and resumed from 5."""
    lines = [
        {
            "kind": "start",
            "time": SOON + 0.0,
            "step": 0,
            "generation": 1,
            "resumed_from_step": None,
            "cuda_graph": "captured",
        },
        {"kind": "eval", "time": SOON + 0.5, "step": 0, "loss": 8.0},
        *(train_line(step) for step in range(1, 8)),
        {"kind": "checkpoint", "time": SOON + 5.5, "step": 5, "seconds": 0.25, "bytes": 10},
        {"kind": "start", "time": SOON + 10.0, "step": 5, "generation": 2, "resumed_from_step": 5},
        *(train_line(step, loss=4.0) for step in range(6, 11)),
        {"kind": "eval", "time": SOON + 30.0, "step": 10, "loss": 4.5},
        {"kind": "scores", "time": SOON + 31.0, "step": 10, "piqa": 0.5125, "seconds": 2.5},
        {"kind": "samples", "time": SOON + 32.0, "step": 10, "prompt": "The", "text": " [b]\nend"},
    ]
    write_lines(run_dir / "metrics.jsonl", lines)
    (run_dir / "config.json").write_text('{"train": {"steps": 10}}')
    journal = Journal(run_dir)
    journal.append(State.SUBMITTED, generation=0, reason="1 node(s) × 1 rank(s)")
    journal.append(
        State.RECOVERING, generation=1, reason="fault drill: rank 0 was killed on purpose at step 7"
    )
    journal.append(state, generation=2, reason="finished at step 10")


def test_plain_lines_tell_the_story_of_a_run(tmp_path):
    write_run(tmp_path)
    output = console()
    status = follow(tmp_path, console=output)
    assert status.state is State.SUCCEEDED
    text = text_of(output)
    for told in (
        "SUBMITTED: 1 node(s) × 1 rank(s)",
        "cuda graph: captured",
        "RECOVERING: fault drill: rank 0 was killed on purpose at step 7",
        "generation 2 continued from the checkpoint of step 5",
        "checkpoint of step 5 written in 0.25 s",
        "validation loss 4.5 at step 10",
        "scores at step 10: piqa 0.512",
        "sample at step 10: The [b] end",
        f"{datetime.fromtimestamp(SOON + 10):%H:%M:%S} step 10/10, loss 4, validation 4.5000, 12,346 tokens/s, "
        "expert load max/mean 2.80",
        "SUCCEEDED: finished at step 10",
    ):
        assert told in text
    assert "\x1b" not in text


@pytest.mark.parametrize("has_cause", [True, False])
@pytest.mark.parametrize("command", ["train", "watch"])
def test_the_reason_of_a_failure_is_shown_in_full_once(tmp_path, command, has_cause):
    summary = "rank 1 on node 0 exited with code 1: ArithmeticError: " + "bad [batch] " * 20
    reason = f"{summary}(at step 7, 3 times; fix the cause, and submit again)"
    cause = RootCause(summary, rank=1, node=0, error="ArithmeticError: bad", where="model.py:7")
    details = {"root_cause": as_details(cause)} if has_cause else {}
    Journal(tmp_path).append(State.FAILED, generation=1, reason=reason, details=details)
    output = console(width=2000)
    status = follow(tmp_path, console=output)
    story = read_report(tmp_path).story() if command == "watch" else None
    output.print(closing_words(status, story=story))
    text = text_of(output)
    assert text.count(reason) == 1
    assert text.count(summary) == 1
    assert f"FAILED: rank 1{': ArithmeticError: bad' if has_cause else ' on node 0'}" in text
    assert ("at model.py:7" in text) == has_cause


def test_a_continued_run_does_not_tell_its_old_story_again(tmp_path):
    write_run(tmp_path)
    metrics, journal = tmp_path / "metrics.jsonl", Journal(tmp_path)
    lines = [json.loads(line) | {"time": 5.0} for line in metrics.read_text().splitlines()]
    write_lines(metrics, lines)
    journal.append(State.SUBMITTED, generation=2, reason="again")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "eval", "time": SOON, "step": 11, "loss": 3.0}) + "\n")
    journal.append(State.SUCCEEDED, generation=3, reason="finished at step 11")
    output = console()
    follow(tmp_path, console=output)
    text = text_of(output)
    assert "fault drill" not in text
    assert "finished at step 10" not in text
    assert "validation loss 4.5" not in text
    assert "checkpoint of step 5" not in text
    assert "SUBMITTED: again" in text
    assert "validation loss 3 at step 11" in text
    assert "finished at step 11" in text


def test_live_view_shows_progress_figures_and_the_load_of_every_depth_step(tmp_path):
    write_run(tmp_path, state=State.RUNNING)
    view = View(tmp_path)
    events = view.refresh()
    assert [event.time for event in events] == sorted(event.time for event in events)
    text = printed(render(view, width=120))
    for told in (
        "RUNNING",
        "generation 2",
        "step 10/10",
        "loss 4",
        "validation 4.5000, 12,346 tokens/s",
        "2.00e-03",
    ):
        assert told in text
    assert "max/mean 1.00  in use 4.0 of 4" in text
    assert "max/mean 2.80  in use 2.6 of 4" in text


def test_an_even_load_is_flat_and_an_uneven_one_is_not():
    load = ExpertLoad([[0.25] * 4, [0.7, 0.3, 0.0, 0.0]], [0.0, 1.8], [4.0, 1.8], depths=(3, 4))
    even, uneven = printed(expert_load_table(load, width=60)).splitlines()
    assert [even.split()[0], uneven.split()[0]] == ["3", "4"]  # the depth steps that have experts
    assert even.split()[1] == "▅▅▅▅▅▅▅▅▅▅▅▅"
    assert uneven.split()[1] == "███▅▅▅▁▁▁▁▁▁"


def test_a_view_before_the_first_step_and_of_a_loss_that_is_not_a_number(tmp_path):
    Journal(tmp_path).append(State.SUBMITTED, generation=0, reason="")
    view = View(tmp_path)
    view.refresh()
    assert "SUBMITTED" in printed(render(view))
    (tmp_path / "config.json").write_text('{"train": {"steps": 9}}')
    pace = {"left_s": 187.4, "passes": 2.5, "mfu": 0.4125}
    for step, loss, shown in ((1, "nan", "nan"), (3, None, "–")):  # None: no target counted
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(train_line(step, loss=loss) | pace) + "\n")
        view.refresh()
        left = "3 min 07 s left, 2.50 passes over the data, MFU 41.2%"
        assert f"step {step}/9, loss {shown}, {left}" in printed(render(view))
    assert read_status(tmp_path).loss is None
    assert list(view.history.loss) == [1, 3]


def test_following_keeps_up_with_a_run_and_ends_with_it(tmp_path):
    journal = Journal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="")
    beat(tmp_path)
    output = console()
    watcher = threading.Thread(target=follow, args=(tmp_path,), kwargs={"console": output})
    watcher.start()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train_line(1)) + "\n")
    wait_for(lambda: "step 1, loss 5" in text_of(output), timeout_s=100)
    before = time.thread_time_ns()
    journal.append(State.FAILED, generation=1, reason="rank 0 [bold]was killed[/bold]")
    watcher.join(timeout=100)
    assert not watcher.is_alive()
    assert "FAILED: rank 0 [bold]was killed[/bold]" in text_of(output)
    assert time.thread_time_ns() - before < 1e9


def test_following_a_lost_job_ends(tmp_path, monkeypatch):
    Journal(tmp_path).append(State.RUNNING, generation=1, reason="")
    monkeypatch.setattr("moebius.cluster.liveness.LOST_AFTER_S", 0.05)
    monkeypatch.setattr("moebius.cluster.liveness.GIVEN_UP_AFTER_S", 0.5)
    screen = console()
    assert follow(tmp_path, console=screen).state is State.LOST
    assert text_of(screen).count("LOST: was RUNNING") == 1


def test_preparation_is_shown_by_stage():
    output = console()
    with show_preparation(output) as on_progress:
        for done in range(3):
            on_progress(PrepareProgress("tokenising", (source("text", done),)))
        on_progress(PrepareProgress("quarantine", news="a[b].txt is left out: no [text]"))
    text = text_of(output)
    assert "preparing data: tokenising 0/2" in text
    assert "preparing data: tokenising 1/2" not in text, "a line for every stage, and now and then"
    assert "preparing data: a[b].txt is left out: no [text]" in text
    assert "data prepared in 0 s: 2,000 tokens" in text


def source(name: str, done: int, **more: float) -> SourceProgress:
    return SourceProgress(
        name=name,
        done=done,
        total=2,
        num_bytes=done * 3000,
        total_bytes=6000,
        tokens=done * 1000,
        segments=0,
        **more,
    )
