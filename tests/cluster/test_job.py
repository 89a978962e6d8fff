"""Tests the run folder as the truth about a job: journal, status, heartbeats."""

import json
import os
import time
from pathlib import Path

import pytest
from jobs import living

from moebius.cluster import job
from moebius.cluster import liveness as life
from moebius.cluster.job import JobError, Journal, Launch, RootCause, State
from moebius.cluster.liveness import beat
from moebius.cluster.report.json_lines import JsonLinesTail
from moebius.cluster.stop import request_stop, stop_requested


def journal_of(run_dir: Path, *states: State) -> Journal:
    journal = Journal(run_dir)
    for generation, state in enumerate(states):
        journal.append(state, generation=generation, reason=f"because {state}")
    return journal


def test_journal_survives_a_writer_that_was_killed_in_mid_line(tmp_path):
    journal = journal_of(tmp_path, State.SUBMITTED)
    with open(journal.path, "ab") as file:
        file.write(b'{"time": 1.0, "state": "RUN')
    journal.append(State.RECOVERING, generation=1, reason="after the torn line")
    assert [entry.state for entry in journal.entries()] == [State.SUBMITTED, State.RECOVERING]
    assert journal.entries()[1].reason == "after the torn line"


def test_status_of_a_folder_without_a_job_is_an_error(tmp_path):
    with pytest.raises(JobError, match=r"nothere: there is no such folder"):
        job.read_status(tmp_path / "nothere")
    with pytest.raises(JobError, match=r"no job was started in this folder"):
        job.read_status(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # of a command that was killed while it prepared
    with pytest.raises(JobError, match=rf"`moebius train` .* again with --run-dir {tmp_path}"):
        job.read_status(tmp_path)


def test_status_tells_step_loss_restarts_and_root_cause(tmp_path):
    journal = journal_of(tmp_path, State.SUBMITTED, State.RUNNING)
    cause = RootCause(
        "rank 3 was killed by SIGKILL",
        rank=3,
        node=1,
        exit_code=-9,
        log="logs/g001/node1/rank3.log",
    )
    journal.append(
        State.RECOVERING,
        generation=1,
        reason="rank 3",
        details={"root_cause": job.as_details(cause)},
    )
    journal.append(State.RUNNING, generation=2, reason="again")
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind":"train","step":7,"loss":3.5}\n{"kind":"eval","step":7,"loss":9}\n'
    )
    (tmp_path / "config.json").write_text('{"train": {"steps": 20}}')
    beat(tmp_path)
    status = job.read_status(tmp_path)
    assert (status.state, status.generation, status.restarts) == (State.RUNNING, 2, 1)
    assert (status.step, status.total_steps, status.loss) == (7, 20, 3.5)
    assert status.root_cause == cause
    assert cause.signal == "SIGKILL"


def test_exit_code_zero_is_kept_in_the_journal():
    cause = RootCause("left early", rank=0, node=0, exit_code=0)
    assert RootCause.from_details(json.loads(json.dumps(job.as_details(cause)))) == cause


@pytest.mark.parametrize("has_beaten", [True, False])
def test_a_job_whose_supervisor_is_silent_is_lost_not_running(tmp_path, has_beaten, monkeypatch):
    monkeypatch.setattr(life, "LOOK_AGAIN_S", 0.1)
    journal_of(tmp_path, State.SUBMITTED, State.RUNNING)
    long_ago = time.time() - 100
    if has_beaten:
        beat(tmp_path)
        os.utime(tmp_path / "heartbeat", (long_ago, long_ago))
    assert job.read_status(tmp_path).state is State.RUNNING  # the journal is a sign of life too
    os.utime(tmp_path / "journal.jsonl", (long_ago, long_ago))
    status = job.read_status(tmp_path)
    assert status.state is State.LOST
    assert "was RUNNING" in status.reason
    assert "no heartbeat for 10" in status.reason
    assert status.exit_code == 1


def test_a_job_that_has_ended_is_never_lost(tmp_path, monkeypatch):
    journal_of(tmp_path, State.SUBMITTED, State.SUCCEEDED)
    monkeypatch.setattr(life.time, "time", lambda: 4e9)
    assert job.read_status(tmp_path).state is State.SUCCEEDED


def test_status_concerns_the_last_submission_only(tmp_path):
    journal_of(
        tmp_path, State.SUBMITTED, State.RECOVERING, State.FAILED, State.SUBMITTED, State.RUNNING
    )
    status = job.read_status(tmp_path)
    assert (status.state, status.restarts) == (State.RUNNING, 0)


def test_a_second_job_in_the_same_folder_is_refused_while_the_first_lives(tmp_path):
    launch = Launch(str(tmp_path))
    job.begin_submission(launch)
    with living(tmp_path), pytest.raises(JobError, match=r"already running here \(SUBMITTED"):
        job.begin_submission(launch)
    Journal(tmp_path).append(State.STOPPED, generation=0, reason="")
    request_stop(tmp_path)
    job.begin_submission(launch)
    assert stop_requested(tmp_path) is None, "an old stop flag must not stop the new job"


def test_a_job_that_was_killed_a_moment_ago_is_waited_out(tmp_path, monkeypatch):
    """Its last heartbeat is fresh, and no other follows."""
    monkeypatch.setattr(job, "_USUAL_SILENCE_S", 0.3)
    monkeypatch.setattr(life, "LOST_AFTER_S", 1.5)
    launch, told = Launch(str(tmp_path)), []
    job.begin_submission(launch)
    began = time.monotonic()
    job.refuse_if_running(tmp_path, tell=told.append)
    assert time.monotonic() - began > 1.2
    [words] = told
    assert "a job was running here 0 s ago (SUBMITTED); without a heartbeat for another" in words
    job.begin_submission(launch)


def test_a_run_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot be written .*choose another one"):
        job.begin_submission(Launch(str(tmp_path / "file" / "run")))


def test_tail_gives_whole_lines_once_and_skips_what_it_cannot_read(tmp_path):
    path = tmp_path / "lines"
    tail = JsonLinesTail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert tail.read() == [{"a": 1}]
    with open(path, "a") as file:
        file.write('}\n[1]\nnonsense\n{"a": 3}\n')
    assert tail.read() == [{"a": 2}, {"a": 3}]
    path.write_text('{"b": 1}\n')
    assert tail.read() == [{"b": 1}], "a shorter file is a new file"
    path.rename(tmp_path / "before")
    path.write_text('{"c": 1}\n{"c": 2}\n')
    assert tail.read() == [{"c": 1}, {"c": 2}], "and so is another one, however long"


def test_tail_near_the_end_reads_only_the_end(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(1000)))
    values = [line["n"] for line in JsonLinesTail.near_the_end(path, num_bytes=100).read()]
    assert values == list(range(1000 - len(values), 1000))
    assert 5 < len(values) < 12
