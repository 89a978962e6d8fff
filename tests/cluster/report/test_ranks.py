"""What every rank is doing: processes that carry a run's marks, and the files it writes."""

import io
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import wait_for
from rich.console import Console

from moebius.cluster.job import JobError, Journal, State
from moebius.cluster.liveness import beat
from moebius.cluster.nodes import processes
from moebius.cluster.report.live import View, render
from moebius.cluster.report.ranks import look_once
from moebius.cluster.watch.heartbeats import WatchedRanks, folder_of
from moebius.train.record.heartbeat import PAGE_BYTES, Heartbeat, page_of

RESOURCES = {
    "time": 1e9,
    "cpu_percent": 350.0,
    "cpus": 8,
    "memory_bytes": 20 << 30,
    "memory_total_bytes": 64 << 30,
    "received_bytes_per_s": 1e6,
    "sent_bytes_per_s": 2e6,
    "gpus": [
        {
            "gpu": gpu,
            "percent": 80 + 10 * gpu,
            "memory_bytes": 60 << 30,
            "memory_total_bytes": 80 << 30,
        }
        for gpu in (0, 1)
    ],
    "ranks": [
        {"rank": 0, "phase": "step", "step": 4, "cpu_percent": 97.5, "memory_bytes": 3 << 30}
    ],
}


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
        (node / "assignment.json").write_text(json.dumps(attempt))
    (tmp_path / "logs/g002/node0/rank1.log").write_text("x\n")
    newest = RESOURCES | {"time": time.time() - 5}
    lines = [RESOURCES | {"cpus": 1}, newest, {"time": "now"}, RESOURCES | {"gpus": [7]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "logs/g002/node0/resources.jsonl").write_text(text)
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
        "phase": "step",
        "step": 4,
        "age_s": None,
        "pid": None,
        "cpu_percent": 97.5,
        "memory_bytes": 3 << 30,
        "log_age_s": None,
    }
    assert here["pid"] == rank.pid
    assert here["cpu_percent"] >= 0
    assert here["memory_bytes"] > 1 << 20
    assert here["log_age_s"] >= 0
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    table = page.partition("<!-- top -->")[2].partition("<!-- end -->")[0]
    documented = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    [node] = record["nodes"]
    of_nodes = [f"nodes[].{key}" for key in node]
    assert documented == [
        *list(record)[:-1],
        *of_nodes,
        "ranks",
        *(f"ranks[].{key}" for key in here),
    ]
    assert (node["cpu_percent"], node["cpus"], node["gpus"][1]["percent"]) == (350.0, 8, 90)
    assert node["age_s"] >= 0


def drawn(run_dir: Path, width: int) -> list[str]:
    """The live view of a run with its nodes and ranks, line by line."""
    view = View(run_dir, ranks=look_once(run_dir))
    view.refresh()
    screen = Console(file=io.StringIO(), width=width)
    screen.print(render(view, width=width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def test_the_picture_of_one_look(run_dir):
    heading, *_, _, nodes, node0, _, ranks, rank0, rank1 = drawn(run_dir, 120)
    assert heading.split()[-4:] == ["RUNNING", "generation", "2", "eval"]
    assert nodes.split() == [
        "node",
        "address",
        "CPU",
        "memory",
        "GPU",
        "GPU",
        "memory",
        "network",
        "age",
    ]
    figures = "0 127.0.0.2 44 % of 8 20/64 GiB 85 % of 2 120/160 GiB 3 MB/s"
    assert node0.split()[:-2] == figures.split()
    assert ranks.split() == [
        "rank",
        "node",
        "pid",
        "phase",
        "step",
        "for",
        "CPU",
        "memory",
        "last",
        "wrote",
    ]
    assert rank0.split() == ["0", "0", "not", "here", "step", "4", "98", "%", "3,072", "MiB"]
    assert rank1.split()[:4] == ["1", "0", "not", "here"]


def test_heartbeats_of_this_machine_tell_phase_step_and_age(run_dir, monkeypatch):
    folder = folder_of(str(run_dir), 2, 0)
    ranks = WatchedRanks(folder, range(2))
    ranks.open()
    try:
        page = page_of(folder, 1)
        page.write_bytes(bytes(PAGE_BYTES))
        with open(page, "r+b") as file, mmap.mmap(file.fileno(), PAGE_BYTES) as memory:
            Heartbeat(memory).begin_step(7)
        elsewhere, here = look_once(run_dir)["ranks"]
    finally:
        ranks.close()
    assert (here["phase"], here["step"]) == ("compile", 7)
    assert here["age_s"] >= 0
    assert (elsewhere["phase"], elsewhere["step"], elsewhere["age_s"]) == ("step", 4, None)


def test_a_run_that_has_ended_has_no_ranks(run_dir):
    Journal(run_dir).append(State.SUCCEEDED, generation=2, reason="")
    assert look_once(run_dir)["ranks"] == []
    assert look_once(run_dir)["phase"] is None


def test_no_run(tmp_path):
    with pytest.raises(JobError, match="no job was started"):
        look_once(tmp_path)
