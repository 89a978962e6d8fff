"""Tests real node losses: raylets of a simulated cluster are killed with everything below them.

All tests share one cluster; each leaves at least two live nodes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import stuck
from jobs import (
    assert_nothing_left,
    begin_standing,
    curve,
    entries_of,
    fake_launch,
    metrics,
    rank_pids,
    standing_cluster,
    undisturbed,
    used_nodes,
    wait_for,
    wait_for_step,
)
from tiny_job import TINY_JOB

from moebius.cluster.job import Launch, State, read_status
from moebius.cluster.launch import make_launch
from moebius.cluster.nodes import processes
from moebius.cluster.places.standing import StandingCluster, cluster_at
from moebius.cluster.stop import stop
from moebius.cluster.supervise.placing import request_scale
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.read.loader import Loader
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data

pytestmark = pytest.mark.slow
STEPS = 100_000  # more than any test waits for
SETTINGS = (
    *TINY_JOB,
    "data.seq_len=16",
    "train.steps=6000",
    "train.global_batch=4",
    "checkpoint.every=20",
    "mesh.ep=2",
    "mesh.dp_replicate=none",
    "mesh.rebalance_every=0",
    "mesh.replicas=0",
    "job.num_nodes=2",
    "job.ranks_per_node=1",
    "job.min_nodes=1",
    "job.wait_for_node_s=5.0",
    "job.max_restarts=0",
)


@pytest.fixture(scope="module")
def standing(tmp_path_factory) -> Iterator[StandingCluster]:
    """Starts two simulated nodes; tests add more."""
    with standing_cluster(tmp_path_factory.mktemp("known"), 2, cpus=2) as made:
        yield made


def plain_launch(run_dir: Path, **values) -> Launch:
    """Returns a job whose ranks need no torch and compute the same on any number of nodes."""
    options = ("plain=1", f"steps={STEPS}", "step_s=0.02", "every=5")
    values = {"num_nodes": 2, "place_timeout_s": 60.0, "max_restarts": 0} | values
    return fake_launch(run_dir, *options, **values)


def node_of(run_dir: Path, rank: int) -> int:
    """Returns the number of the simulated node of a rank in the first generation."""
    path = run_dir / "logs" / "g001" / f"node{rank}" / "assignment.json"
    return int(json.loads(path.read_text())["address"].rpartition(".")[2]) - 2


def kill_one(cluster: StandingCluster, run_dir: Path) -> int:
    """Kills a node of the job other than the cluster's head."""
    number = used_nodes(run_dir, read_status(run_dir).generation)[-1]
    assert number != 0
    cluster.ask("kill-node", node=number)
    return number


def wait_for_generation(run_dir: Path, num_nodes: int, *, after: int) -> int:
    """Waits until a generation after `after` makes steps on `num_nodes` nodes; returns its number."""

    def found() -> int | None:
        started = {
            entry.generation: entry.details["num_nodes"]
            for entry in entries_of(run_dir, State.STARTING)
        }
        running = [entry.generation for entry in entries_of(run_dir, State.RUNNING)]
        fitting = [g for g in running if g > after and started[g] == num_nodes]
        return fitting[-1] if fitting else None

    return wait_for(found, timeout_s=150, what=f"{num_nodes} node(s) after generation {after}")


def end_well(run_dir: Path) -> None:
    """Stops the job, and checks that its curve is the undisturbed one."""
    status = stop(run_dir, timeout_s=150)
    assert status.state is State.STOPPED, status.reason
    assert f"stopped at step {status.step}, with a checkpoint" in status.reason
    assert status.step is not None
    assert curve(run_dir) == pytest.approx(undisturbed(1, status.step))
    assert_nothing_left(run_dir)


