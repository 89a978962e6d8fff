"""Tests jobs of real processes on this machine, without a cluster."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import (
    assert_nothing_left,
    curve,
    fake_launch,
    let_go,
    run_here,
    undisturbed,
    wait_for,
    wait_for_end,
    wait_for_step,
)

from moebius.cluster.job import Journal, State
from moebius.cluster.stop import stop_requested


def states(run_dir: Path) -> list[str]:
    return [entry.state.value for entry in Journal(run_dir).entries()]


INTERRUPTED = """
import json, sys
from pathlib import Path
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.cluster.stop import interrupts_stop_the_job
from moebius.cluster.nodes.provider import ThisMachine
from moebius.cluster.job import Launch, begin_submission
values = json.loads(sys.argv[1])
launch = Launch(**values | {"command": tuple(values["command"])})
begin_submission(launch)
with interrupts_stop_the_job(Path(launch.run_dir)):
    supervise(launch, ThisMachine())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "state"), [(signal.SIGINT, State.STOPPED), (signal.SIGTERM, State.PREEMPTED)]
)
def test_ctrl_c_ends_a_run_at_a_step_boundary_and_the_next_one_goes_on(tmp_path, sent, state):
    launch = fake_launch(tmp_path, "hold=3:1", "steps=12", "every=100", ranks_per_node=2)
    values = json.dumps({"run_dir": launch.run_dir, "command": launch.command, "ranks_per_node": 2})
    program = subprocess.Popen([sys.executable, "-c", INTERRUPTED, values], start_new_session=True)
    try:
        wait_for_step(tmp_path, 2)
        os.killpg(program.pid, sent)  # what a terminal does: every process of the group gets it
        wait_for(lambda: "STOPPING" in states(tmp_path), what="the supervisor to hear of it")
        let_go(tmp_path)
        status = wait_for_end(tmp_path)
        assert program.wait(timeout=100) == 0
    finally:
        program.kill()
        program.wait()
    assert status.state is state
    assert "STOPPING" in states(tmp_path)
    assert_nothing_left(tmp_path)
    saved = json.loads((tmp_path / "checkpoint.json").read_text())["step"]
    assert saved == status.step
    assert saved < 12
    assert stop_requested(tmp_path) == ("step" if state is State.STOPPED else "preempt")
    assert run_here(launch).state is State.SUCCEEDED
    assert curve(tmp_path) == undisturbed(2, 12)
    assert list(curve(tmp_path)) == list(range(1, 13)), "no step was made twice"
