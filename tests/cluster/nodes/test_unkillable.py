"""F26: a process that SIGKILL does not end is named, and its node is not used again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import stuck
from jobs import agent_pids, fake_launch, rank_pids, run_here, wait_for

from moebius.cluster.job import State
from moebius.cluster.nodes import processes
from moebius.cluster.nodes.processes import unkillable
from moebius.cluster.stop import request_stop

needs_a_hang = pytest.mark.skipif("stuck.why_not()", reason="no process can be made to hang here")


def started(
    run_dir: Path, *, generation: int, node_rank: int, ranks: int, rank: int
) -> dict[str, str]:
    """Writes the assignment of a node with so many ranks; returns the marks of one of them."""
    attempt = run_dir / "logs" / f"g{generation:03d}" / f"node{node_rank}" / "assignment.json"
    attempt.parent.mkdir(parents=True)
    plain = {"launch": {"ranks_per_node": ranks}, "node_rank": node_rank, "address": "10.0.0.7"}
    attempt.write_text(json.dumps(plain))
    marks = {processes.MARK_GENERATION: str(generation), processes.RANK: str(rank)}
    return {processes.MARK: str(run_dir)} | marks


@pytest.fixture
def hanging_rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts rank 3 of generation 2, on the second node of two ranks each."""
    marks = started(tmp_path, generation=2, node_rank=1, ranks=2, rank=3)
    program = f"import stuck, pathlib; stuck.hang(pathlib.Path({str(tmp_path / 'hung')!r}))"
    environment = os.environ | marks | {"PYTHONPATH": str(Path(stuck.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as rank:
        try:
            wait_for((tmp_path / "hung.server").exists, what="the file system that hangs")
            yield rank
        finally:
            stuck.release(tmp_path / "hung")
            rank.kill()


@pytest.mark.fault("F26")
@needs_a_hang
def test_it_is_named_by_the_node_on_which_it_was_started(
    tmp_path: Path, hanging_rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SLOW_TO_END_S", 0.3)
    wait_for(lambda: waits_for_the_server(hanging_rank.pid), what="the hang")
    assert unkillable(str(tmp_path), "10.0.0.8") == ""
    words = unkillable(str(tmp_path), "10.0.0.7")
    assert f"SIGKILL does not end process {hanging_rank.pid} (rank 3 of generation 2)" in words
    assert "state D (uninterruptible) in the kernel's request_wait_answer" in words
    stuck.release(tmp_path / "hung")
    assert hanging_rank.wait(60) == -signal.SIGKILL  # sent long ago
    assert unkillable(str(tmp_path), "10.0.0.7") == ""


def waits_for_the_server(pid: int) -> bool:
    return "request_wait_answer" in Path(f"/proc/{pid}/wchan").read_text()


def test_what_ends_by_a_signal_is_not_named(tmp_path: Path) -> None:
    marks = started(tmp_path, generation=1, node_rank=0, ranks=1, rank=0)
    with subprocess.Popen(["/bin/sleep", "600"], env=marks) as rank:
        wait_for(lambda: rank.pid in processes.find(str(tmp_path)), what="the process")
        assert unkillable(str(tmp_path), "10.0.0.7") == ""
        assert rank.wait(60) == -signal.SIGKILL


@pytest.mark.fault("F26")
@needs_a_hang
@pytest.mark.slow
def test_a_job_of_one_machine_ends_and_says_why(tmp_path: Path) -> None:
    """Rank 1 hangs in a file system; the agent is killed, and rank 0 follows it, but rank 1 does not."""
    options = ("plain=1", "steps=100000", "fail=1:*:1:stuck")
    launch = fake_launch(tmp_path, *options, ranks_per_node=2, max_restarts=3)
    pool = ThreadPoolExecutor(1)
    job = pool.submit(run_here, launch)
    try:
        wait_for((tmp_path / "hung.server").exists, timeout_s=120, what="the hang")
        for agent in agent_pids(tmp_path):
            processes.kill(agent)
        status = job.result(120)
    finally:
        request_stop(tmp_path, now=True)  # should it still go on
        stuck.release(tmp_path / "hung")
        pool.shutdown()
    assert status.state is State.FAILED
    assert "(rank 1 of generation 1), state D (uninterruptible)" in status.reason
    assert "the job has no other machine: reboot this one" in status.reason
    wait_for(lambda: not rank_pids(tmp_path), what="the end of the rank")
