"""Tests submitting and stopping through the Python functions of the command line."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from jobs import (
    FAKE_RANK,
    assert_nothing_left,
    fake_launch,
    run_here,
    wait_for,
    wait_for_step,
)

from moebius.cluster.job import JobError, Journal, State, read_status
from moebius.cluster.launch import make_launch, simulated_gpus
from moebius.cluster.stop import stop
from moebius.cluster.submit import submit
from moebius.data_pipeline.manifest import manifest_name
from moebius.train.config.run_config import Config
from moebius.train.config.validation import validated


def config_of(tmp_path: Path, **job) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a small text" for number in range(2000)))
    values = {
        "model": {"vocab_size": 257},
        "data": {"directory": str(tmp_path / "data"), "seq_len": 32},
        "prepare": {"input": [str(text)], "tokenizer": "bytes"},
        "train": {"steps": 20},
        "job": {"name": "small"} | job,
    }
    return validated(Config, values, origin="test")


SUBMIT = """
import json, sys
from pathlib import Path
from moebius.cluster.submit import submit
from moebius.train.config.run_config import Config
run_dir, address, detach, *command = sys.argv[1:]
config = Config.load(Path(run_dir).parent / "asked.json")
status = submit(config, Path(run_dir), address=address or None, detach=detach == "detach", command=command)
print("returned", status.state.value)
sys.exit(status.exit_code)
"""


def start_submit(
    tmp_path: Path, config: Config, *options: str, address: str = "", detach: bool = False
):
    config.save(tmp_path / "asked.json")
    run_dir = tmp_path / "run"
    command = [sys.executable, str(FAKE_RANK), str(run_dir), *options]
    return run_dir, subprocess.Popen(
        [sys.executable, "-c", SUBMIT, str(run_dir), address, "detach" if detach else "", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_job_from_text_to_the_picture_on_a_running_cluster(tmp_path, cluster):
    config = config_of(tmp_path, num_nodes=2, max_restarts=1)
    # rank 0 waits before this step, so that rank 1 reaches it however late it starts
    breaks = ("fail=1:7:1:raise", "hold=7:1")
    run_dir, program = start_submit(tmp_path, config, "plain=1", *breaks, address=cluster.address)
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    for told in (
        f"connected to the Ray cluster at {cluster.address}",
        "data prepared in",
        "RECOVERING: rank 1 on node 1 exited with code 1: ArithmeticError: bad batch at step 7",
        "SUCCEEDED  finished at step 20",
        "returned SUCCEEDED",
    ):
        assert told in output
    assert (tmp_path / "data" / manifest_name(0)).exists()
    assert (run_dir / "summary.png").stat().st_size > 10_000
    assert Config.load(run_dir / "config.json") == config
    assert_nothing_left(run_dir)


@pytest.mark.fault("F11")
@pytest.mark.slow
def test_a_detached_job_outlives_its_submitter_and_can_be_stopped(tmp_path, cluster):
    run_dir, program = start_submit(
        tmp_path,
        config_of(tmp_path),
        "plain=1",
        "steps=9999",
        "every=9999",
        address=cluster.address,
        detach=True,
    )
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    assert not read_status(run_dir).state.is_final
    wait_for_step(run_dir, 3)
    status = stop(run_dir, timeout_s=100)
    assert status.state is State.STOPPED
    assert f"stopped at step {status.step}, with a checkpoint" in status.reason
    assert json.loads((run_dir / "checkpoint.json").read_text())["step"] == status.step
    assert stop(run_dir).ended_at == status.ended_at, "to stop what has ended changes nothing"
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_ctrl_c_stops_a_job_on_a_simulated_cluster_and_everything_is_gone(tmp_path):
    config = config_of(tmp_path, num_nodes=2)
    run_dir, program = start_submit(
        tmp_path, config, "plain=1", "step_s=0.1", "steps=9999", "every=9999"
    )
    wait_for((run_dir / "metrics.jsonl").exists, timeout_s=120, what="the first step")
    wait_for_step(run_dir, 2)
    os.killpg(program.pid, signal.SIGINT)
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    assert "simulated cluster of 2 node(s) up after" in output
    assert "STOPPING: a stop was asked for" in output
    assert "returned STOPPED" in output
    assert read_status(run_dir).state is State.STOPPED
    assert (
        json.loads((run_dir / "checkpoint.json").read_text())["step"] == read_status(run_dir).step
    )
    assert_nothing_left(run_dir)


def test_stopping_nothing_and_stopping_the_lost_are_errors(tmp_path, monkeypatch):
    with pytest.raises(JobError, match="no job was started"):
        stop(tmp_path)
    Journal(tmp_path).append(State.RUNNING, generation=1, reason="")
    with pytest.raises(
        JobError, match=r"still STOPPING|still RUNNING after 0 s; `moebius stop --now`"
    ):
        stop(tmp_path, timeout_s=0.3)
    monkeypatch.setattr("moebius.cluster.liveness.LOST_AFTER_S", -1.0)
    monkeypatch.setattr("moebius.cluster.liveness.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("moebius.cluster.liveness.GIVEN_UP_AFTER_S", -1.0)
    with pytest.raises(JobError, match="so no process can stop it"):
        stop(tmp_path)


def test_stop_now_ends_ranks_in_the_middle_of_a_step(tmp_path):
    stopper = threading.Thread(
        target=lambda: (wait_for_step(tmp_path, 1), stop(tmp_path, now=True))
    )
    stopper.start()
    status = run_here(fake_launch(tmp_path, "plain=1", "step_s=600"))
    stopper.join(timeout=100)
    assert status.state is State.STOPPED
    assert "at once" in status.reason
    assert_nothing_left(tmp_path)


def test_launch_says_what_the_configuration_says(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/fast")
    monkeypatch.setenv("CC", "gcc-12")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    config = config_of(
        tmp_path, num_nodes=2, ranks_per_node=2, max_restarts=7, rehearse_failure_at_step=9
    )
    launch = make_launch(config, tmp_path, address=None, gpus_per_node=0)
    assert (launch.num_nodes, launch.ranks_per_node, launch.max_restarts) == (2, 2, 7)
    assert launch.rehearse_failure_at_step == 9
    assert launch.environment["NCCL_DEBUG"] == "INFO"
    assert launch.environment["TRITON_CACHE_DIR"] == "/fast"
    assert launch.environment["CC"] == "gcc-12"
    assert "CUDA_VISIBLE_DEVICES" not in launch.environment
    assert "AWS_SECRET_ACCESS_KEY" not in launch.environment


def test_keys_of_services_reach_only_runs_whose_metrics_go_there(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "opensesame")
    config = config_of(tmp_path, num_nodes=1, ranks_per_node=1)
    train = config.train.model_copy(update={"sinks": ("wandb",)})
    without, launch = (
        make_launch(each, tmp_path, address=None, gpus_per_node=0)
        for each in (config, config.model_copy(update={"train": train}))
    )
    assert "opensesame" not in without.environment.values()
    assert launch.environment["WANDB_API_KEY"] == "opensesame"
    assert "MLFLOW_TRACKING_TOKEN" not in launch.environment
    assert "opensesame" not in repr(launch)  # which may stand in an error


@pytest.mark.parametrize(
    ("device", "have", "per_node"),
    [("cpu", 8, 0), ("auto", 3, 0), ("auto", 4, 2), ("cuda", 4, 2), ("cuda", 1, None)],
)
def test_pretended_nodes_get_a_gpu_per_rank_or_none(tmp_path, monkeypatch, device, have, per_node):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: have)
    config = config_of(tmp_path, num_nodes=2, ranks_per_node=2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
    if per_node is not None:
        assert simulated_gpus(config) == per_node
        return
    with pytest.raises(JobError, match="needs one GPU per rank, 4 in all, and this machine has 1"):
        submit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before the folder is opened"