@pytest.mark.fault("F7")
def test_f7_no_spare_it_goes_on_with_fewer_and_takes_back_the_others(standing, tmp_path):
    run_dir = begin_standing(plain_launch(tmp_path, min_nodes=1, wait_for_node_s=5.0))
    wait_for_step(run_dir, 10)
    kill_one(standing, run_dir)
    smaller = wait_for_generation(run_dir, 1, after=1)
    before = read_status(run_dir).step
    standing.ask("add-node")
    larger = wait_for_generation(run_dir, 2, after=smaller)
    request_scale(run_dir, 1)
    wait_for_generation(run_dir, 1, after=larger)
    end_well(run_dir)
    [lost] = [e for e in entries_of(run_dir, State.RECOVERING) if "root_cause" in e.details]
    assert "was lost: its agent actor died" in lost.reason
    assert lost.details["charged_to"] == "infrastructure"
    assert "on 1 node(s) instead of 2" in next(
        e.reason for e in entries_of(run_dir, State.STARTING) if e.generation == smaller
    )
    wished, paused, asked, _ = [e.reason for e in entries_of(run_dir, State.RESIZING)]
    assert wished.startswith("2 node(s) are available, and the job runs on 1 of 2")
    assert paused.startswith("paused at step ")
    assert asked.startswith("1 node(s) were requested, and the job runs on 2")
    assert larger == smaller + 1, "no generation failed on the way"
    first = next(
        e.details["first_step"]
        for e in entries_of(run_dir, State.RUNNING)
        if e.generation == larger
    )
    assert before is not None
    assert first > before, "no step was made twice"


@pytest.mark.fault("F6", "F8")
def test_f6_a_spare_takes_the_place_and_f8_without_one_the_job_waits(standing, tmp_path):
    standing.ask("add-node")
    run_dir = begin_standing(plain_launch(tmp_path, wait_for_node_s=2.0))
    wait_for_step(run_dir, 10)
    dead = kill_one(standing, run_dir)
    second = wait_for_generation(run_dir, 2, after=1)
    assert dead not in used_nodes(run_dir, second)
    kill_one(standing, run_dir)
    wait_for(
        lambda: "missing since" in (status := read_status(run_dir)).reason and status,
        what="the reason",
    )
    status = read_status(run_dir)
    assert status.state is State.PLACING
    assert "1 node(s) missing since" in status.reason
    assert "it needs at least 2" in status.reason
    standing.ask("add-node")
    wait_for_generation(run_dir, 2, after=second)
    end_well(run_dir)
    lost = [e for e in entries_of(run_dir, State.RECOVERING) if "root_cause" in e.details]
    assert {e.details["charged_to"] for e in lost} == {"infrastructure"}
    assert all("was lost: its agent actor died" in e.reason for e in lost)
    assert len(lost) == 2


@pytest.mark.fault("F26")
@pytest.mark.nightly
@pytest.mark.skipif("stuck.why_not()", reason="no process can be made to hang here")
def test_f26_a_node_with_a_rank_that_cannot_be_killed_is_left_out(standing, tmp_path):
    """Rank 1 hangs in a file system in state D; then rank 0 is killed."""
    standing.ask("add-node")
    launch = plain_launch(tmp_path, max_restarts=1, place_timeout_s=200.0)
    launch = replace(launch, command=(*launch.command, "fail=1:*:1:stuck"))
    run_dir = begin_standing(launch)
    try:
        wait_for((tmp_path / "hung.server").exists, what="the hang")
        stuck_on = node_of(run_dir, 1)
        processes.kill(rank_pids(run_dir)[0])
        second = wait_for_generation(run_dir, 2, after=1)
        assert stuck_on not in used_nodes(run_dir, second)
    finally:
        stuck.release(tmp_path / "hung")
    end_well(run_dir)
    [told] = [e for e in entries_of(run_dir, State.RECOVERING) if "SIGKILL does not" in e.reason]
    assert "(rank 1 of generation 1), state D (uninterruptible)" in told.reason
    assert "this job no longer uses the node" in told.reason
    assert told.details["charged_to"] == "infrastructure"


