"""A comparison of two tiny arms for tests: its file, its arms and its runs."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moebius_science.compare.file import ComparisonFile, read_file
from moebius_science.compare.plan import Arm, PlannedRun, plan_arms, plan_runs, with_data

TINY = """
name = "tiny"
baseline = "moeut"
seeds = [0, 1, 2]
scaled = "model.feed_forward.num_experts"
tolerance = 0.05
steps = 6
evaluations = 2
jobs = 2

[common.model]
vocab_size = 257
d_model = 16
num_layers = 2
attention.num_heads = 2
attention.d_head = 8
feed_forward.d_expert = 8
feed_forward.router.top_k = 2

[common.data]
seq_len = 32

[common.prepare]
tokenizer = "bytes"
vocab_size = 257
validation_fraction = 0.2

[common.train]
global_batch = 4
micro_batch = 4
log_every = 1
eval_rows = 8

[common.checkpoint]
every = 2
keep_last = 1

[arms.moeut]
recipe = "moeut"
label = "MoEUT"

[arms.single]
recipe = "moeut_g1"
"""


def write_comparison(place: Path, text: str = TINY) -> Path:
    """Writes the file and its training text into a folder."""
    file = place / "tiny.toml"
    file.write_text(text, encoding="utf-8")
    return file


def planned(
    place: Path, text: str = TINY, overrides: Sequence[str] = ()
) -> tuple[ComparisonFile, list[Arm], list[PlannedRun]]:
    """Returns the plan that `moebius compare` makes of a file."""
    file = read_file(write_comparison(place, text))
    arms = plan_arms(file, overrides, origin="tiny.toml")
    runs = with_data(plan_runs(file, arms, place / "runs"), str(place / "data"))
    return file, arms, runs


def finish(run: PlannedRun, *, state: str = "SUCCEEDED", steps: int | None = None) -> None:
    """Writes the output of a run that made its steps, with a loss of 1."""
    run.folder.mkdir(parents=True, exist_ok=True)
    run.config.save(run.folder / "config.json")
    steps = run.config.train.steps if steps is None else steps
    lines = [
        {"kind": "train", "step": step, "time": float(step), "loss": 1.0, "step_s": 0.1}
        for step in range(1, steps + 1)
    ]
    write_lines(run.folder / "metrics.jsonl", lines)
    entry = {"time": 9.0, "state": state, "generation": 1, "reason": "", "details": {}}
    write_lines(run.folder / "journal.jsonl", [entry])


def write_lines(file: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Appends records to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def wait_for(happened: Callable[[], object], *, timeout_s: float = 30.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"nothing happened in {timeout_s:g} s"
        time.sleep(0.02)
