"""F21: `moebius train` is preempted and continues later as if nothing had happened."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from jobs import assert_nothing_left, wait_for_step
from tiny_job import MOEBIUS, TINY_JOB, write_paragraphs

from moebius.cluster.job import EXIT_PREEMPTED, State, read_status
from tests.chaos.job_under_fire import curve, weights_hash

pytestmark = pytest.mark.slow
STEPS = 16
SETTINGS = (
    *TINY_JOB,
    f"train.steps={STEPS}",
    "checkpoint.every=1000",
    "mesh.dp_replicate=1",
    "job.num_nodes=1",
    "job.ranks_per_node=2",
)


def start(folder: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    changes = [*SETTINGS, f"prepare.input=['{folder}/text.txt']", f"data.directory={folder}/data"]
    return subprocess.Popen(
        [*MOEBIUS, "train", "smoke", *changes, "--run-dir", str(run_dir)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"COLUMNS": "120"},
        start_new_session=True,
    )


@pytest.mark.fault("F21")
def test_sigterm_preempts_and_resume_makes_the_same_run(tmp_path):
    write_paragraphs(tmp_path, paragraphs=120)
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    assert start(tmp_path, undisturbed).wait(200) == 0
    with start(tmp_path, run_dir) as program:
        try:
            wait_for_step(run_dir, 3)
            program.send_signal(signal.SIGTERM)
            assert program.wait(200) == EXIT_PREEMPTED
        finally:
            program.kill()
    status = read_status(run_dir)
    assert status.state is State.PREEMPTED
    assert status.step is not None
    assert 3 <= status.step < STEPS
    assert f"preempted at step {status.step}, with a checkpoint" in status.reason
    assert_nothing_left(run_dir)
    assert start(tmp_path, run_dir).wait(200) == 0
    assert curve(run_dir) == curve(undisturbed)
    assert weights_hash(run_dir) == weights_hash(undisturbed)
