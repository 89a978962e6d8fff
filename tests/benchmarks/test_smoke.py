"""Benchmarks run on tiny sizes. Their figures are noise then, but nothing breaks unnoticed."""

import argparse
import importlib
import itertools
import json
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import run_ranks

import benchmarks
from benchmarks import dispatch, expert_parallel, gloo_table, muon
from benchmarks.startup import ROOT
from moebius.distributed.dispatch.table import DISPATCHERS
from moebius.distributed.process.process import start_process


def test_every_benchmark_can_be_imported() -> None:
    """Those for a GPU too, and those that are parts of others."""
    names = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert "benchmarks.gpu.ceilings" in names
    for name in names:
        importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the device")
@pytest.mark.skipif("+cpu" not in torch.__version__, reason="torch has a device of its own")
def test_launches_and_the_host_s_time(tmp_path: Path) -> None:
    words = ["--recipes", "dense_44m", "--steps", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks.host", *words], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "host_step.json").read_text())
    assert found["host_ms"]["dense_44m"]["least"] > 0
    counts = found["launches"]["dense_44m"]
    assert set(counts) == {"unlogged", "logged"}
    assert counts["unlogged"]["triton"]["_add_norm"] > 0
    assert counts["unlogged"]["torch"]["model/head_loss.py"] > 0


def gloo_rows() -> list[gloo_table.Row]:
    gloo_table.SIZES, gloo_table.SERIES_S = (1024, 4096), 1e-4
    with start_process("cpu", timeout_s=20):
        return gloo_table.measure(1, torch.device("cpu"))


@pytest.mark.slow
def test_gloo_table() -> None:
    rows, others = run_ranks(gloo_rows, 2)
    assert rows == others  # the slowest rank's time, on all
    found = {(row["op"], row["bytes"]) for row in rows}
    assert found == set(itertools.product(gloo_table.OPERATIONS, (1024, 4096)))
    assert all(row["world"] == 2 and row["seconds"] > 0 for row in rows)


def dispatch_points() -> list[dict[str, Any]]:
    with start_process("cpu", timeout_s=20) as process, torch.no_grad():
        return [
            dispatch.time_point(
                dispatch.Point(dist.get_world_size(), 16, 8, 2, name), process, 1e-3
            )
            for name, entry in DISPATCHERS.items()
            if not entry.needs_nodes
        ]


@pytest.mark.slow
def test_dispatch() -> None:
    points, _ = run_ranks(dispatch_points, 2)
    by_name = {point["dispatcher"]: point for point in points}
    sent = {name: point["rows_sent"] for name, point in by_name.items()}
    assert sent["alltoall"] == 2 * 16 * 2  # a row for every route
    assert sent["dedup"] == by_name["dedup"]["distinct_destinations"] < sent["alltoall"]
    assert all(point["passes"] >= dispatch.FEWEST for point in points)
    by_name["symmetric"]["ratio"] = 0.5  # how long it takes here is nobody's promise
    assert dispatch.print_report(points)
    by_name["symmetric"]["ratio"] = 1.5
    assert not dispatch.print_report(points)
    by_name["symmetric"]["ratio"] = 0.5
    by_name["dedup"]["rows_sent"] += 1
    assert not dispatch.print_report(points)


@pytest.mark.slow
def test_muon() -> None:
    """Of cut matrices the owner collects the momentum and returns the update, 4 bytes a weight each."""
    sizes = {"recipe": "smoke", "sequences": 4, "seq_len": 16, "rounds": 2, "arm": "muon"}
    found = muon.launch("FSDP 4", argparse.Namespace(**sizes))
    dense = 2 * 2 * 128 * 128  # queries and keys of two layers
    assert found["bytes_sent"] == 2 * (3 / 4) * 4 * dense / 4  # experts lie whole on a rank
    assert found["ratio"]["median"] > 0
    found = muon.launch("1 rank", argparse.Namespace(**sizes | {"arm": "ema"}))
    assert found["ratio"]["median"] > 0


def turns_of_two() -> dict[str, list[expert_parallel.Turn]]:
    ways = expert_parallel.ways_of([1, 2], ["dedup", "hierarchical"])
    with start_process("cpu", timeout_s=60) as process, tempfile.TemporaryDirectory() as folder:
        return expert_parallel.by_turns(ways, process, Path(folder), rounds=2, steps=1)


@pytest.mark.slow
def test_expert_parallel() -> None:
    turns, others = run_ranks(turns_of_two, 2)
    assert turns == others  # the slowest rank's time and the sums over ranks, on all
    alone = turns["data parallelism"]
    assert [len(of) for of in turns.values()] == [2, 2]  # two nodes want more than two ranks
    assert all(turn.processor_s > 0 and turn.voluntary > 0 for of in turns.values() for turn in of)
    found = {name: expert_parallel.summary(of, alone) for name, of in turns.items()}
    assert found["data parallelism"]["processor"] == {"median": 1, "lower": 1, "upper": 1}
    found["EP 2 dedup"]["processor"]["median"], found["EP 2 dedup"]["wall"]["median"] = 1.2, 1.2
    assert expert_parallel.show(found, 2) == ["processor"]
    assert expert_parallel.show(found, 4) == []  # nothing has EP on all of them


STARTS = """
import json, sys
from pathlib import Path
from benchmarks.startup import ROOT, cases, measure, write_run
measured = {case.name: case for case in cases(write_run(Path(sys.argv[1]) / "run", 1000))}
names = ("python", "moebius status", "moebius logs", "moebius stop", "moebius watch")
print(json.dumps({name: vars(measure(measured[name], ROOT.parent)) for name in names}))
assert "torch" not in sys.modules, "its memory would be counted as that of what is measured"
"""


def test_every_command_starts(tmp_path: Path) -> None:
    asked = subprocess.check_output([sys.executable, "-c", STARTS, str(tmp_path)], cwd=ROOT)
    for name, start in json.loads(asked).items():
        assert 0 < start["processor_s"] < 60, name
        assert 5 < start["peak_mib"] < 100, name  # torch alone takes more
