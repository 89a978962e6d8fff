"""F21: `moebius train` is preempted or interrupted, and continues later as if nothing had happened."""

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Makes a run in a folder with its text."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_paragraphs(folder, paragraphs=120)
    assert start(folder, folder / "run").wait(200) == 0
    return folder / "run"


def preempt(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGTERM)


def press_ctrl_c(program: subprocess.Popen[bytes]) -> None:
    """Sends what a terminal does: every process of the group gets it."""
    os.killpg(program.pid, signal.SIGINT)


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    ("end", "state", "code", "words"),
    [
        (preempt, State.PREEMPTED, EXIT_PREEMPTED, "preempted at step {}, with a checkpoint"),
        (press_ctrl_c, State.STOPPED, 0, "stopped at step {}, with a checkpoint"),
    ],
)
def test_a_signal_ends_a_run_and_the_next_one_goes_on(
    undisturbed, tmp_path, end, state, code, words
):
    run_dir = tmp_path / "run"
    with start(undisturbed.parent, run_dir) as program:
        try:
            wait_for_step(run_dir, 3)
            end(program)
            assert program.wait(200) == code
        finally:
            program.kill()
    status = read_status(run_dir)
    assert status.state is state
    assert status.step is not None
    assert 3 <= status.step < STEPS
    assert words.format(status.step) in status.reason
    assert_nothing_left(run_dir)
    assert start(undisturbed.parent, run_dir).wait(200) == 0
    assert curve(run_dir) == curve(undisturbed)
    assert weights_hash(run_dir) == weights_hash(undisturbed)
