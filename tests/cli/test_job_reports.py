"""`moebius status`, `jobs`, `logs`, `top`, `resume`: words, options and exit codes."""

import json
from pathlib import Path

import pytest

from moebius.cli.main import main
from moebius.cluster import submit as submitting
from moebius.cluster.job import JobStatus, Journal, State
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/good, which ended well, and runs/bad, which failed; the working directory is above."""
    monkeypatch.chdir(tmp_path)
    for name, state in (("good", State.SUCCEEDED), ("bad", State.FAILED)):
        folder = tmp_path / "runs" / name
        (folder / "logs/g001/node0").mkdir(parents=True)
        (folder / "logs/g001/node0/rank0.log").write_text("one\ntwo [x]\n")
        journal = Journal(folder)
        journal.append(State.SUBMITTED, generation=0, reason="", details={"name": name})
        journal.append(state, generation=1, reason="said [/x]")
    return tmp_path / "runs"


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


def test_status_of_one_run_begins_with_its_story(runs, capsys):
    code, said = answer(capsys, "status", runs / "bad")
    assert code == 1
    assert said.startswith("FAILED before the first step after 0 s; said [/x]; no recoveries; no")
    code, said = answer(capsys, "status", runs / "good")
    assert code == 0
    assert said.startswith(
        "SUCCEEDED before the first step after 0 s; no recoveries; no checkpoint"
    )


def test_status_for_scripts(runs, capsys):
    code, said = answer(capsys, "status", runs / "bad", "--json")
    assert (code, json.loads(said)["state"]) == (1, "FAILED")
    code, said = answer(capsys, "status", "--json")
    assert code == 0
    assert [json.loads(line)["name"] for line in said.splitlines()] == ["bad", "good"]
    assert answer(capsys, "status", runs / "none", "--json")[0] == 2
    assert answer(capsys, "status", runs / "bad", "--json", "--watch")[0] == 2


def test_jobs_lists_what_is_below_a_folder(runs, capsys):
    code, said = answer(capsys, "jobs")
    assert code == 0
    header, *lines = said.splitlines()
    columns = "name state step loss tokens/s restarts since run folder"
    assert header.split() == columns.split()
    assert sorted(line.split()[:2] for line in lines) == [["bad", "FAILED"], ["good", "SUCCEEDED"]]
    code, said = answer(capsys, "jobs", "--root", runs.parent, "--json")
    assert {json.loads(line)["run"] for line in said.splitlines()} == {
        str(runs / "good"),
        str(runs / "bad"),
    }


def test_jobs_without_any(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "jobs", "--json") == (0, "")
    code, said = answer(capsys, "jobs")
    assert code == 0
    assert "no runs under" in said
    assert answer(capsys, "jobs", "--root", "nowhere")[0] == 2


def test_old_runs_are_counted_and_shown_when_asked_for(runs, capsys):
    journal = runs / "good" / "journal.jsonl"
    lines = [json.loads(line) | {"time": 5.0} for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1 more ended over a week ago: --all" in answer(capsys, "jobs")[1]
    said = answer(capsys, "jobs", "--all")[1]
    assert "good" in said
    assert "over a week" not in said


def test_logs_in_colour_plain_and_for_scripts(runs, capsys):
    run = runs / "good"
    assert answer(capsys, "logs", run, "--tail", "1") == (0, "[g1 rank0] two [x]\n")
    code, said = answer(capsys, "logs", run, "--color", "always", "--rank", "0")
    assert (code, said.count("\x1b[0m")) == (0, 2)
    code, said = answer(capsys, "logs", run, "--json")
    assert [json.loads(line)["text"] for line in said.splitlines()] == ["one", "two [x]"]
    for wrong in (["--tail", "-1"], ["--since", "soon"], ["--generation", "7"]):
        assert answer(capsys, "logs", run, *wrong)[0] == 2


def test_top_for_scripts(runs, capsys):
    code, said = answer(capsys, "top", runs / "bad", "--once", "--json")
    assert (code, json.loads(said)["ranks"]) == (1, [])
    assert answer(capsys, "top", runs / "good")[0] == 0
    assert answer(capsys, "top", runs / "good", "--json")[0] == 2


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What `moebius resume` submits, instead of submitting it."""
    calls: list[tuple] = []

    def submit(config, run_dir, *, address, detach, scale, shipment):
        assert (scale, shipment) == (None, None)  # nothing was scaled, and nothing is brought along
        calls.append((config, run_dir, address, detach))
        return JobStatus(run_dir, State.SUCCEEDED)

    monkeypatch.setattr(submitting, "submit", submit)
    return calls


def test_resume_goes_on_with_the_stored_configuration(runs, capsys, submitted):
    stored = resolve("smoke", ["train.steps=77", "job.name=mine"], RECIPES)
    stored.save(runs / "bad" / "config.json")
    (runs / "bad" / "checkpoints" / "step_00000050").mkdir(parents=True)
    code, said = answer(capsys, "resume", runs / "bad", "--address", "auto", "--detach")
    assert code == 0
    assert "goes on from the checkpoint of step 50, to step 77" in said
    assert submitted == [(stored, runs / "bad", "auto", True)]
    code, said = answer(capsys, "resume", "runs/bad", "train.steps=99")
    assert submitted[1][0].train.steps == 99
    assert submitted[1][1:] == (runs / "bad", None, False)
    assert answer(capsys, "resume", "runs/bad", "train.stepz=99")[0] == 2
    assert len(submitted) == 2


def test_resume_of_what_is_finished_running_or_nothing(runs, capsys, submitted):
    assert "config.json" in answer(capsys, "resume", runs / "good")[1]
    resolve("smoke", ["train.steps=77"], RECIPES).save(runs / "good" / "config.json")
    (runs / "good" / "metrics.jsonl").write_text('{"kind": "train", "step": 77, "loss": 1.0}\n')
    code, said = answer(capsys, "resume", runs / "good")
    assert code == 2
    assert "finished at step 77" in said
    Journal(runs / "good").append(State.RUNNING, generation=1, reason="")
    (runs / "good" / "heartbeat").touch()
    code, said = answer(capsys, "resume", runs / "good")
    assert code == 2
    assert "a job is already at work here" in said
    assert answer(capsys, "resume", runs / "none")[0] == 2
    assert not submitted


def test_stop_for_scripts(runs, capsys):
    code, said = answer(capsys, "stop", runs / "bad", "--json")
    assert (code, json.loads(said)["state"]) == (0, "FAILED")


@pytest.mark.parametrize("command", ["train", "submit", "resume", "stop", "status", "jobs", "top"])
def test_exit_codes_are_told_by_the_help_of_every_command_about_jobs(command, capsys):
    code, said = answer(capsys, command, "--help")
    assert code == 0
    assert "exit code: 0" in said
