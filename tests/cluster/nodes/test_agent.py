"""Tests the agent process: its assignment, its ranks' environment, and its end with its parent."""

import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import (
    agent_pids,
    assert_nothing_left,
    fake_launch,
    rank_pids,
    template_pids,
    wait_for,
)

from moebius.cluster.job import Launch
from moebius.cluster.nodes import processes
from moebius.cluster.nodes.assignment import Assignment
from moebius.cluster.nodes.node import Node, node_environment


def attempt_of(launch: Launch, *, generation: int = 1) -> Assignment:
    return Assignment(launch, generation, 0, "127.0.0.1", Node().free_port(), "127.0.0.1")


def test_attempt_is_told_through_a_file_that_holds_no_secrets(tmp_path):
    launch = fake_launch(
        tmp_path, environment={"MOEBIUS_TOKEN": "secret"}, num_nodes=2, ranks_per_node=3
    )
    attempt = Assignment(launch, 7, 1, "10.0.0.1", 1234, "10.0.0.2")
    attempt.save(tmp_path / "assignment.json")
    assert "secret" not in (tmp_path / "assignment.json").read_text()
    loaded = Assignment.load(tmp_path / "assignment.json")
    assert (loaded.launch.command, loaded.generation, loaded.master_port) == (
        launch.command,
        7,
        1234,
    )
    assert list(loaded.ranks) == [3, 4, 5]
    assert loaded.log_dir == tmp_path / "logs" / "g007" / "node1"


@pytest.mark.fault("F28")
def test_ranks_get_nothing_of_ray_and_everything_of_ours(tmp_path):
    inherited = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_TOKEN_PATH": "/x",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    launch = fake_launch(tmp_path, environment={"NCCL_DEBUG": "INFO"})
    environment = node_environment(inherited, launch)
    assert environment["PATH"] == "/bin"
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert not {"OMP_NUM_THREADS", "RAY_AUTH_TOKEN_PATH"} & set(environment)


@pytest.mark.parametrize(("gpus", "visible"), [(0, ""), (None, "0,1"), (2, "0,1")])
def test_a_job_without_gpus_sees_none(tmp_path, gpus, visible):
    launch = fake_launch(tmp_path, gpus_per_node=gpus)
    environment = node_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, launch)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_report_names_the_rank_its_exit_and_its_exception(tmp_path):
    node = Node()
    node.start(
        attempt_of(
            fake_launch(tmp_path, "plain=1", "fail=1:2:*:raise", "step_s=0.5", ranks_per_node=2)
        )
    )
    report = wait_for(node.poll, what="the report")
    assert not report.ok
    log = (tmp_path / "logs" / "g001" / "node0" / "rank0.log").read_text()
    assert log.startswith("rank 0 of 2, generation 1\n")
    [failure] = [failure for failure in report.failures if failure.exit_code == 1]
    assert failure.rank == 1
    assert failure.error == "ArithmeticError: bad batch at step 2"
    assert failure.where is not None
    assert "fake_rank.py:" in failure.where
    assert "fail_if_told" in (failure.traceback or "")


def test_a_new_generation_ends_what_an_older_one_left_but_nothing_else(tmp_path):
    def leftover(run_dir, generation):
        marks = {processes.MARK: str(run_dir), processes.MARK_GENERATION: str(generation)}
        return subprocess.Popen(["sleep", "100"], env=os.environ | marks, start_new_session=True)

    old, other, same = leftover(tmp_path, 1), leftover(tmp_path / "other", 1), leftover(tmp_path, 2)
    node = Node()
    try:
        node.start(attempt_of(fake_launch(tmp_path, "plain=1", "steps=1"), generation=2))
        assert old.wait(timeout=60) == -signal.SIGKILL
        assert other.poll() is None
        assert same.poll() is None, "another node of the same generation may live on this machine"
    finally:
        node.stop()
        for process in (old, other, same):
            process.kill()
            process.wait()


HOLDER = """
import sys, time
from moebius.cluster.nodes.assignment import Assignment
from moebius.cluster.nodes.node import Node
from pathlib import Path
attempt = Assignment.load(Path(sys.argv[1]))
Node(launch=attempt.launch).start(attempt)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.fault("F4")
@pytest.mark.parametrize(
    ("victim", "warm"),
    [("holder", False), ("agent", False), ("holder", True)],
)
def test_every_layer_dies_with_the_one_above(tmp_path, victim, warm):
    launch = fake_launch(tmp_path, "plain=1", "step_s=60", ranks_per_node=2, warm_start=warm)
    attempt_of(launch).save(tmp_path / "plan.json")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "plan.json")])
    try:
        wait_for(lambda: len(rank_pids(tmp_path)) == 2, what="two ranks")
        assert len(template_pids(tmp_path)) == warm
        [agent] = agent_pids(tmp_path)
        os.kill(holder.pid if victim == "holder" else agent, signal.SIGKILL)
        assert_nothing_left(tmp_path)
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
def test_a_node_whose_supervisor_is_silent_ends_its_ranks(tmp_path):
    launch = fake_launch(tmp_path, "plain=1", "step_s=60", supervisor_timeout_s=10.0)
    node = Node()
    try:
        node.start(attempt_of(launch))
        wait_for(lambda: node.poll() is None and rank_pids(tmp_path), what="the ranks")
        heard_until = time.monotonic() + 15
        while time.monotonic() < heard_until:  # one that is heard keeps them alive
            assert node.poll() is None
            time.sleep(0.2)
        assert rank_pids(tmp_path)
        wait_for(lambda: not rank_pids(tmp_path), what="the ranks to be ended")
        assert not wait_for(node.poll, what="the report").ok
    finally:
        node.stop()
