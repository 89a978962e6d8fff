"""Tests what a run folder may lose: each file deleted, emptied, torn, or replaced by another run's.

The job goes on, or ends with a state whose exit code is not zero. The table crosses all files with all
damages, before, during and after the first generation; the slow test trains a model meanwhile.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, rank_pids, wait_for_step
from tiny_job import MOEBIUS, TINY_JOB

from moebius.cluster.job import (
    JobError,
    Journal,
    Launch,
    State,
    begin_submission,
    read_generation,
    read_status,
)
from moebius.cluster.local import train_here
from moebius.cluster.nodes.assignment import AgentReport
from moebius.cluster.supervise import generation, job_supervisor, retrying_journal
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.distributed.checkpoint.format import list_checkpoints
from tests.chaos.job_under_fire import weights_hash
from tests.cluster.pretended import OK, PretendedNode, failed, in_turn, live, makes_steps

STEPS = 5
CONFIG = json.dumps({"train": {"steps": STEPS}, "job": {}})
SOURCE = json.dumps({"kind": "checkpoint", "path": "other"})
# Every file of a run folder but those of checkpoints, which the tests of checkpoints damage.
OURS = {
    "config.json": CONFIG,
    "environment.json": "{}",
    "generation": "1",
    "heartbeat": "",
    "journal.jsonl": "",
    "metrics.jsonl": "",
    "preparation.jsonl": "",
    "source.json": SOURCE,
    "result.json": '{"state": "finished", "step": 5}',
    "supervisor": "1",
    "summary.png": "",
    "logs/g001/node0/agent.log": "",
    "logs/g001/node0/assignment.json": "{}",
    "logs/g001/node0/rank0.log": "",
    "logs/g001/node0/report.json": "{}",
}
_DONE = '{"time": 9.0, "state": "%s", "generation": 7, "reason": "other", "details": {}}\n'
OTHERS = {
    "config.json": json.dumps({"train": {"steps": 3}, "job": {}}),
    "generation": "7",
    "journal.jsonl": _DONE % "SUBMITTED" + _DONE % "SUCCEEDED",
    "metrics.jsonl": '{"kind": "train", "step": 900, "loss": 1.0}\n',
    "result.json": '{"state": "finished", "step": 3}',
    "logs/g001/node0/report.json": '{"ok": true, "failures": [], "message": "", "exit_code": 0}',
}


def deleted(path: Path, name: str) -> None:
    path.unlink(missing_ok=True)


def emptied(path: Path, name: str) -> None:
    path.write_text("")


def torn(path: Path, name: str) -> None:
    whole = path.read_bytes() if path.exists() else OURS.get(name, "").encode()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff\x00")


def of_another_run(path: Path, name: str) -> None:
    partial = path.with_name("partial")
    partial.write_text(OTHERS.get(name, "of another run"))
    partial.replace(path)


DAMAGES = (deleted, emptied, torn, of_another_run)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    for module in (job_supervisor, generation):
        monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(retrying_journal, "_SETTLE_S", 0.001)
    monkeypatch.setattr("moebius.cluster.liveness.LOST_AFTER_S", 0.3)


def damages(damage: Callable[[Path, str], None], run_dir: Path, name: str) -> None:
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    damage(run_dir / name, name)


def ends_well(run_dir: Path) -> AgentReport:
    (run_dir / "result.json").write_text(OURS["result.json"])
    return OK


def waits(run_dir: Path) -> None:
    return None


@pytest.mark.quick(60)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("when", ["before", "during", "before the next", "at the end"])
def test_a_job_goes_on_whatever_its_folder_loses(tmp_path, name, damage, when):
    def breaks(run_dir: Path) -> None:
        damages(damage, run_dir, name)

    def breaks_and_fails(run_dir: Path) -> AgentReport:
        breaks(run_dir)
        return failed("ValueError: of this generation")

    def breaks_and_ends(run_dir: Path) -> AgentReport:
        ends_well(run_dir)
        breaks(run_dir)
        return OK

    last = makes_steps(5, then=ends_well)
    script = {
        "before": [last],
        "during": [makes_steps(2, then=in_turn(breaks, waits, ends_well))],
        "before the next": [makes_steps(2, then=breaks_and_fails), last],
        "at the end": [makes_steps(5, then=breaks_and_ends), last],
    }[when]
    launch = Launch(
        str(tmp_path), configuration=CONFIG, source=SOURCE, max_restarts=1, backoff_s=0.001
    )
    node = PretendedNode(tmp_path, script)
    begin_submission(launch)
    if when == "before":
        breaks(tmp_path)
    supervise(launch, node)
    status = read_status(tmp_path)
    assert status.state is State.SUCCEEDED
    assert f"finished at step {STEPS}" in status.reason
    numbers = [each.generation for each in node.assignments]
    assert numbers == sorted(set(numbers)), "a number was used twice"
    assert (tmp_path / "config.json").read_text() == CONFIG
    assert (tmp_path / "source.json").read_text() == SOURCE
    assert (tmp_path / "generation").read_text() == str(numbers[-1])
    known = [entry.state for entry in Journal(tmp_path).entries()]
    if (name, when) != ("journal.jsonl", "before"):  # its first line is nowhere else
        assert known[0] is State.SUBMITTED
    assert State.STARTING in known


@pytest.mark.quick(20)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", OURS)
def test_a_folder_damaged_between_two_jobs_takes_the_next_one(tmp_path, name, damage):
    """Its generation gets a number that no log of the first has."""
    live(tmp_path, makes_steps(5, then=ends_well), configuration=CONFIG)
    (tmp_path / "logs" / "g001" / "node0").mkdir(parents=True)
    damages(damage, tmp_path, name)
    if name == "supervisor":
        (tmp_path / "supervisor").unlink(missing_ok=True)
    status, node = live(tmp_path, makes_steps(5, then=ends_well), configuration=CONFIG)
    assert status.state is State.SUCCEEDED
    assert node.assignments[0].generation > 1


def test_a_generation_has_a_number_that_no_log_in_the_folder_has(tmp_path):
    def copies_logs(run_dir: Path) -> AgentReport:
        (run_dir / "logs" / "g007").mkdir(parents=True)
        return failed("ValueError: first")

    _, node = live(tmp_path, makes_steps(2, then=copies_logs), makes_steps(5, then=ends_well))
    assert [each.generation for each in node.assignments] == [1, 8]


@pytest.mark.parametrize("number", ["-3", "1_0", "٣", "9" * 5000, "1e3"])
def test_a_forged_number_is_damage(tmp_path, number):
    (tmp_path / "generation").write_text(number)
    (tmp_path / "supervisor").write_text(number)
    assert read_generation(tmp_path) == 1
    status, _ = live(tmp_path, makes_steps(5, then=ends_well))
    assert status.state is State.SUCCEEDED


@pytest.mark.parametrize("how", ["", "preempt", "now"])
def test_a_stop_holds_even_if_its_file_is_deleted(tmp_path, how):
    def asks(run_dir: Path) -> None:
        (run_dir / "stop").write_text(how)

    def forgets(run_dir: Path) -> None:
        (run_dir / "stop").unlink(missing_ok=True)

    def stops(run_dir: Path) -> AgentReport:
        assert (run_dir / "stop").read_text() == how, "the ranks would go on"
        (run_dir / "result.json").write_text('{"state": "stopped", "step": 3}')
        return OK

    acts = in_turn(asks, forgets, waits, stops)
    status, _ = live(tmp_path, makes_steps(2, then=acts), max_restarts=0)
    expected = State.PREEMPTED if how == "preempt" else State.STOPPED
    assert status.state is expected


def test_a_deleted_run_folder_ends_the_job_with_one_sentence(tmp_path):
    run_dir = tmp_path / "run"

    def removes(run_dir: Path) -> AgentReport:
        shutil.rmtree(run_dir)
        return failed()

    launch = Launch(str(run_dir), backoff_s=0.001)
    begin_submission(launch)
    supervise(launch, PretendedNode(run_dir, [makes_steps(2, then=removes)]))
    with pytest.raises(JobError, match="there is no such folder"):
        read_status(run_dir)


def test_a_report_counts_for_its_own_node_and_generation_only(tmp_path):
    own, other = tmp_path / "logs/g001/node0", tmp_path / "logs/g002/node0"
    for folder in (own, other):
        folder.mkdir(parents=True)
    AgentReport(ok=True).save(own)
    assert AgentReport.load(own) == AgentReport(ok=True)
    shutil.copy(own / "report.json", other)
    assert AgentReport.load(other) is None
    for text in ("", "[]", '{"ok": 1}', "[" * 100_000, '{"failures": 3}'):
        (own / "report.json").write_text(text)
        assert AgentReport.load(own) is None
    assert AgentReport.load(tmp_path) is None


def test_a_full_disk_hides_no_report(tmp_path):
    """The report of a killed rank reaches the supervisor through the machine's memory."""
    log_dir, memory = tmp_path / "full", tmp_path / "memory"
    memory.mkdir()
    report = failed("ValueError: of rank 0")
    with pytest.raises(OSError, match="No such file"):
        report.save(log_dir)
    report.save(log_dir, otherwise=memory)
    assert AgentReport.load(memory, of=log_dir) == report
    assert AgentReport.load(memory) is None


