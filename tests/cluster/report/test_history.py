"""Tests the curves that are read from metrics.jsonl."""

import json

from moebius.cluster.report.history import read_history


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
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_history(tmp_path)
    assert read.loss == {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0, 6: 1.0, 7: 3.0}
    assert read.validation == {6: 2.0}
    assert read.hottest[7] == 1.5
    assert read.step == 6
    [restart] = read.restarts
    assert (restart.generation, restart.resumed_from, restart.reached) == (2, 5, 7)
