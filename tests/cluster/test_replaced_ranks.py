"""Ranks that die while the others keep their processes: real jobs, bit for bit those that nobody
disturbed.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import assert_nothing_left, rank_pids, wait_for
from rich.console import Console
from small_corpus import data_of_words, shards_of_words
from small_model import TINY

from moebius.cluster.job import (
    Journal,
    JournalEntry,
    Launch,
    State,
    begin_submission,
    read_status,
)
from moebius.cluster.local import train_here
from moebius.cluster.nodes import processes
from moebius.cluster.nodes.agent import Node
from moebius.cluster.nodes.provider import Capacity, NodeHandle, ThisMachine
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.train.config.run_config import Config
from moebius.train.record.run_folder import open_run
from tests.chaos.job_under_fire import curve, weights_hash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not processes.IS_LINUX, reason="elsewhere nothing is forked"),
]

STEPS = 16
Found = tuple[dict[int, Any], str]
Hunter = Callable[["Hunt"], None]


class Hunt:
    """Looks at a run while it goes on, and kills what belongs to it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def await_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        wait_for(
            lambda: metrics.exists() and max(curve(self.run_dir), default=0) >= step,
            what=f"step {step}",
            timeout_s=120.0,
        )

    def await_replacements(self, number: int) -> None:
        wait_for(lambda: len(replacements(self.run_dir)) == number, what="a replacement")

    def kill(self, rank: int, *, not_pid: int = 0) -> int:
        """Kills the process of a rank that is another than `not_pid`; returns its number."""
        pid = wait_for(
            lambda: (found := rank_pids(self.run_dir).get(rank)) != not_pid and found,
            what=f"rank {rank}",
        )
        os.kill(pid, signal.SIGKILL)
        return pid


def replacements(run_dir: Path) -> list[JournalEntry]:
    """The journal's lines about ranks that were replaced in place."""
    found = [entry for entry in Journal(run_dir).entries() if "in_place" in entry.details]
    return [entry for entry in found if entry.state is State.RUNNING]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("data"), 60)


def config_of(shards: Path, mesh: dict[str, Any], **job: Any) -> Config:
    ranks = max(1, mesh.get("ep", 1)) * mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    return Config.model_validate(
        {
            "model": TINY,
            "data": data_of_words(shards, seq_len=16, server="off"),
            "checkpoint": {"every": 4},
            "mesh": mesh,
            "train": {
                "steps": STEPS,
                "global_batch": 8,
                "micro_batch": 1,
                "log_every": 1,
                "eval_every": 5,
                "eval_rows": 4,
                "device": "cpu",
            },
            "job": {"ranks_per_node": ranks, **job},
        }
    )


def run(config: Config, run_dir: Path, hunter: Hunter | None = None) -> Found:
    """Trains, with a hunter beside it; returns the curve and the hash of the weights."""
    failed: list[BaseException] = []

    def hunt() -> None:
        assert hunter is not None
        try:
            hunter(Hunt(run_dir))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=hunt if hunter else lambda: None)
    thread.start()
    status = train_here(config, run_dir, console=Console(quiet=True))
    thread.join()
    assert not failed, failed
    assert status.state is State.SUCCEEDED
    assert_nothing_left(run_dir)
    return curve(run_dir), weights_hash(run_dir)


def in_place(shards: Path, mesh: dict[str, Any], every: int = 2) -> Config:
    return config_of(shards, mesh, in_place=True, snapshot_every=every)


def lines_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def two_one_after_another(hunt: Hunt) -> None:
    hunt.await_step(3)
    hunt.kill(1)
    hunt.await_replacements(1)
    hunt.await_step(8)
    hunt.kill(0)
    hunt.await_replacements(2)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"dp_replicate": 2}, id="replicas"),
        pytest.param({"ep": 2}, id="experts that nobody else has"),
        pytest.param(
            {"ep": 2, "dp_replicate": 2, "rebalance_every": 3, "replicas": 1},
            id="experts that move",
        ),
    ],
)
def test_two_ranks_one_after_another(mesh, shards, tmp_path):
    """The second is rank 0. No generation is started, and no step is lost beyond a snapshot."""
    plain = run(config_of(shards, mesh), tmp_path / "plain")
    run_dir = tmp_path / "hit"
    assert run(in_place(shards, mesh), run_dir, two_one_after_another) == plain
    first, second = replacements(run_dir)
    assert (first.details["in_place"]["ranks"], second.details["in_place"]["ranks"]) == ([1], [0])
    assert first.generation == second.generation == 1
    told = lines_of(run_dir, "in_place")
    assert [line["restored_from"] for line in told] == ["memory", "memory"]
    assert len(lines_of(run_dir, "start")) == 1
    # of each death at most the steps since the snapshot, and the one that was being made
    assert len(lines_of(run_dir, "train")) <= STEPS + 2 * 2
    log = (run_dir / "logs/g001/node0/rank1.log").read_text()
    assert "takes the place of rank 1, which has died" in log