@pytest.mark.nightly
def test_f21_a_node_that_will_be_preempted_is_left_at_a_step_boundary(standing, tmp_path):
    standing.ask("add-node")
    run_dir = begin_standing(plain_launch(tmp_path, max_node_losses=0))
    wait_for_step(run_dir, 10)
    address = f"127.0.0.{used_nodes(run_dir, 1)[-1] + 2}"
    with cluster_at("simulated") as ray:
        [node_id] = [
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and node["NodeManagerAddress"] == address
        ]
        drain = [Path(sys.executable).with_name("ray"), "drain-node", "--node-id", node_id]
        drain += ["--address", standing.address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        drain += ["--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        subprocess.run(drain, check=True, capture_output=True, timeout=120)
    second = wait_for_generation(run_dir, 2, after=1)
    end_well(run_dir)
    assert address not in [f"127.0.0.{number + 2}" for number in used_nodes(run_dir, second)]
    asked, _ = [e.reason for e in entries_of(run_dir, State.RESIZING)]
    assert asked.startswith(f"the cluster is draining {address}")
    assert entries_of(run_dir, State.RECOVERING) == []


@pytest.mark.fault("F7")
@pytest.mark.nightly
def test_f7_the_samples_are_the_same_on_any_number_of_nodes(standing, tmp_path):
    """The training loop itself, on two ranks that share the experts, then one, then two."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} and {n * n % 9973} are numbers" for n in range(40_000)))
    config = resolve("smoke", [*SETTINGS, f"prepare.input=['{text}']"], RECIPES)
    config = place_data(config, tmp_path)
    prepare(config.prepare, config.data.directory)
    run_dir = tmp_path / "run"
    open_run(config, run_dir)
    with cluster_at("simulated"):
        launch = make_launch(config, run_dir, address="simulated")
    begin_standing(launch)
    wait_for_step(run_dir, 25)
    kill_one(standing, run_dir)
    smaller = wait_for_generation(run_dir, 1, after=1)
    standing.ask("add-node")
    wait_for_generation(run_dir, 2, after=smaller)
    status = stop(run_dir, timeout_s=150)
    assert status.state is State.STOPPED, status.reason
    [words] = [e.reason for e in entries_of(run_dir, State.STARTING) if e.generation == smaller]
    assert words == "starting 1 rank(s) on 1 node(s) instead of 2, mesh.ep=1"
    assert_nothing_left(run_dir)
    assert [line["world_size"] for line in metrics(run_dir, "start")] == [2, 1, 2]
    digests = {line["step"]: line["digest"] for line in metrics(run_dir, "train")}
    assert list(digests) == list(range(1, len(digests) + 1))
    assert digests == dict(enumerate(undisturbed_digests(config, len(digests)), start=1))


def undisturbed_digests(config: Config, steps: int) -> Iterator[int]:
    """Yields what one undisturbed rank reads."""
    loader = Loader(config.data, global_batch=4, micro_batch=2, rank=0, num_ranks=1, start_sample=0)
    with loader:
        for _ in range(steps):
            yield next(loader).digest % 2**31


SUBMIT = """
import sys
from pathlib import Path
from moebius.cluster.submit import submit
from moebius.train.config.run_config import Config
run_dir, *command = sys.argv[1:]
config = Config.load(Path(run_dir).parent / "asked.json")
submit(config, Path(run_dir), address="simulated", command=command)
"""


@pytest.mark.fault("F11")
def test_f11_the_command_that_watches_is_killed_and_the_job_goes_on(standing, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 2000)
    config = resolve("smoke", [*SETTINGS, f"prepare.input=['{text}']"], RECIPES)
    place_data(config, tmp_path).save(tmp_path / "asked.json")
    run_dir = tmp_path / "run"
    command = list(plain_launch(run_dir).command)
    watcher = subprocess.Popen(
        [sys.executable, "-c", SUBMIT, str(run_dir), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((run_dir / "metrics.jsonl").exists, timeout_s=150, what="the first step")
        wait_for_step(run_dir, 3)
    finally:
        watcher.kill()
        watcher.wait()
    step = read_status(run_dir).step
    assert step is not None
    wait_for_step(run_dir, step + 20)
    assert read_status(run_dir).generation == 1
    end_well(run_dir)
