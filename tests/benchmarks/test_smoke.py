"""Every benchmark without a test file of its own runs on tiny sizes: what it measures may be noise
then, but it is broken by nothing unnoticed.
"""

import importlib
import itertools
import json
import pkgutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_corpus import sentences, write_jsonl
from world import run_ranks

import benchmarks
from benchmarks import (
    data_stages,
    dispatch,
    expert_parallel,
    gloo_table,
    head_loss,
    overhead,
    placement,
    recompute,
    step_operations,
    tokenise,
)
from moebius.distributed.dispatch.table import DISPATCHERS
from moebius.distributed.process.process import start_process
from moebius.evaluation.compare import peak_memory
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES

ALONE = ("mesh.ep=1", "mesh.dp_replicate=none", "job.num_nodes=1", "job.ranks_per_node=1")
TINY = ("model.d_model=16", "model.feed_forward.d_expert=8", "data.seq_len=8")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the benchmark of the test saves, by the name of its file; results/ stays as it is."""
    saved: dict[str, Any] = {}

    def save(name: str, found: dict[str, Any], **_: object) -> Path:
        saved[name] = json.loads(json.dumps(found))
        return Path(name)

    for module in (data_stages, head_loss, recompute, tokenise):
        monkeypatch.setattr(module, "save", save)
    return saved


def words(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])


def test_every_benchmark_can_be_imported() -> None:
    """Those for a GPU too, and those that are parts of others."""
    names = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert "benchmarks.gpu.ceilings" in names
    for name in names:
        importlib.import_module(name)


def test_head_loss(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    monkeypatch.setattr(head_loss, "SHAPES", {"cpu": ((32, 8, 64),)})
    monkeypatch.setattr(head_loss, "ROWS", {"cpu": (4, 16)})
    monkeypatch.setattr(head_loss, "keep_freed_memory", lambda: None)  # of the whole process
    monkeypatch.setattr(
        peak_memory.gc, "collect", lambda: 0
    )  # 0.4 s each among all that tests hold
    words(monkeypatch, "--rounds", "1", "--device", "cpu")
    head_loss.main()
    ways = figures["head_loss_cpu"]["ways"]
    assert {way["dtype"] for way in ways} == {"float32", "bfloat16"}
    assert {4, 16, None} < {way["rows"] for way in ways}
    assert sum(way["default"] for way in ways) == 2
    assert all(0 <= way["fastest_s"] <= way["median_s"] for way in ways)
    full, chunked = (
        next(way for way in ways if way["dtype"] == "float32" and way["rows"] == rows)
        for rows in (None, 4)
    )
    assert full["saved_bytes"] >= 4 * 32 * 64  # the logits wait for the backward pass
    assert chunked["saved_bytes"] < full["saved_bytes"] + 4 * (32 * 8 + 64 * 8 + 64)


def test_recompute(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    config = resolve("smoke", [*ALONE, *TINY], RECIPES)
    monkeypatch.setattr(recompute, "RECIPES", {"tiny": lambda: config})
    words(monkeypatch, "tiny", "--rounds", "1", "--no-compile")
    recompute.main()
    ways = figures["recompute_float32"]["ways"]
    assert [way["recompute"] for way in ways] == ["none", "selective", "full"]
    kept = [way["kept_bytes_per_token"] for way in ways]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[2] > 0


def test_tokenise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    monkeypatch.setattr(tokenise, "WORST_CHARS", 1000)
    monkeypatch.setattr(tokenise, "trained_sentencepiece", lambda texts, vocab_size: [])
    text = write_jsonl(tmp_path / "text.jsonl", sentences(0, 200))
    words(monkeypatch, "--input", str(text), "--vocab-size", "300", "--rounds", "1")
    tokenise.main()
    engines = {engine["engine"]: engine for engine in figures["tokenise"]["engines"]}
    assert engines["tokenizers"]["ids_equal"] is engines["tiktoken"]["ids_equal"] is True
    assert engines["tiktoken"]["bytes_per_token"] > engines["bytes"]["bytes_per_token"] > 0.9
    assert len(figures["tokenise"]["ten_million_characters"]) == 3 * 3


@pytest.mark.slow
def test_data_stages(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    measure = data_stages.index_figures
    monkeypatch.setattr(data_stages, "index_figures", lambda number: measure(number // 50))
    words(monkeypatch, "--megabytes", "0.5", "--runs", "1")
    data_stages.main()
    found = figures["data_stages"]
    rates = found["megabytes_per_s_of_one_core"]
    assert rates["all Gopher rules"]["documents"] < rates["length in characters"]["documents"]
    assert found["near_duplicate_index"]["documents"] == 10_000


def gloo_rows() -> list[gloo_table.Row]:
    gloo_table.SIZES, gloo_table.SERIES_S = (1024, 4096), 1e-4
    with start_process("cpu", timeout_s=20):
        return gloo_table.measure(1, torch.device("cpu"))


@pytest.mark.slow
def test_gloo_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, others = run_ranks(gloo_rows, 2)
    assert rows == others  # the slowest rank's time, on all
    every = set(itertools.product(gloo_table.OPERATIONS, (1024, 4096)))
    assert {(row["op"], row["bytes"]) for row in rows} == every
    assert all(row["world"] == 2 and row["seconds"] > 0 for row in rows)
    monkeypatch.setattr(gloo_table, "SIZES", (1024, 4096))
    gloo_table.show(rows)


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


def test_step_operations() -> None:
    operations = step_operations.Operations()
    x = torch.ones(3, requires_grad=True)
    with operations:
        total = (x.view(1, 3) * 2).exp().sum()
        total.backward()
        operations.count("read", "host read")
    kinds = step_operations.summed(step_operations.as_rows(operations.counts), "kind")
    assert kinds.pop("view") >= 2
    assert kinds == {"arithmetic": 5, "fill": 1, "host read": 1}  # three forward, two backward
    assert step_operations.launches(operations.counts) == 7
    parts = map(step_operations.part_of, ("model/routers/sigmoid.py:choose", "train/loop.py:step"))
    assert [*parts] == ["routers", "AdamW"]
    assert step_operations.launched_at(sys._getframe()) == ("", False)  # no line of the library


def test_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judging: experts that are hot for long are found, and packed apart."""
    monkeypatch.setattr(placement, "DEGREES", (2,))
    monkeypatch.setattr(placement, "REPLICAS", (0,))
    monkeypatch.setattr(placement, "WINDOWS", (5,))
    load_E = np.array([4.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) / 13
    bank = np.tile(load_E, (106, 2, 1))
    rows = [
        {"model": model, "bank": "feed_forward", **row}
        for model in placement.MODELS
        for row in placement.judge_all([bank])
    ]
    assert {round(row["before"], 9) for row in rows} == {round(9 / 6.5, 9)}
    assert all(row["after"] < 1.1 for row in rows)
    placement.show(rows, [])
    placement.draw(rows, tmp_path / "placement.png")
    assert (tmp_path / "placement.png").stat().st_size > 5000


def test_overheads_watcher_and_verdict() -> None:
    watcher = overhead.MemoryWatcher(0.01)
    watcher.start()
    deadline = time.monotonic() + 20
    while not watcher.peak_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    watcher.stop()
    assert watcher.peak_bytes > 2**20
    mib = 2**20
    watcher._samples = {
        (1, "grows"): [(float(second), (8 + second) * mib) for second in range(8)],
        (2, "seen once"): [(7.0, 5 * mib)],
    }
    grows = {"process": "grows", "pid": 1, "early_mib": 10.5, "late_mib": 14.5}
    assert watcher.growth() == [grows]
    del watcher._samples[1, "grows"]
    once = {"process": "seen once", "pid": 2, "early_mib": 5.0, "late_mib": 5.0}
    assert watcher.growth() == [once]
    met = {"ratio_median": 1.04, "data_wait_s_per_step": 0.0, "peak_pss_gib": 3.0}
    grown = {"steps": 5, "growth": [{"early_mib": 10.0, "late_mib": 19.0}]}
    assert overhead.print_report(met)
    assert not overhead.print_report(met | {"ratio_median": 1.06})
    assert not overhead.print_report(met | {"long_run": grown})
