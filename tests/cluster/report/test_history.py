"""Tests the curves that are read from metrics.jsonl."""

import json
import os

from jobs import write_lines

from moebius.cluster.report import json_lines
from moebius.cluster.report.history import read_history
from moebius.cluster.report.json_lines import JsonLinesTail, sampled
from moebius.cluster.report.run_records import history


def train(step: int, loss: float | str) -> dict:
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "tokens_per_s": 10.0,
        "expert_load": [[0.75, 0.25]],
        "max_violation": [0.5],
        "effective_experts": [2.0],
    }


def test_of_a_repeated_step_the_last_line_counts(tmp_path):
    lines = [
        {"kind": "start", "generation": 1, "resumed_from_step": None},
        *(train(step, 10.0 - step) for step in range(1, 8)),
        {"kind": "start", "generation": 2, "resumed_from_step": 5},
        train(6, 1.0),
        {"kind": "eval", "step": 6, "loss": 2.0},
        {"kind": "something new", "step": 6},
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    read = read_history(tmp_path)
    assert read.loss == {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0, 6: 1.0, 7: 3.0}
    assert read.validation == {6: 2.0}
    assert read.hottest[7] == 1.5
    assert read.step == 6
    [restart] = read.restarts
    assert (restart.generation, restart.resumed_from, restart.reached) == (2, 5, 7)


def long_run(path, *, steps: int) -> int:
    """Writes evaluations every 100 steps and a restart; returns the size."""
    lines = [{"kind": "start", "generation": 1, "resumed_from_step": None}]
    for step in range(1, steps + 1):
        lines.append(train(step, 10.0 / step))
        if step % 100 == 0:
            lines.append({"kind": "eval", "step": step, "loss": 1.0 / step})
        if step == steps // 2:
            lines.append({"kind": "start", "generation": 2, "resumed_from_step": step})
    write_lines(path, lines)
    return path.stat().st_size


def test_of_a_long_run_some_steps_are_read_and_every_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "_WINDOWS", 100)
    long_run(tmp_path / "metrics.jsonl", steps=3000)
    read = read_history(tmp_path)
    assert 100 <= len(read.loss) < 3000
    assert all(loss == 10.0 / step for step, loss in read.loss.items())
    assert read.step == 3000
    assert list(read.validation) == list(range(100, 3001, 100))
    assert [start.generation for start in read.starts] == [1, 2]
    assert read.load is not None


def test_what_is_read_of_a_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "_WINDOWS", 100)
    monkeypatch.setattr(json_lines, "_WINDOW_BYTES", 50)
    size = long_run(tmp_path / "metrics.jsonl", steps=3000)
    found = list(sampled(tmp_path / "metrics.jsonl", end=size))
    assert 100 <= len(found) <= 300


def test_hostile_lines_are_bounded_and_spelled_out(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE", 200)
    hostile = {"kind": "x", "text": "a\x1b[2J\x9b\u202eb\tc\n", "in": [{"\x07": "\b"}]}
    for ascii_only in (True, False):
        whole = json.dumps(hostile, ensure_ascii=ascii_only)
        (tmp_path / "lines").write_text(f"{'x' * 1000}\n{whole}\n")
        [found] = JsonLinesTail(tmp_path / "lines").read()
        assert found["text"] == "a\\x1b[2J\\x9b\\u202eb\tc\n"
        assert found["in"] == [{"\\x07": "\\x08"}]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")  # opening it would wait for a writer
    assert read_history(tmp_path).loss == {}
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert JsonLinesTail(tmp_path / "endless").read() == []
    assert JsonLinesTail(tmp_path).read() == []


def test_a_sample_of_a_short_run_is_all_of_it_and_of_a_long_one_a_part(tmp_path, monkeypatch):
    long_run(tmp_path / "metrics.jsonl", steps=3000)
    run = history(tmp_path)
    assert run.sample() == run.records()
    monkeypatch.setattr(json_lines, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "_WINDOWS", 100)
    part = run.sample()
    assert len(part) < len(run.records()) / 1.5
    assert part[-1] == run.records()[-1]
    assert [line["step"] for line in part if line["kind"] == "eval"] == [*range(100, 3001, 100)]
