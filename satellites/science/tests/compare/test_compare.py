"""`moebius compare` from file to table: through the command line, killed and resumed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from compared import TINY, finish, planned, wait_for, write_comparison, write_lines

from moebius_science.compare import picture
from moebius_science.compare.cost import Measured, measure_costs
from moebius_science.compare.plan import Arm, PlannedRun
from moebius_science.compare.results import collect
from moebius_science.compare.tables import cost_table, how_measured, write_results
from moebius_science.compare_command import main


def finish_with(run: PlannedRun, loss: float) -> None:
    """Writes the output of a finished run that was killed once."""
    finish(run)
    steps = run.config.train.steps
    losses = [(0, 6.0), (3, 5.0), (3, 4.5), (steps, loss)]
    records = [{"kind": "eval", "step": n, "loss": nats, "time": float(n)} for n, nats in losses]
    write_lines(run.folder / "metrics.jsonl", records)


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
        finish_with(run, losses[run.arm][run.seed])
    partial = collect(file, arms, runs)
    assert (partial.finished, partial.planned, partial.is_complete) == (5, 6, False)
    assert partial.claims[0].verdict == "too few seeds"  # two are paired
    finish_with(runs[-1], losses["single"][2])
    results = collect(file, arms, runs)
    baseline, single = results.arms
    assert baseline.interval is None
    assert single.differences == pytest.approx({0: 0.2, 1: 0.1, 2: 0.3})
    assert single.difference is not None
    assert (single.difference.mean, single.difference.deviation) == pytest.approx((0.2, 0.1))
    assert single.interval == pytest.approx((-0.0484, 0.4484), abs=1e-4)  # t = 4.3027 of 3 seeds
    assert results.claims[0].interval == single.interval
    assert results.claims[0].verdict == "too few seeds"
    assert baseline.runs[0].curve == [(0, 6.0), (3, 4.5), (6, 3.0)]
    monkeypatch.setattr(picture, "draw", lambda results: b"drawn")  # the slow test below does
    written = write_results(results, arms, tmp_path / "out")
    assert [path.name for path in written] == ["tiny.md", "tiny.json", "tiny.png"]
    text = written[0].read_text()
    assert "| single | +0.2000 ± 0.1000 | -0.0484 … +0.4484 |" in text
    assert "| one layer is worse than two | single − moeut > 0.05 |" in text
    recorded = json.loads(written[1].read_text())
    assert [run["loss"] for run in recorded["runs"]] == [3.0, 3.1, 3.2, 3.2, 3.2, 3.5]
    assert written[2].read_bytes() == b"drawn"


def test_costs_are_relative_to_the_baseline_of_their_round(tmp_path: Path):
    text = TINY.replace('label = "MoEUT"', "published = { time = 1.0 }")
    file, arms, _ = planned(tmp_path, text)
    seconds = {"moeut": [0.1, 0.2], "single": [0.3, 0.4]}
    order = []

    def measure(arm: Arm, folder: Path, steps: int) -> Measured:
        order.append(arm.name)
        number = order.count(arm.name) - 1
        return Measured(seconds[arm.name][number], busy_cores=0.0 if number else 1.5)

    costs = measure_costs(file, arms, tmp_path, rounds=2, steps=4, measure=measure)
    assert order == ["moeut", "single", "moeut", "single"]
    ratio = costs.arms[1].time_ratio  # 3 and 2, not 0.35 ÷ 0.15
    assert (ratio.mean, ratio.least, ratio.most) == pytest.approx((2.5, 2.0, 3.0))
    assert "NOT QUIET: other processes took up to 1.5 cores" in how_measured(costs)
    assert cost_table(costs).rows[1] == ("single", "350", "2.50", "2.00 … 3.00", "")
    assert cost_table(costs).rows[0][4] == "1.00"


def test_sizes_are_shown_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main([str(write_comparison(tmp_path)), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "equal parameters within 5.00%" in shown
    assert "num_experts" in shown
    assert not (tmp_path / "runs").exists()
    assert main([str(tmp_path / "tiny.toml"), "--table", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planned"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.toml"], "nothing.toml: cannot be read"),
        (
            ["tiny.toml", "--seeds", "0,0"],
            "--seeds 0,0: give how many, such as 5, or different whole numbers",
        ),
        (["tiny.toml", "--seeds", "0"], "--seeds 0: give how many"),
        (["smoke", "--sweep", "learning_rate=1"], "write section.key=value,value"),
        (["smoke", "--sweep", "optim.lr=1e-4"], "did you mean optim.learning_rate?"),
        (["smoke", "--sweep", "optim.beta1=0.9,0.90"], "beta1=0.9 is given twice"),
        (["smoke", "--sweep", "optim.beta1=1", "--sweep", "optim.beta1=2"], "give each key once"),
        (["smoke", "--sweep", "optim.beta1=0.8", "optim.beta1=1"], "optim.beta1 is also swept"),
        (["tiny.toml", "--jobs", "0"], "--jobs 0 must be at least 1"),
        (["tiny.toml", "--restart", "dense"], "--restart dense: is not one of the arms"),
        (["tiny.toml", "model.d_modle=3"], "did you mean model.d_model?"),
    ],
)
def test_a_bad_request_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    write_comparison(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        main(words)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_and_called_again_it_ends_as_if_nothing_had_happened(tmp_path: Path):
    text = tmp_path / "text.jsonl"
    write_lines(text, [{"text": f"document {n}: " + "one two three " * 9} for n in range(60)])
    longer = TINY.replace("steps = 6", "steps = 200").replace("every = 2", "every = 10")
    words = [str(write_comparison(tmp_path, longer)), f"prepare.input=['{text}']"]
    words += ["--seeds", "1", "--json"]
    program = (
        "import sys; from moebius_science.compare_command import main; sys.exit(main(sys.argv[1:]))"
    )

    def begin(folder: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", program, *words, "--folder", str(tmp_path / folder)],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def checkpoints(arm: str) -> list[Path]:
        return list((tmp_path / "killed" / arm / "seed-0" / "checkpoints").glob("step_*"))

    killed = begin("killed")
    wait_for(lambda: checkpoints("moeut") or checkpoints("single"), timeout_s=300)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    folder = str(tmp_path / "killed")
    wait_for(lambda: not _processes_with(folder), timeout_s=100)  # its runs end with it
    results = {}
    for name in ("killed", "whole"):
        process = begin(name)
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        results[name] = json.loads(out)
    losses = {name: [run["loss"] for run in found["runs"]] for name, found in results.items()}
    assert losses["killed"] == losses["whole"]  # to the last bit
    assert len(losses["whole"]) == 2
    origins = (tmp_path / "killed").glob("*/seed-0/origin.json")
    assert sum(len(json.loads(origin.read_text())["starts"]) for origin in origins) > 2
    assert (tmp_path / "killed" / "tiny.png").read_bytes().startswith(b"\x89PNG")


def _processes_with(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found
