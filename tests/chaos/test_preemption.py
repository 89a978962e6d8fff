"""F21: the machines are taken away from `moebius train`, which goes on later as if nothing had
happened.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import assert_nothing_left, wait_for_step

from moebius.cluster.job import EXIT_PREEMPTED, State, read_status
from tests.chaos.job_under_fire import curve, weights_hash

pytestmark = pytest.mark.slow
STEPS = 16
SMALL = (
    "model.vocab_size=257",
    "data.tokenizer=bytes",
    "data.vocab_size=257",
    "data.seq_len=32",
    "data.validation_fraction=0.1",
    "model.d_model=32",
    "model.attention.d_head=8",
    "model.feed_forward.num_experts=8",
    "model.feed_forward.router.top_k=2",
    "model.feed_forward.d_expert=16",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_every=0",
    "train.eval_rows=8",
    "checkpoint.every=1000",
    "optim.warmup_steps=4",
    "mesh.dp_replicate=1",
    "job.num_nodes=1",
    "job.ranks_per_node=2",
    "job.rehearse_failure_at_step=none",
)


def start(folder: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    changes = [*SMALL, f"data.input=['{folder}/text.txt']", f"data.directory={folder}/data"]
    program = "from moebius.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "train", "smoke", *changes, "--run-dir", str(run_dir)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"COLUMNS": "120"},
        start_new_session=True,
    )


def test_sigterm_preempts_and_resume_makes_the_same_run(tmp_path):
    rng = np.random.default_rng(1)
    words = rng.choice(["one", "two", "three", "band", "expert", "route"], size=(120, 60))
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(line) for line in words))
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    assert start(tmp_path, undisturbed).wait(100) == 0
    with start(tmp_path, run_dir) as program:
        try:
            wait_for_step(run_dir, 3)
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == EXIT_PREEMPTED
        finally:
            program.kill()
    status = read_status(run_dir)
    assert status.state is State.PREEMPTED
    assert status.step is not None
    assert 3 <= status.step < STEPS
    assert f"preempted at step {status.step}, with a checkpoint" in status.reason
    assert_nothing_left(run_dir)
    assert start(tmp_path, run_dir).wait(100) == 0
    assert curve(run_dir) == curve(undisturbed)
    assert weights_hash(run_dir) == weights_hash(undisturbed)
