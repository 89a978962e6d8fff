"""F3, F12, F13, F26, F30: ranks of a real run leave, are stopped, hang, wait, starve or are slow.

Two ranks run on this machine, as under `moebius train`. Each recovered run must have the losses of an
undisturbed one.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import assert_nothing_left, curve, wait_for, wait_for_end, wait_for_step
from made_folder import MadeFolder, documents
from small_model import TINY

from moebius.cluster.job import Journal, JournalEntry, Launch, State, begin_submission
from moebius.cluster.nodes.provider import ThisMachine
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.cluster.watch import watcher
from moebius.cluster.watch.heartbeats import WatchedRanks, folder_of
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.train.config.job_config import JobConfig, PhaseLimits
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.record.run_folder import open_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]
RANK = Path(__file__).with_name("faulty_rank.py")
STEPS = 60
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    made = MadeFolder(tmp_path_factory.mktemp("made"))
    made.seal("text", documents(0, 200), documents(2, 16)).complete()
    return Config(
        model=TINY,
        data=made.config(),
        prepare=PrepareConfig(tokenizer="bytes"),
        checkpoint=CheckpointConfig(every=5),
        train=TrainConfig(
            steps=STEPS, global_batch=2, micro_batch=1, eval_every=0, eval_rows=4, log_every=1,
            timeout_s=120.0, device="cpu",
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory) -> dict[int, float]:
    """Returns the losses of an undisturbed run."""
    run_dir = tmp_path_factory.mktemp("expected")
    with running(config, run_dir):
        wait_for_end(run_dir)
    assert [entry.reason for entry in told(run_dir, "root_cause")] == []
    return curve(run_dir)


@contextlib.contextmanager
def running(config: Config, run_dir: Path, fault: str = "", **limits: float) -> Iterator[None]:
    """Runs a job of two ranks, supervised by a thread, until it ends."""
    limits = {"step_s": LIMIT_S, "phase_s": 60.0} | limits
    job = JobConfig(limits=PhaseLimits.model_validate(limits))
    open_run(config.model_copy(update={"job": job}), run_dir)
    launch = Launch(
        str(run_dir),
        ranks_per_node=2,
        command=(sys.executable, str(RANK), str(run_dir), *([fault] if fault else [])),
    )
    begin_submission(launch)
    thread = threading.Thread(target=supervise, args=(launch, ThisMachine()))
    thread.start()
    try:
        yield
    except BaseException:
        (run_dir / "stop").write_text("now")
        raise
    finally:
        thread.join()
    assert_nothing_left(run_dir)


def told(run_dir: Path, *kinds: str) -> list[JournalEntry]:
    """Returns the journal entries with details of these kinds."""
    return [
        entry
        for entry in Journal(run_dir).entries()
        if any(kind in entry.details for kind in kinds)
    ]


def pids(run_dir: Path) -> dict[int, int]:
    beats = WatchedRanks(folder_of(str(run_dir), 1, 0), range(2)).beats()
    return {rank: beat.pid for rank, beat in beats.items()}


def first_step_of_the_next_generation(run_dir: Path) -> float:
    entries = Journal(run_dir).entries()
    return next(
        entry.time for entry in entries if entry.generation == 2 and entry.state is State.RUNNING
    )


@pytest.mark.fault("F3")
@pytest.mark.nightly
def test_a_rank_that_leaves_early_is_the_cause(config, expected, tmp_path) -> None:
    """F3: its exit code is 0, and its peer's is not."""
    with running(config, tmp_path, "leave:9"):
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 2)
    cause = status.root_cause
    assert cause is not None
    assert (cause.rank, cause.exit_code) == (1, 0)
    assert "rank 1 exited with code 0 before the run was finished" in cause.summary
    assert curve(tmp_path) == expected


