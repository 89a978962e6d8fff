"""Curves of a run, their positions on three axes, and events."""

import math

import pytest
from measured_runs import (
    journal_line,
    train_line,
    with_loads,
    write_lines,
    write_run,
)

from moebius_dashboard.curves import (
    MAX_POINTS,
    Curves,
    FollowedRun,
    Runs,
    place,
    points,
    smoothed,
)


def curves_of(*lines) -> Curves:
    curves = Curves()
    for line in lines:
        curves.add(line)
    return curves


def test_steps_lie_on_three_axes():
    curves = curves_of(*(train_line(step) for step in (1, 2, 3601)))
    assert points(curves, curves.loss, "step")[0] == [1, 2, 3601]
    assert points(curves, curves.loss, "tokens")[0] == [100, 200, 360100]
    assert points(curves, curves.loss, "hours")[0] == pytest.approx([0, 1 / 3600, 1.0])
    assert place(curves, 2000, "tokens") == 200  # a step without a line: where the last one was
    assert place(Curves(), 7, "hours") == 0


def test_a_long_curve_keeps_its_highest_and_lowest_points():
    lines = [train_line(step, loss=2.0) for step in range(1, 20_001)]
    lines[12_345]["loss"], lines[777]["loss"] = 9.0, 0.5
    x, y = points(curves_of(*lines), curves_of(*lines).loss, "step")
    assert len(x) <= MAX_POINTS
    assert x == sorted(set(x))
    assert x[y.index(9.0)] == 12_346
    assert x[y.index(0.5)] == 778


def test_what_the_fullest_expert_and_the_busiest_rank_have():
    exchange = {"0/value": {"hottest_rank": 1.1}, "0/feed_forward": {"hottest_rank": 1.4}, "x": {}}
    curves = curves_of(with_loads(1, [0.5, 0.25, 0.25], [0.2, 0.2, 0.6], exchange=exchange))
    assert curves.hottest_expert == {1: pytest.approx(1.8)}
    assert curves.hottest_rank == {1: 1.4}
    assert curves_of(train_line(1)).hottest_expert == {}


def test_smoothing_is_a_mean_over_both_sides_that_does_not_lag():
    assert smoothed([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([(1 + 0.5 * 3) / 1.5, (0.5 * 1 + 3) / 1.5])
    assert smoothed([1.0, math.nan, 3.0], 0.5) == pytest.approx([1.4, 2.0, 2.6])
    falling = [10.0 - 0.1 * step for step in range(100)]
    assert smoothed(falling, 0.8)[30:70] == pytest.approx(falling[30:70], abs=0.01)
    assert smoothed([1.0, 3.0], 0.0) == [1.0, 3.0]


def test_a_run_is_read_on_and_tells_what_happened(tmp_path):
    run_dir = write_run(tmp_path / "run", train_line(1, skipped=0), train_line(2, skipped=1))
    run = FollowedRun(run_dir, "run")
    assert run.refresh().step == 2
    write_lines(
        run_dir / "metrics.jsonl",
        {"kind": "checkpoint", "step": 2, "time": 1002.5, "seconds": 0.1},
        {"kind": "start", "step": 2, "time": 1004.0, "generation": 2, "resumed_from_step": 2},
        train_line(3, loss=0.5),
    )
    recovering = journal_line("RECOVERING", 1003.5, "rank 1 was killed", step=2)
    write_lines(run_dir / "journal.jsonl", recovering, journal_line("RUNNING", 1004.5))
    curves = run.refresh()
    assert curves.loss == {1: 1.0, 2: 1.0, 3: 0.5}
    told = {event.words: event for event in curves.events}
    assert (told["RECOVERING: rank 1 was killed"].step, told["checkpoint"].step) == (2, 2)
    assert [event.words for event in curves.events if event.interrupts] == [
        "RECOVERING: rank 1 was killed"
    ]
    assert told["the update was skipped: a gradient was not finite"].step == 2
    assert told["SUBMITTED"].step is None  # none had been made
    assert len(curves.events) == len(run.refresh().events) == 6


def test_runs_that_come_later_are_found(tmp_path):
    write_run(tmp_path / "runs" / "one", train_line(1))
    runs = Runs(tmp_path / "runs")
    assert runs.names() == ["one"]
    write_run(tmp_path / "runs" / "group" / "two")
    assert sorted(runs.names()) == ["group/two", "one"]
    assert [run.curves.step for run in runs.chosen(["one", "group/two", "three"])] == [1, None]
    assert Runs(tmp_path / "runs" / "one").names() == ["one"]