def test_a_job_that_others_have_taken_over_is_no_success(tmp_path, monkeypatch):
    """`moebius train` ends with a sentence instead of exit code 0."""
    from moebius.train.recipes.smoke import RECIPES

    monkeypatch.setattr("moebius.cluster.local.supervise", lambda *arguments: None)
    monkeypatch.setattr("moebius.cluster.local.prepare", lambda *arguments, **named: None)
    config = RECIPES["smoke"]().model_copy(deep=True)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"directory": str(tmp_path)})}
    )
    with pytest.raises(JobError, match="another supervisor has taken this run over"):
        train_here(config, tmp_path / "run")


# With a model -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_run_makes_the_same_steps_while_its_files_vanish(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert _train(whole).wait() == 0
    process = _train(broken)
    damage = iter(DAMAGES * 100)
    ended = threading.Event()

    def meddle() -> None:
        wait_for_step(broken, 3)
        while not ended.wait(0.3):
            for path in [path for path in broken.rglob("*") if path.is_file()]:
                name = str(path.relative_to(broken))
                if "checkpoints" not in name and name in OURS and name != "supervisor":
                    damages(next(damage, deleted), broken, name)

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        code = process.wait()
    finally:
        ended.set()
        thread.join()
    # after the job's end nobody writes the journal again
    if code == 0 and (broken / "journal.jsonl").exists():
        # lines that were deleted are gone; what is left is the undisturbed run's
        assert read_status(broken).state is State.SUCCEEDED
        kept, expected = curve_of_whole_lines(broken), curve(whole)
        assert kept == {step: expected[step] for step in kept}


