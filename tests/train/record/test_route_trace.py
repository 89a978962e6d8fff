"""Recorded routing: the run does not notice, files say what happened, damaged ones are refused."""

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import tiny_model
from parts import make_config
from small_model import MODEL
from trained import by_step, column, different, lines, newest_state, run_training
from world import run_ranks

from moebius.data_pipeline.read.loader import Loader
from moebius.model.routing import Routes
from moebius.simulation.recorded_routes import read_rank, recorded_steps
from moebius.train.config.run_config import (
    Config,
)
from moebius.train.record.route_tap import CallId, RoutedCall, tap
from moebius.train.record.route_trace import RecordedRank, StepTrace, write_rank

DROPOUT = MODEL.changed({"feed_forward.router.expert_dropout": 0.1})


def config_of(data: Path, **train: Any) -> Config:
    settings = {"eval_every": 2, "eval_rows": 6, **train}
    return make_config(data, model=DROPOUT, data__seq_len=24, mesh__ep=2, train=settings)


@pytest.mark.slow
def test_a_run_notices_neither_that_it_is_recorded_nor_that_steps_are_recomputed(
    data: Path, tmp_path: Path
) -> None:
    """A recomputed pass is heard once."""
    runs = {"plain": {}, "recorded": {"record_routing": 2}}
    runs |= {mode: {"record_routing": 2, "recompute": mode} for mode in ("selective", "full")}
    for name, settings in runs.items():
        config = config_of(data, **settings)
        assert run_ranks(run_training, 2, config, tmp_path / name) == ["finished"] * 2
        if name == "plain":
            continue
        plain, other = tmp_path / "plain", tmp_path / name
        for key in ("loss", "grad_norm", "regularisation", "expert_load"):
            assert column(plain, key) == column(other, key)  # floats go through JSON unharmed
        losses = [[line["loss"] for line in lines(folder, "eval")] for folder in (plain, other)]
        assert losses[0] == losses[1]
        assert different(newest_state(plain), newest_state(other)) == []
        check_against_the_log(other, config)
    assert not (tmp_path / "plain" / "routing").exists()


def check_against_the_log(run_dir: Path, config: Config) -> None:
    """Step 1 and every second: the loads of both ranks and both micro-batches are those of
    metrics.jsonl.
    """
    steps = recorded_steps(run_dir)
    assert list(steps) == [1, 2, 4]
    logged = by_step(run_dir)
    for step, files in steps.items():
        ranks = [read_rank(path) for path in files]
        assert [(found.step, found.rank, found.num_ranks, found.tokens) for found in ranks] == [
            (step, rank, 2, (48, 48)) for rank in range(2)
        ]
        check_tokens(config, ranks, step)
        for kind, key in (
            ("feed_forward", "expert_load"),
            ("value", "value_expert_load"),
            ("output", "output_expert_load"),
        ):
            for depth in range(1, 5):
                calls = [
                    call
                    for found in ranks
                    for call in found.calls
                    if (call.id.kind, call.id.depth) == (kind, depth)
                ]
                assert [call.id.micro_batch for call in calls] == [0, 1, 0, 1]
                load = np.bincount(torch.cat([call.routes.expert_N for call in calls]), minlength=8)
                assert load / load.sum() == pytest.approx(logged[step][key][depth - 1], abs=6e-6)


def check_tokens(config: Config, ranks: list[RecordedRank], step: int) -> None:
    """The recorded ids are the inputs of that step's batch, on every rank."""
    for found in ranks:
        with Loader(
            config.data,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            rank=found.rank,
            num_ranks=len(ranks),
            start_sample=(step - 1) * config.train.global_batch,
        ) as loader:
            inputs = next(loader).tokens[..., :-1]
        assert [ids.tolist() for ids in found.token_ids] == [
            each.flatten().tolist() for each in inputs
        ]
        assert found.document_ids == ()


# What is in a file --------------------------------------------------------------------------------


