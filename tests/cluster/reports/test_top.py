"""What every rank is doing: processes that carry a run's marks, and the files it writes."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import wait_for
from rich.console import Console

from moebius.cluster import processes
from moebius.cluster.job import JobError, Journal, State, beat
from moebius.cluster.reports.top import look_once, render, show_top


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of one node and two ranks in its second generation, without its processes."""
    for state in (State.SUBMITTED, State.RUNNING):
        Journal(tmp_path).append(state, generation=2, reason="", details={"name": "a [b]"})
    beat(tmp_path)
    (tmp_path / "generation").write_text("2")
    (tmp_path / "config.json").write_text('{"train": {"steps": 10}}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 3, "loss": 1.0, "tokens_per_s": 2000.0}\n{"kind": "eval", "step": 3, "loss": 1.0}\n'
    )
    for generation, address in ((1, "127.0.0.9"), (2, "127.0.0.2")):
        node = tmp_path / "logs" / f"g{generation:03d}" / "node0"
        node.mkdir(parents=True)
        attempt = {"launch": {"ranks_per_node": 2}, "node_rank": 0, "address": address}
        (node / "attempt.json").write_text(json.dumps(attempt))
    (tmp_path / "logs/g002/node0/rank1.log").write_text("x\n")
    return tmp_path


def test_ranks_here_are_shown_with_what_they_use(run_dir):
    marks = {processes.MARK: str(run_dir), processes.MARK_GENERATION: "2", "RANK": "1"}
    code = "import time; time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", code], env=os.environ | marks)
    try:
        wait_for(lambda: processes.find(str(run_dir)), what="the process to be marked")
        record = look_once(run_dir)
    finally:
        rank.kill()
        rank.wait()
    assert (record["state"], record["generation"], record["step"]) == ("RUNNING", 2, 3)
    assert record["phase"] == "eval"
    absent, here = record["ranks"]
    assert absent == {
        "node": 0,
        "rank": 0,
        "address": "127.0.0.2",
        "pid": None,
        "cpu_percent": None,
        "memory_bytes": None,
        "log_age_s": None,
    }
    assert here["pid"] == rank.pid
    assert here["cpu_percent"] >= 0
    assert here["memory_bytes"] > 1 << 20
    assert here["log_age_s"] >= 0
    page = (Path(__file__).parents[3] / "docs" / "jobs.md").read_text()
    table = page.partition("<!-- top -->")[2].partition("<!-- end -->")[0]
    documented = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert documented == [*record, *(f"ranks[].{key}" for key in here)]


def test_the_picture_of_one_look(run_dir):
    screen = Console(file=io.StringIO(), width=120)
    screen.print(render(look_once(run_dir)))
    assert isinstance(screen.file, io.StringIO)
    heading, header, rank0, rank1 = screen.file.getvalue().splitlines()
    assert heading.split() == [
        "a",
        "[b]",
        "RUNNING",
        "generation",
        "2",
        "step",
        "3/10",
        "2,000",
        "tokens/s",
        "eval",
    ]
    assert header.split() == ["node", "address", "rank", "pid", "CPU", "memory", "last", "wrote"]
    assert rank0.split() == ["0", "127.0.0.2", "0", "not", "here"]
    assert rank1.split()[:5] == ["0", "127.0.0.2", "1", "not", "here"]


def test_a_run_that_has_ended_has_no_ranks(run_dir):
    Journal(run_dir).append(State.SUCCEEDED, generation=2, reason="")
    assert look_once(run_dir)["ranks"] == []
    assert look_once(run_dir)["phase"] is None
    screen = Console(file=io.StringIO(), force_terminal=True)
    assert show_top(run_dir, screen, once=False).state is State.SUCCEEDED


def test_no_run(tmp_path):
    with pytest.raises(JobError, match="no job was ever started"):
        look_once(tmp_path)
