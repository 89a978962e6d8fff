"""`moebius compare` from logs to tables, and through the command line."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from compared import TINY, planned, write_comparison

from moebius.cli.main import main
from moebius.evaluation.compare import picture
from moebius.evaluation.compare.cost import Measured, measure_costs
from moebius.evaluation.compare.plan import Arm, PlannedRun
from moebius.evaluation.compare.results import collect
from moebius.evaluation.compare.tables import as_csv, cost_table, how_measured, write_results
from moebius.train.run_folder import open_run


def command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["compare", *map(str, words)])
    assert isinstance(end.value.code, int)
    return end.value.code


def finish(run: PlannedRun, loss: float, *, at_first: float = 5.0) -> None:
    """Writes what a finished run leaves behind."""
    open_run(run.config, run.folder)
    steps = run.config.train.steps
    lines = [{"kind": "eval", "step": 0, "loss": 6.0, "time": 0.0}]
    lines += [{"kind": "train", "step": n, "loss": 5.0, "step_s": 0.1, "time": n} for n in range(1, steps + 1)]  # fmt: skip
    lines += [
        {"kind": "eval", "step": 3, "loss": at_first, "time": 3.0},
        {"kind": "eval", "step": 3, "loss": 4.5, "time": 3.5},  # again, after it was killed
        {"kind": "eval", "step": steps, "loss": loss, "time": 9.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.folder / "metrics.jsonl").write_text(text + '{"kind": "torn')
    (run.folder / "result.json").write_text(json.dumps({"state": "finished", "step": steps}))


CLAIMS = """
[[claims]]
says = "one layer is worse than two"
arm = "single"
side = "above"
bound = 0.05
"""


def test_the_results_are_what_the_logs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, arms, runs = planned(tmp_path, TINY + CLAIMS)
    losses = {"moeut": (3.0, 3.1, 3.2), "single": (3.2, 3.2, 3.5)}
    for run in runs[:-1]:
        finish(run, losses[run.arm][run.seed])
    partial = collect(file, arms, runs)
    assert (partial.finished, partial.planned, partial.is_complete) == (5, 6, False)
    assert partial.claims[0].verdict == "undecided"  # two seeds are paired
    finish(runs[-1], losses["single"][2])
    results = collect(file, arms, runs)
    baseline, single = results.arms
    assert baseline.is_lower is None
    assert single.differences == pytest.approx({0: 0.2, 1: 0.1, 2: 0.3})
    assert single.difference is not None
    assert (single.difference.mean, single.difference.deviation) == pytest.approx((0.2, 0.1))
    assert single.is_lower == "does not hold"
    assert results.claims[0].verdict == "holds"
    assert baseline.runs[0].curve == [(0, 6.0), (3, 4.5), (6, 3.0)]
    monkeypatch.setattr(picture, "draw", lambda results: b"drawn")
    written = write_results(results, arms, tmp_path / "out")
    assert [path.name for path in written] == ["tiny.md", "tiny.json", "tiny.csv", "tiny.png"]
    text = written[0].read_text()
    assert "| single | +0.2000 ± 0.1000 | +0.1000 … +0.3000 |" in text
    assert "| one layer is worse than two | single − moeut > 0.05 |" in text
    recorded = json.loads(written[1].read_text())
    assert [run["loss"] for run in recorded["runs"]] == [3.0, 3.1, 3.2, 3.2, 3.2, 3.5]
    rows = [line.split(",") for line in as_csv(results).splitlines()]
    assert len(rows) == 7
    assert [row[:2] for row in rows[1:3]] == [["moeut", "0"], ["moeut", "1"]]
    assert written[3].read_bytes() == b"drawn"


def test_costs_are_relative_to_the_baseline_of_their_round(tmp_path: Path):
    text = TINY.replace('label = "MoEUT"', "published = { time = 1.0, memory = 1.0 }")
    file, arms, _ = planned(tmp_path, text)
    seconds = {"moeut": [0.1, 0.2], "single": [0.3, 0.4]}
    peaks: Mapping[str, list[int | None]] = {"moeut": [10 << 20, 8 << 20], "single": [25 << 20, 5]}
    order = []

    def measure(arm: Arm, folder: Path, steps: int) -> Measured:
        order.append(arm.name)
        number = order.count(arm.name) - 1
        busy = 0.0 if number else 1.5
        return Measured(seconds[arm.name][number], peaks[arm.name][number], busy)

    costs = measure_costs(file, arms, tmp_path, rounds=2, steps=4, measure=measure)
    assert order == ["moeut", "single", "moeut", "single"]
    ratio = costs.arms[1].time_ratio  # 3 and 2, not 0.35 ÷ 0.15
    assert (ratio.mean, ratio.least, ratio.most) == pytest.approx((2.5, 2.0, 3.0))
    assert costs.arms[1].memory_ratio == 2.5
    assert "NOT QUIET: other processes took up to 1.5 cores" in how_measured(costs)
    assert cost_table(costs).rows[1] == ("single", "350", "2.50", "2.00 … 3.00", "", "25", "2.50", "")  # fmt: skip
    assert cost_table(costs).rows[0][4] == "1.00"


def test_sizes_are_shown_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert command(write_comparison(tmp_path), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "equal parameters within 5.00%" in shown
    assert "num_experts" in shown
    assert not (tmp_path / "runs").exists()
    assert command(tmp_path / "tiny.toml", "--table", "--json") == 0
    assert json.loads(capsys.readouterr().out)["planned"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.toml"], "nothing.toml: cannot be read"),
        (["tiny.toml", "--seeds", "0,0"], "--seeds 0,0: give different whole numbers"),
        (["tiny.toml", "--jobs", "0"], "--jobs 0: at least 1 is needed"),
        (["tiny.toml", "--restart", "dense"], "--restart dense: is none of the arms"),
        (["tiny.toml", "model.d_modle=3"], "did you mean model.d_model?"),
    ],
)
def test_bad_requests_are_refused_in_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    write_comparison(tmp_path)
    assert command(*words) == 2
    assert message in capsys.readouterr().err
