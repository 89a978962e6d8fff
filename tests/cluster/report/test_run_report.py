"""Tests the report of a run: one line for people, one object for scripts."""

import json
import os
import time
from pathlib import Path

import pytest
from jobs import write_lines

from moebius.cluster.job import Journal, RootCause, State, as_details
from moebius.cluster.liveness import beat
from moebius.cluster.report.run_report import find_runs, is_recent, read_report, read_reports

HOUR = 3600.0


def write_journal(run_dir: Path, entries: list[tuple[float, State, int, str, dict]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [
        {"time": at, "state": state, "generation": generation, "reason": reason, "details": details}
        for at, state, generation, reason, details in entries
    ]
    write_lines(run_dir / "journal.jsonl", lines)


def killed(rank: int) -> dict:
    cause = RootCause(f"rank {rank} on node 1 was killed by SIGKILL", rank, 1, exit_code=-9)
    return {"root_cause": as_details(cause), "step": 40}


NODE_LOST = {"root_cause": as_details(RootCause("node 1 was lost: its agent actor died (gone)"))}


def write_night(run_dir: Path, *, begun: float) -> None:
    """Writes a run that was interrupted three times and succeeded."""
    entries = [
        (begun, State.SUBMITTED, 0, "2 node(s) × 4 rank(s)", {"name": "night"}),
        (begun + 20, State.RUNNING, 1, "first step", {}),
        (begun + HOUR, State.RECOVERING, 1, "rank 5 …", killed(5)),
        (begun + HOUR + 1, State.STARTING, 2, "starting 8 rank(s)", {}),
        (begun + HOUR + 8, State.RUNNING, 2, "first step", {}),
        (begun + 2 * HOUR, State.RECOVERING, 2, "rank 5 …", killed(5)),
        (begun + 2 * HOUR + 6, State.RUNNING, 3, "first step", {}),
        (begun + 3 * HOUR, State.RECOVERING, 3, "node 1 …", NODE_LOST),
        (begun + 3 * HOUR + 30, State.RUNNING, 4, "first step", {}),
        (begun + 7.2 * HOUR, State.SUCCEEDED, 4, "finished at step 9500", {}),
    ]
    write_journal(run_dir, entries)
    line = {"kind": "train", "step": 9500, "loss": 2.5, "tokens_per_s": 1234.5}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run_dir / "config.json").write_text('{"train": {"steps": 9500}}')
    for name in ("step_00009000", "step_00009500", "step_00009600.tmp", "notes"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)


def test_a_night_in_one_line(tmp_path):
    write_night(tmp_path, begun=1000.0)
    assert read_report(tmp_path).story() == (
        "SUCCEEDED at step 9,500 after 7 h 12 min; 3 recoveries: rank 5 killed (2 ×), node 1 lost; "
        "last checkpoint step 9,500"
    )


def test_the_keys_of_the_json_object_are_those_that_are_documented(tmp_path):
    write_night(tmp_path, begun=1000.0)
    record = json.loads(json.dumps(read_report(tmp_path).record(), allow_nan=False))
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    table = page.partition("<!-- status -->")[2].partition("<!-- end -->")[0]
    documented = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert documented == list(record)
    assert record["state"] == "SUCCEEDED"
    assert record["name"] == "night"
    assert (record["step"], record["total_steps"], record["loss"]) == (9500, 9500, 2.5)
    assert record["last_checkpoint"] == 9500
    assert record["elapsed_s"] == pytest.approx(7.2 * HOUR)
    assert [recovery["seconds"] for recovery in record["recoveries"]] == [8.0, 6.0, 30.0]
    assert [recovery["step"] for recovery in record["recoveries"]] == [40, 40, None]
    assert record["exit_code"] == 0


def test_runs_that_go_on_have_failed_or_are_lost(tmp_path):
    going = tmp_path / "going"
    write_journal(going, [(time.time() - 65, State.RUNNING, 1, "first step", {})])
    beat(going)
    assert read_report(going).story() == (
        "RUNNING before the first step for 1 min 05 s; no recoveries; no checkpoint"
    )
    line = {"kind": "train", "step": 40, "loss": 2.5, "left_s": 3700.0, "passes": 1.5, "mfu": 0.4}
    write_lines(going / "metrics.jsonl", [line])
    pace = "1 h 01 min left, 1.50 passes over the data, MFU 40.0%"
    assert f"RUNNING at step 40 for 1 min 05 s; {pace}; no rec" in read_report(going).story()
    told = read_report(going).record()
    assert [told[key] for key in ("left_s", "passes", "mfu")] == [3700.0, 1.5, 0.4]
    failed = tmp_path / "failed"
    details = {"root_cause": as_details(RootCause("rank 1: [x]", 1, 0, error="ValueError: [x]"))}
    entries = [(0.0, State.SUBMITTED, 0, "", {}), (9.0, State.FAILED, 1, "rank 1: [x]", details)]
    write_journal(failed, entries)
    report = read_report(failed)
    assert report.story() == (
        "FAILED before the first step after 9 s; rank 1: [x]; no recoveries; no checkpoint"
    )
    assert report.record()["root_cause"]["error"] == "ValueError: [x]"
    assert report.record()["exit_code"] == 1
    lost = tmp_path / "lost"
    write_journal(lost, [(time.time() - 65, State.RUNNING, 1, "first step", {})])
    since = time.time() - 65
    os.utime(lost / "journal.jsonl", (since, since))  # no sign of life after that
    assert read_report(lost).story().startswith("LOST before the first step for 1 min 0")


def test_runs_below_a_folder(tmp_path):
    now = time.time()
    for place, begun in (("a", now - HOUR), ("sweep/b", now - 9 * HOUR), ("c", now - 30 * 86400)):
        write_night(tmp_path / place, begun=begun)
    write_night(tmp_path / "a" / "checkpoints" / "inside", begun=now)  # of a run: not looked into
    write_night(tmp_path / ".hidden" / "d", begun=now)
    write_night(tmp_path / "1" / "2" / "3" / "too_deep", begun=now)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "journal.jsonl").write_text('{"half a li')
    (tmp_path / "circle").symlink_to(tmp_path)
    reports, problems = read_reports(list(find_runs(tmp_path)))
    names = [report.status.run_dir.relative_to(tmp_path).as_posix() for report in reports]
    assert names == ["a", "sweep/b", "c"]
    assert [is_recent(report) for report in reports] == [True, True, False]
    assert len(problems) == 1
    assert "torn: no job was started" in problems[0]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]


def test_since_is_when_the_state_was_entered(tmp_path):
    entries = [
        (1.0, State.SUBMITTED, 0, "", {}),
        (2.0, State.PLACING, 0, "waiting", {}),
        (3.0, State.PLACING, 0, "still waiting", {}),
    ]
    write_journal(tmp_path, entries)
    beat(tmp_path)
    assert read_report(tmp_path).since == 2.0
    Journal(tmp_path).append(State.SUBMITTED, generation=0, reason="again", details={"name": "b"})
    assert read_report(tmp_path).name == "b"
