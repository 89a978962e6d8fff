"""Tests `moebius status`, `watch`, `logs` and `resume`: output, options and exit codes."""

import json
from pathlib import Path

import pytest
from jobs import living

import moebius as moebius_api
from moebius.cluster import submit as submitting
from moebius.cluster.job import THIS_MACHINE, JobError, JobStatus, Journal, State
from moebius.distributed.checkpoint.source import Source
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import place_data


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes runs/good (SUCCEEDED) and runs/bad (FAILED) below the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, state in (("good", State.SUCCEEDED), ("bad", State.FAILED)):
        folder = tmp_path / "runs" / name
        (folder / "logs/g001/node0").mkdir(parents=True)
        (folder / "logs/g001/node0/rank0.log").write_text("one\ntwo [x]\n")
        journal = Journal(folder)
        journal.append(State.SUBMITTED, generation=0, reason="", details={"name": name})
        journal.append(state, generation=1, reason="said [/x]")
    return tmp_path / "runs"


def test_status_of_one_run_begins_with_its_story(runs, moebius):
    bad, good = moebius("status", runs / "bad"), moebius("status", runs / "good")
    assert (bad.code, good.code) == (1, 0)
    told = "FAILED before the first step after 0 s; said [/x]; no recoveries; no"
    assert bad.out.startswith(told)
    told = "SUCCEEDED before the first step after 0 s; no recoveries; no checkpoint"
    assert good.out.startswith(told)


def test_status_for_scripts(runs, moebius):
    bad = moebius("status", runs / "bad", "--json")
    assert (bad.code, json.loads(bad.out)["state"]) == (1, "FAILED")
    every = moebius("status", "--json")
    assert every.code == 0
    assert sorted(json.loads(line)["name"] for line in every.out.splitlines()) == ["bad", "good"]
    assert moebius("status", runs / "none", "--json").code == 2


def test_status_lists_what_is_below_a_folder(runs, moebius):
    listed = moebius("status")
    assert listed.code == 0
    header, *lines = listed.out.splitlines()
    columns = "run folder state step loss tokens/s left since"
    assert header.split() == columns.split()
    assert sorted(line.split()[:2] for line in lines) == [["bad", "FAILED"], ["good", "SUCCEEDED"]]
    below = moebius("status", runs.parent, "--json")
    assert {json.loads(line)["run"] for line in below.out.splitlines()} == {
        str(runs / "good"),
        str(runs / "bad"),
    }


def test_status_without_any_run(tmp_path, moebius, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert moebius("status", "--json").out == ""
    listed = moebius("status")
    assert listed.code == 0
    assert "no runs under" in listed.out
    assert moebius("status", "nowhere").code == 2


def test_old_runs_are_counted_and_shown_when_asked_for(runs, moebius):
    journal = runs / "good" / "journal.jsonl"
    lines = [json.loads(line) | {"time": 5.0} for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1 more ended over a week ago; --all shows them" in moebius("status").out
    said = moebius("status", "--all").out
    assert "good" in said
    assert "over a week" not in said


def test_logs_plain_and_for_scripts(runs, moebius):
    run = runs / "good"
    assert moebius("logs", run, "--tail", "1").out == "[g1 rank0] two [x]\n"
    said = moebius("logs", run, "--json").out
    assert [json.loads(line)["text"] for line in said.splitlines()] == ["one", "two [x]"]
    for wrong in (["--tail", "-1"], ["--generation", "7"]):
        assert moebius("logs", run, *wrong).code == 2


def test_watch_of_a_run_that_has_ended_waits_for_no_sign_of_life(runs, moebius, monkeypatch):
    monkeypatch.setattr("moebius.cluster.report.live.LivenessWatch", None)
    watched = moebius("watch", runs / "good")
    assert watched.code == 0
    assert "SUCCEEDED" in watched.out


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Records what `moebius resume` would submit."""
    calls: list[tuple] = []

    def submit(config, run_dir, *, address, detach, source, console):
        calls.append((config, run_dir, address, detach))
        return JobStatus(run_dir, State.SUCCEEDED)

    monkeypatch.setattr(submitting, "submit", submit)
    return calls


def test_resume_goes_on_with_the_stored_configuration(runs, moebius, submitted):
    stored = place_data(resolve("smoke", ["train.steps=77", "job.name=mine"], RECIPES), runs)
    stored.save(runs / "bad" / "config.json")
    assert moebius("resume", runs / "bad", "--address", "auto", "--detach").code == 0
    assert submitted == [(stored, runs / "bad", "auto", True)]
    moebius("resume", "runs/bad", "train.steps=99")
    assert submitted[1][0].train.steps == 99
    assert submitted[1][1:] == (runs / "bad", None, False)
    assert moebius("resume", "runs/bad", "train.stepz=99").code == 2
    assert len(submitted) == 2


def test_resume_continues_a_run_in_the_way_it_was_started(runs, moebius, submitted, monkeypatch):
    """A run of `moebius train` needs no Ray, unless an address asks for it; one of a cluster goes there."""
    here: list[tuple] = []

    def train_here(config, run_dir, *, source, console):
        here.append((config, run_dir, source))
        return JobStatus(run_dir, State.FAILED)

    monkeypatch.setattr("moebius.cluster.local.train_here", train_here)
    stored = place_data(resolve("smoke", ["train.steps=77"], RECIPES), runs)
    run = runs / "bad"
    details = {"where": THIS_MACHINE}
    Journal(run).append(State.SUBMITTED, generation=0, reason="", details=details)
    Journal(run).append(State.FAILED, generation=1, reason="")
    stored.save(run / "config.json")
    source = Source(kind="checkpoint", given="a", path="a", digest="0")
    (run / "source.json").write_text(
        source.as_text()
    )  # it may not have a checkpoint of its own yet
    assert moebius("resume", run).code == 1
    assert (here, submitted) == ([(stored, run, source)], [])
    assert moebius("resume", run, "--address", "auto").code == 0
    assert moebius("resume", run, "--detach").code == 0
    assert (len(here), len(submitted)) == (1, 2)
    Journal(run).append(State.SUBMITTED, generation=1, reason="", details={"where": "auto"})
    Journal(run).append(State.FAILED, generation=2, reason="")
    moebius("resume", run)
    assert (len(here), len(submitted)) == (1, 3)
    assert moebius_api.resume(run, "train.steps=78").state is State.SUCCEEDED
    assert [call[2] for call in submitted[-2:]] == ["auto"] * 2
    assert [call[0].train.steps for call in submitted[-2:]] == [77, 78]


def test_resume_of_what_is_finished_running_or_nothing(runs, moebius, submitted):
    assert "config.json" in moebius("resume", runs / "good").text
    resolve("smoke", ["train.steps=77"], RECIPES).save(runs / "good" / "config.json")
    (runs / "good" / "metrics.jsonl").write_text('{"kind": "train", "step": 77, "loss": 1.0}\n')
    (runs / "good" / "checkpoints" / "step_00000077").mkdir(parents=True)
    (runs / "good" / "result.json").write_text('{"state": "finished", "step": 77}')
    done = moebius("resume", runs / "good")
    assert done.code == 2
    assert "finished at step 77" in done.text
    with pytest.raises(JobError, match=r"finished at step 77, and train\.steps is 77; to"):
        moebius_api.resume(runs / "good")
    Journal(runs / "good").append(State.RUNNING, generation=1, reason="")
    with living(runs / "good"):
        done = moebius("resume", runs / "good")
    assert done.code == 2
    assert "a job is already running here" in done.text
    assert moebius("resume", runs / "none").code == 2
    assert not submitted