@pytest.mark.fault("F12")
def test_a_stopped_rank_is_named_and_the_run_goes_on(config, expected, tmp_path, capsys) -> None:
    """F12: the stopped rank cannot answer; the other one reports the collective it waits in."""
    with running(config, tmp_path):
        wait_for_step(tmp_path, 12)
        os.kill(pids(tmp_path)[1], signal.SIGSTOP)
        stopped_at = time.time()
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 2)
    cause = status.root_cause
    assert cause is not None
    assert (cause.rank, cause.node, cause.log) == (1, 0, "logs/g001/stall/rank1.txt")
    assert "rank 1 on node 0 hangs: in phase step of step" in cause.summary
    assert "(limit 5 s), its process is stopped (SIGSTOP, or a debugger)" in cause.summary
    assert " of group '" in cause.summary.partition("the others wait in ")[2]
    stall = tmp_path / "logs" / "g001" / "stall"
    assert "state: T" in (stall / "rank1.txt").read_text()
    waiting = (stall / "rank0.txt").read_text()
    assert "waits in no. " in waiting
    assert "in step" in waiting
    assert curve(tmp_path) == expected
    with capsys.disabled():
        seconds = first_step_of_the_next_generation(tmp_path) - stopped_at
        print(
            f"\nF12, limit {LIMIT_S:g} s: first step {seconds:.1f} s after the stop; {cause.summary}"
        )


@pytest.mark.fault("F26")
def test_a_rank_that_hangs_deaf_to_sigterm_is_named_with_its_line(
    config, expected, tmp_path
) -> None:
    """F26: it answers, and has not reached the collective that the other waits in."""
    with running(config, tmp_path, "hang:14"):
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 2)
    cause = status.root_cause
    assert cause is not None
    assert cause.rank == 1
    assert "in phase step of step 14" in cause.summary
    assert "the others wait in all_reduce no. " in cause.summary
    stacks = (tmp_path / "logs" / "g001" / "stall" / "rank1.txt").read_text()
    assert "in hangs_here" in stacks
    # The innermost frame of ours; a test's file counts only in a folder called moebius.
    assert cause.where is not None
    file, number, function = re.split(":| in ", cause.where)
    assert f'/{file}", line {number} in {function}' in stacks
    assert curve(tmp_path) == expected


@pytest.mark.fault("F13")
@pytest.mark.nightly
def test_a_loader_that_blocks_is_told_and_not_killed(
    config, expected, tmp_path, monkeypatch
) -> None:
    """F13: 8 s, with a limit of 5 s for a step and none for data."""
    monkeypatch.setattr(watcher, "DATA_WAIT_S", 3.0)
    with running(config, tmp_path, "data:0"):
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 1)
    waits = told(tmp_path, "data_wait")
    assert {entry.details["data_wait"]["rank"] for entry in waits} == {0, 1}
    assert len(waits) <= 4
    assert curve(tmp_path) == expected


@pytest.mark.fault("F30")
def test_a_rank_without_cpu_is_slow_and_no_hang(config, expected, tmp_path) -> None:
    """F30: rank 1 shares a CPU with busy, higher-priority processes for longer than a step's limit."""
    hog = "import os; os.sched_setaffinity(0, {0})\nwhile True: pass"
    with running(config, tmp_path, step_s=2.0), contextlib.ExitStack() as hogs:
        wait_for_step(tmp_path, 12)
        pid = pids(tmp_path)[1]
        set_priority(pid, 19)
        busy = [hogs.enter_context(subprocess.Popen([sys.executable, "-c", hog])) for _ in range(6)]
        hogs.callback(lambda: [process.kill() for process in busy])
        wait_for(lambda: told(tmp_path, "starved"), what="a line about the CPU")
        hogs.close()
        with contextlib.suppress(PermissionError):  # on a busy machine it would starve for ever
            set_priority(pid, 0)
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 1)
    [entry] = told(tmp_path, "starved")
    assert entry.details["starved"]["rank"] == 1
    assert "rank 1 on node 0 gets no CPU" in entry.reason
    assert curve(tmp_path) == expected


def set_priority(pid: int, priority: int) -> None:
    """Sets the priority of a process on its first CPU, and of its session where the kernel can."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {0})
            os.setpriority(os.PRIO_PROCESS, int(task.name), priority)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(priority))


@pytest.mark.nightly
def test_a_slow_rank_is_named_once(config, expected, tmp_path) -> None:
    with running(config, tmp_path, "slow:5"):
        status = wait_for_end(tmp_path)
    assert (status.state, status.generation) == (State.SUCCEEDED, 1)
    named = told(tmp_path, "straggler")
    [entry] = [entry for entry in named if entry.details["straggler"]["rank"] == 1]
    assert entry.details["straggler"]["ratio"] > 1.5
    assert curve(tmp_path) == expected