def record(name: str, folder: Path, **changes: Any) -> tuple[list[Any], RecordedRank]:
    """A model's own routes, and what a file says of them."""
    model = tiny_model(name, changes)
    tokens = torch.randint(61, (8, 12), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    trace = StepTrace(model, folder, step=1, every=7, rank=3, num_ranks=4)
    with trace.micro_batch(tokens), tap(model) as recorded:
        model(tokens)
    trace.save()
    [path] = (folder / "routing").iterdir()
    assert path.name == "step_00000001-rank_0003_of_0004.npz"
    return recorded, read_rank(path)


@pytest.mark.parametrize("name", ["moeut", "switch", "sut", "mh_moe", "gshard"])
def test_every_route_is_in_the_file(name: str, tmp_path: Path) -> None:
    tapped, found = record(name, tmp_path)
    assert (found.step, found.rank, found.num_ranks, found.tokens) == (1, 3, 4, (96,))
    assert len(tapped) == len(found.calls) > 0
    for call, read in zip(tapped, found.calls, strict=True):
        assert read.id == call.id
        assert (read.num_rows, read.width_in, read.width_out) == (
            call.num_rows,
            call.width_in,
            call.width_out,
        )
        assert_same_routes(read.routes, call.routes)


def assert_same_routes(ours: Routes, theirs: Routes) -> None:
    """Equal but for the gate weights, which no file has."""
    for name in ("source_N", "expert_N", "target_N"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("num_experts", "num_targets", "per_source", "per_target", "per_expert"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("name", ["mixture_of_tokens", "expert_choice", "soft_moe"])
def test_of_routes_with_known_counts_only_the_counts_are_kept(name: str, tmp_path: Path) -> None:
    tapped, found = record(name, tmp_path)
    [path] = (tmp_path / "routing").iterdir()
    with np.load(path) as file:
        assert [len(file[key]) for key in ("expert", "source", "target")] == [0, 0, 0]
    for call, read in zip(tapped, found.calls, strict=True):
        assert read.id == call.id
        assert read.routes.per_expert == call.routes.per_expert > 0
        assert torch.equal(read.routes.expert_N, call.routes.expert_N.sort().values)
        assert read.num_rows == len(read.routes.expert_N)


def test_depth_steps_are_those_of_the_schedule(tmp_path: Path) -> None:
    _, found = record("moeut_aabb", tmp_path)
    own = [call.id for call in found.calls if call.id.kind == "feed_forward"]
    assert [call_id.depth for call_id in own] == [1, 2, 3, 4]
    assert [call_id.layer.split(".")[1] for call_id in own] == [
        "0",
        "0",
        "1",
        "1",
    ]


def test_nothing_is_heard_outside(tmp_path: Path) -> None:
    model = tiny_model("moeut")
    unwanted = StepTrace(model, tmp_path, step=2, every=7, rank=0, num_ranks=1)
    with unwanted.micro_batch(torch.zeros(1, 4)):
        model(torch.zeros(1, 4, dtype=torch.int64))
    unwanted.save()
    wanted = StepTrace(model, tmp_path, step=7, every=7, rank=0, num_ranks=1)
    model(torch.zeros(1, 4, dtype=torch.int64))
    wanted.save()
    assert read_rank(recorded_steps(tmp_path)[7][0]).calls == ()
    assert list(recorded_steps(tmp_path)) == [7]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_route_costs_two_bytes_at_most(tmp_path: Path) -> None:
    _, found = record("moeut", tmp_path)
    [path] = (tmp_path / "routing").iterdir()
    routes = sum(len(call.routes.expert_N) for call in found.calls)
    meta = 250 * len(found.calls)
    assert path.stat().st_size < 2 * routes + meta


# Files that cannot be read, or written ------------------------------------------------------------


EXPERT_N = (0, 1, 2, 3, 0, 1)


def call(expert_N: Sequence[int] = EXPERT_N, **changes: Any) -> RoutedCall:
    """Three tokens through two experts each; changes are of the routes."""
    token_N = torch.arange(6) // 2
    count = len(expert_N)
    routes = Routes(
        token_N, torch.tensor(expert_N, dtype=torch.int64), torch.ones(count), token_N, 4, 3, 2, 2
    )
    return RoutedCall(
        CallId(1, 0, 1, "group.0.feed_forward.sparse"),
        dataclasses.replace(routes, **changes),
        num_rows=3,
        width_in=8,
        width_out=8,
    )


def rank_file(
    folder: Path, *calls: RoutedCall, step: int = 1, rank: int = 0, ranks: int = 1
) -> Path:
    return write_rank(folder, RecordedRank(step, rank, ranks, (3,), calls))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    listed = call(
        per_source=0,
        per_target=0,
        source_N=torch.tensor([0, 0, 1, 1, 2, 2]),
        target_N=torch.tensor([2, 2, 1, 1, 0, 0]),
    )
    many = call(num_experts=70_000, expert_N=(69_999, 0, 1, 2, 3, 4))
    found = read_rank(rank_file(tmp_path, call(), listed, many)).calls
    for read, written in zip(found, (call(), listed, many), strict=True):
        assert_same_routes(read.routes, written.routes)
        assert read.routes.weight_N.tolist() == [1.0] * 6
        assert dataclasses.replace(read, routes=written.routes) == written


def test_the_file_is_as_it_always_was(tmp_path: Path) -> None:
    """Older runs' recordings must be readable, and ours by their tools: keys, order and types."""
    with np.load(rank_file(tmp_path, call())) as file:
        meta = json.loads(file["meta"].tobytes())
        assert file["expert"].dtype == np.uint16
        assert file["expert"].tolist() == list(EXPERT_N)
        assert file["source"].dtype == file["target"].dtype == np.int32
        assert not len(file["source"]) + len(file["target"])
    [stored] = meta.pop("calls")
    assert meta == {"format": 1, "step": 1, "rank": 0, "ranks": 1, "tokens": [3]}
    assert list(stored.items()) == [
        ("micro_batch", 0),
        ("depth", 1),
        ("layer", "group.0.feed_forward.sparse"),
        ("kind", "feed_forward"),
        ("num_experts", 4),
        ("num_rows", 3),
        ("num_targets", 3),
        ("per_source", 2),
        ("per_target", 2),
        ("per_expert", 0),
        ("width_in", 8),
        ("width_out", 8),
        ("num_routes", 6),
    ]


def with_num_routes(path: Path, count: int) -> None:
    """Changes how many routes the file says that its call has."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file}
    meta = json.loads(arrays["meta"].tobytes())
    meta["calls"][0]["num_routes"] = count
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


ZEROS_N = torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "count", "problem"),
    [
        pytest.param(call(), 7, "expert numbers are missing", id="more than there are"),
        pytest.param(call(), 5, "numbers that belong to no call", id="fewer than there are"),
        pytest.param(call(), -1, "expert numbers are missing", id="negative"),
        pytest.param(call(per_expert=2), 7, "7 routes are not 2 per expert", id="slots"),
        pytest.param(call(num_experts=3), 6, "expert numbers", id="expert"),
        pytest.param(
            call(per_source=0, source_N=ZEROS_N + 3, target_N=ZEROS_N),
            6,
            "source numbers",
            id="source",
        ),
        pytest.param(
            call(per_source=0, source_N=ZEROS_N, target_N=ZEROS_N - 1),
            6,
            "target numbers",
            id="target",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    wrong: RoutedCall, count: int, problem: str, tmp_path: Path
) -> None:
    path = rank_file(tmp_path, wrong)
    with_num_routes(path, count)
    with pytest.raises(ValueError, match=problem):
        read_rank(path)


def test_a_damaged_file_is_never_misread_as_something_else(tmp_path: Path) -> None:
    path = rank_file(tmp_path, call())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no recorded routing"):
        read_rank(path)
    for place in range(0, len(whole), 23):  # the answer is a value or a ValueError
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(ValueError):
            read_rank(path)


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        (None, "no recorded routing"),
        (np.array([{"a": 1}], dtype=object), "no recorded routing"),
        (np.frombuffer(b'{"format": 99}', np.uint8), "not of format 1"),
        (np.frombuffer(b'{"format": 1}', np.uint8), "is damaged"),
    ],
)
def test_other_files_are_refused(meta: Any, problem: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {name: np.zeros(1) for name in ("expert", "source", "target")}
    np.savez(tmp_path / "other.npz", **(arrays if meta is None else arrays | {"meta": meta}))
    with pytest.raises(ValueError, match=problem):
        read_rank(tmp_path / "other.npz")


def test_steps_that_lack_a_rank_do_not_count(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no recorded routing; train with train.record_routing=N"
    ):
        recorded_steps(tmp_path)
    rank_file(tmp_path, call(), step=3, rank=1, ranks=2)
    with pytest.raises(
        ValueError, match="has no recorded routing: 1 steps lack the files of some ranks"
    ):
        recorded_steps(tmp_path)
    rank_file(tmp_path, call(), step=3, rank=0, ranks=2)
    rank_file(tmp_path, call(), step=4, rank=0, ranks=2)
    assert [path.name for path in recorded_steps(tmp_path)[3]] == [
        "step_00000003-rank_0000_of_0002.npz",
        "step_00000003-rank_0001_of_0002.npz",
    ]
    assert list(recorded_steps(tmp_path)) == [3]


def test_of_two_worlds_the_newest_counts(tmp_path: Path) -> None:
    two = [rank_file(tmp_path, call(), step=3, rank=rank, ranks=2) for rank in range(2)]
    one = rank_file(tmp_path, call(), step=3)
    os.utime(one, (1e9, 1e9))
    assert recorded_steps(tmp_path) == {3: two}
    os.utime(two[0], (1e8, 1e8))
    assert recorded_steps(tmp_path) == {3: [one]}


def test_a_run_goes_on_where_nothing_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "routing").write_text("a file in the folder's place")
    trace = StepTrace(tiny_model("moeut"), tmp_path, step=1, every=1, rank=0, num_ranks=1)
    with caplog.at_level(logging.WARNING):
        trace.save()
    assert "step 1: its routing could not be recorded" in caplog.text
