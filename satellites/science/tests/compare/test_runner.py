"""Runs as processes: finished once, resumed, failed, stopped; with a stand-in that trains nothing."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from compared import finish, planned, wait_for

from moebius_science.compare.file import CompareError
from moebius_science.compare.plan import PlannedRun
from moebius_science.compare.runner import Phase, is_trained, locked, next_phase, restart, run_all

# Counts how often it was started; makes six steps, or waits until it is asked to stop or its
# standard input ends.
STAND_IN = """
import json, os, signal, sys, threading, time
phase, folder, mood = sys.argv[1:]
def put(name, value, mode="w"):
    with open(os.path.join(folder, name), mode) as file: file.write(json.dumps(value) + "\\n")
with open(os.path.join(folder, "starts"), "a") as file: file.write(phase + "\\n")
def end(state):
    put("journal.jsonl", {"time": time.time(), "state": state, "generation": 1, "reason": "",
                          "details": {}}, "a")
    os._exit(0)
if phase == "score":
    with open(os.path.join(folder, "scoring.json")) as file: request = json.load(file)
    put("scores.json", {"request": request, "scores": {"piqa": {"acc": 0.5}}})
    sys.exit()
if mood == "fails" and folder.endswith("single/seed-1"):
    sys.exit("no luck today")
if mood == "waits":
    signal.signal(signal.SIGINT, lambda *_: end("STOPPED"))
for step in range(1, 7):
    put("metrics.jsonl", {"kind": "train", "step": step, "time": 1.0, "loss": 1.0}, "a")
if mood == "waits":
    os.read(0, 1)
    os._exit(1)
end("SUCCEEDED")
"""


def stand_in(mood: str) -> Callable[[PlannedRun, Phase], Sequence[str]]:
    def command(run: PlannedRun, phase: Phase) -> Sequence[str]:
        return (sys.executable, "-S", "-c", STAND_IN, phase, str(run.folder), mood)

    return command


def starts(run: PlannedRun) -> list[str]:
    return (run.folder / "starts").read_text().split()


def test_every_run_is_trained_once_and_scored_once(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    tasks = {"tasks": ["piqa"], "data": "hub", "limit": None}
    ended: list[str] = []
    for _ in range(2):
        states = run_all(
            runs,
            at_once=2,
            scoring=lambda run: tasks,
            command=stand_in("finishes"),
            on_end=lambda state: ended.append(state.run.name),
        )
        assert {state.state for state in states} == {"finished"}
        assert {state.step for state in states} == {6}
    assert sorted(ended) == sorted(run.name for run in runs)
    assert all(starts(run) == ["train", "score"] for run in runs)
    assert next_phase(runs[0], lambda run: tasks | {"limit": 5}) == "score"  # another request
    finish(runs[0], state="FAILED")
    assert not is_trained(runs[0])


def test_a_failed_run_is_told_and_the_others_go_on(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    states = run_all(runs, at_once=1, command=stand_in("fails"))
    failed = [state for state in states if state.state == "failed"]
    assert [state.run.name for state in failed] == ["single, seed 1"]
    assert "single, seed 1: ended with exit code 1" in failed[0].why
    assert "no luck today" in failed[0].why
    assert sum(state.state == "finished" for state in states) == 5
    run_all(runs, at_once=1, command=stand_in("finishes"))
    assert all(is_trained(run) for run in runs)
    assert [len(starts(run)) for run in runs] == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_all_runs_save_and_end(tmp_path: Path, number: int):
    _, _, runs = planned(tmp_path)
    processes = []

    def interrupt() -> None:
        wait_for(lambda: all((run.folder / "metrics.jsonl").exists() for run in runs[:2]))
        os.kill(os.getpid(), number)

    def note(states: Sequence) -> None:
        processes.extend(state.process.pid for state in states if state.process is not None)

    before = signal.getsignal(number)
    asking = threading.Thread(target=interrupt)
    asking.start()
    states = run_all(runs, at_once=2, command=stand_in("waits"), on_change=note)
    asking.join()
    assert signal.getsignal(number) is before
    assert [state.state for state in states] == ["stopped"] * 2 + ["waiting"] * 4
    assert processes
    assert not any(Path(f"/proc/{process}").exists() for process in set(processes))
    run_all(runs, at_once=2, command=stand_in("finishes"))
    assert all(is_trained(run) for run in runs)


def test_an_error_here_leaves_no_process_behind(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    processes = []

    def fail(states: Sequence) -> None:
        processes.extend(state.process.pid for state in states if state.process is not None)
        raise RuntimeError("the watcher broke")

    with pytest.raises(RuntimeError, match="broke"):
        run_all(runs, at_once=2, command=stand_in("waits"), on_change=fail)
    assert len(processes) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_a_second_process_is_refused(tmp_path: Path):
    with locked(tmp_path / "runs"):
        with pytest.raises(CompareError, match=f"process {os.getpid()} works on this comparison"):
            with locked(tmp_path / "runs"):
                pass
    with locked(tmp_path / "runs"):
        pass


def test_arms_can_be_begun_anew(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    run_all(runs, at_once=2, command=stand_in("finishes"))
    with pytest.raises(CompareError, match="--restart sut: is not one of the arms: moeut, single"):
        restart(runs, ["sut"])
    restart(runs, ["single"])
    assert [is_trained(run) for run in runs] == [True, False] * 3