def curve_of_whole_lines(run_dir: Path) -> dict[int, float]:
    from moebius.cluster.report.run_records import history

    found = {line["step"]: line["loss"] for line in history(run_dir).records() if "loss" in line}
    return {step: loss for step, loss in found.items() if 0 < step < 900}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, Path]:
    """Makes an undisturbed run of two ranks, and one of another seed; returns their folders."""
    folder = tmp_path_factory.mktemp("two-ranks")
    for name, *changes in (("whole",), ("other", "train.seed=9")):
        assert _train(folder / name, *TWO_RANKS, *changes).wait() == 0
    return folder / "whole", folder / "other"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_goes_on_without_its_newest_checkpoint_and_a_rank(tmp_path, two_ranks, damage):
    """The file `supervisor` is damaged, too; the ranks stand still meanwhile, so nothing newer comes."""
    (whole, other), run_dir = two_ranks, tmp_path / "run"
    with open(tmp_path / "said", "w") as said:
        process = _train(run_dir, *TWO_RANKS, cwd=whole.parent, output=said)
    try:
        wait_for_step(run_dir, 12)
        ranks = rank_pids(run_dir)
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)
        damages(damage, run_dir, "supervisor")
        newest = list_checkpoints(run_dir / "checkpoints")[-1].path
        for file in [*newest.iterdir()]:
            if damage is of_another_run:
                shutil.copy(other / "checkpoints" / newest.name / file.name, file)
            else:
                damage(file, "")
        os.kill(ranks[1], signal.SIGKILL)
        code = process.wait(100)
    finally:
        process.kill()
    words = " ".join((tmp_path / "said").read_text().split())
    assert "Traceback" not in words
    if damage is of_another_run:  # its checksums are right
        assert code == 1, words
        assert "holds another run (train.seed: the run has 9, now 0); restore this run's" in words
        assert read_status(run_dir).state is State.FAILED
    else:
        assert code == 0, words
        assert read_status(run_dir).state is State.SUCCEEDED
        assert (curve(run_dir), weights_hash(run_dir)) == (curve(whole), weights_hash(whole))


TWO_RANKS = (
    "job.num_nodes=1",
    "job.ranks_per_node=2",
    "mesh.ep=2",
    "mesh.dp_replicate=1",
    "checkpoint.keep_last=9",
)


def _train(
    run_dir: Path, *changes: str, cwd: Path | None = None, output: Any = None
) -> subprocess.Popen[bytes]:
    settings = (*TINY_JOB, "train.steps=40", "checkpoint.every=5", "job.ranks_per_node=1")
    words = ("train", "smoke", *settings, "job.max_restarts=50", "mesh.ep=1", *changes)
    command = [*MOEBIUS, *words, "--run-dir", str(run_dir)]
    cwd = cwd or run_dir.parent
    return subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output)