class TwoNodes(ThisMachine):
    """Provides two nodes that are this machine both."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.nodes = [Node(launch=launch), Node(launch=launch)]

    def capacity(self) -> Capacity:
        return Capacity(2, 2)

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        assert num_nodes == 2
        return self.nodes

    def release(self) -> None:
        super().release()
        for node in self.nodes:
            node.end()


def test_ranks_of_two_nodes_die_one_after_another(shards, tmp_path):
    """Nobody on the node has the experts of a dead rank: they come from the other node."""
    mesh = {"ep": 2}
    plain = run(config_of(shards, mesh), tmp_path / "plain")
    run_dir = tmp_path / "hit"
    config = in_place(shards, mesh)
    job = config.job.model_copy(update={"num_nodes": 2, "ranks_per_node": 1})
    open_run(config.model_copy(update={"job": job}), run_dir)
    launch = Launch(str(run_dir), num_nodes=2, in_place=True)
    hunt = threading.Thread(target=two_one_after_another, args=(Hunt(run_dir),), daemon=True)
    hunt.start()
    begin_submission(launch)
    supervise(launch, TwoNodes(launch))
    hunt.join()
    assert_nothing_left(run_dir)
    assert (curve(run_dir), weights_hash(run_dir)) == plain
    assert [entry.details["in_place"]["ranks"] for entry in replacements(run_dir)] == [[1], [0]]
    status = read_status(run_dir)
    assert (status.generation, status.restarts, status.replaced_in_place) == (1, 0, 2)


def test_a_death_while_a_checkpoint_is_written(shards, tmp_path):
    """What was being written is abandoned, or committed whole; the next is written by all."""
    mesh = {"dp_replicate": 2}
    config = in_place(shards, mesh)
    often = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every": 1})}
    )
    plain = run(config_of(shards, mesh), tmp_path / "plain")

    def hunter(hunt: Hunt) -> None:
        hunt.await_step(2)
        folder = hunt.run_dir / "checkpoints"
        wait_for(lambda: list(folder.glob("step_*.g*.tmp")), what="a checkpoint's files")
        hunt.kill(1)
        hunt.await_replacements(1)

    assert run(often, tmp_path / "hit", hunter) == plain
    assert not list((tmp_path / "hit/checkpoints").glob("*.tmp"))
    saved = [line["step"] for line in lines_of(tmp_path / "hit", "checkpoint") if not line["error"]]
    assert saved[-1] == STEPS


def test_a_death_during_the_recovery_is_a_new_generation(shards, tmp_path):
    mesh = {"dp_replicate": 2}
    plain = run(config_of(shards, mesh), tmp_path / "plain")

    def hunter(hunt: Hunt) -> None:
        hunt.await_step(5)
        dead = hunt.kill(1)
        hunt.kill(1, not_pid=dead)  # the spare, as soon as it says which rank it is

    run_dir = tmp_path / "hit"
    assert run(in_place(shards, mesh), run_dir, hunter) == plain
    recovering = [e for e in Journal(run_dir).entries() if e.state is State.RECOVERING]
    assert [e.generation for e in Journal(run_dir).entries()][-1] == 2
    assert "in_place" in recovering[0].details
    assert recovering[1].details["not_in_place"] == "rank 1 was not among its steps"


def test_sharded_weights_are_a_new_generation(shards, tmp_path):
    mesh = {"dp_shard": 2, "sharding": "fsdp"}
    plain = run(config_of(shards, mesh), tmp_path / "plain")

    def hunter(hunt: Hunt) -> None:
        hunt.await_step(5)
        hunt.kill(1)

    run_dir = tmp_path / "hit"
    assert run(in_place(shards, mesh), run_dir, hunter) == plain
    [recovering] = [e for e in Journal(run_dir).entries() if e.state is State.RECOVERING]
    assert recovering.details["not_in_place"] == "mesh.sharding=fsdp keeps its process groups"
    assert [e.generation for e in Journal(run_dir).entries()][-1] == 2
