"""F14: a frozen generation thaws after a newer one was announced.

On one machine, a new generation would end the frozen processes by their marks. Here nothing does, as if they
were on another machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import assert_nothing_left, rank_pids, wait_for, wait_for_step
from made_folder import MadeFolder, documents
from small_model import TINY

from moebius.cluster.job import GENERATION, JOURNAL, Launch, SupervisorNumber, begin_submission
from moebius.cluster.nodes import processes
from moebius.data_pipeline.files import write_atomically
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.checkpoint.format import list_checkpoints
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.record.run_folder import open_run
from tests.chaos.job_under_fire import weights_hash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]
SUPERVISE = """
import sys
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.cluster.job import Launch
from moebius.cluster.nodes.provider import ThisMachine
launch = Launch(sys.argv[1], ranks_per_node=2)
supervise(launch, ThisMachine(launch))
"""


@pytest.mark.fault("F14")
def test_a_frozen_generation_that_thaws_late_changes_nothing(tmp_path):
    made = MadeFolder(tmp_path / "made")
    made.seal("text", documents(0, 200), documents(2, 16)).complete()
    run_dir = tmp_path / "run"
    config = Config(
        model=TINY,
        data=made.config(),
        prepare=PrepareConfig(tokenizer="bytes"),
        checkpoint=CheckpointConfig(every=5),
        train=TrainConfig(
            steps=100_000,
            global_batch=2,
            micro_batch=1,
            eval_every=0,
            eval_rows=4,
            log_every=1,
            device="cpu",
        ),
    )
    open_run(config, run_dir)
    begin_submission(Launch(str(run_dir), ranks_per_node=2))
    with subprocess.Popen([sys.executable, "-c", SUPERVISE, str(run_dir)]) as supervisor:
        try:
            wait_for_step(run_dir, 12)
            frozen = [supervisor.pid, *processes.descendants(supervisor.pid)]
            send(frozen, signal.SIGSTOP)
            ranks = list(rank_pids(run_dir).values())
            assert len(ranks) == 2
            SupervisorNumber.take(run_dir)
            write_atomically(run_dir / GENERATION, "2")
            journal, checkpoints = (run_dir / JOURNAL).read_bytes(), state_of(run_dir)
            send(ranks, signal.SIGCONT)  # the ranks first: nobody tells them
            wait_for(lambda: not rank_pids(run_dir), what="the end of the ranks")
            assert "StaleGenerationError" in last_words(run_dir)
            assert state_of(run_dir) == checkpoints
            send(frozen, signal.SIGCONT)
            assert supervisor.wait(100) == 0
        finally:
            supervisor.kill()
    assert_nothing_left(run_dir)
    assert (run_dir / JOURNAL).read_bytes() == journal, "not a word into the newer one's journal"
    assert state_of(run_dir) == checkpoints
    assert not (run_dir / "result.json").exists()


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def state_of(run_dir: Path) -> tuple[list[int], str]:
    steps = [checkpoint.step for checkpoint in list_checkpoints(run_dir / "checkpoints")]
    return steps, weights_hash(run_dir)


def last_words(run_dir: Path) -> str:
    return json.dumps([path.read_text() for path in run_dir.glob("logs/g001/node0/rank*.log")])
