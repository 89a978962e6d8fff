"""Tests where a node sees its ranks: ages, dead and stopped ranks, and ranks without a CPU."""

import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from jobs import wait_for

from moebius.cluster.watch import heartbeats
from moebius.cluster.watch.heartbeats import (
    GONE,
    STOPPED,
    WatchedRanks,
    folder_of,
    process_state,
)
from moebius.train.record import heartbeat
from moebius.train.record.heartbeat import (
    FOLDER,
    PAGE_BYTES,
    Heartbeat,
    Phase,
    open_heartbeat,
    page_of,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Makes the folder of two ranks; this process writes the page of the second."""
    ranks = WatchedRanks(tmp_path / "run-node0-g001", range(2))
    ranks.open()
    monkeypatch.setenv(FOLDER, str(ranks.folder))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(heartbeat.threading.Thread, "start", lambda thread: None)
    yield ranks, open_heartbeat()
    heartbeat.faulthandler.unregister(signal.SIGUSR1)


def test_a_rank_that_trains_has_a_state_and_another_has_none(watched, monkeypatch):
    ranks, beats = watched
    beats.begin_step(5)
    began = beats._since_s
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: began + 2.5)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # somebody has set the clock
    [state] = ranks.look()
    assert (state.rank, state.phase, state.step, state.age_s) == (1, "compile", 5, 2.5)


@linux
def test_the_state_of_the_process_is_told(watched, monkeypatch):
    ranks, beats = watched
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        beats._pid = child.pid
        beats._started_ticks = heartbeat.started_ticks(child.pid)
        beats.enter(Phase.STEP)
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(ranks.beats()[1]) in STOPPED, what="the stop")
        stopped = process_state(ranks.beats()[1])
        child.kill()
        child.communicate()
    assert stopped == "T"
    assert process_state(ranks.beats()[1]) == GONE
    beats._pid, beats._started_ticks = os.getpid(), 1  # another process with the same number
    beats.enter(Phase.STEP)
    assert process_state(ranks.beats()[1]) == GONE


@pytest.mark.fault("F30")
def test_what_a_rank_waits_for_a_cpu_counts_for_its_phase_from_the_look_before(
    watched, monkeypatch
):
    ranks, beats = watched
    ready_s = iter([10.0, 14.0, 20.0, 21.0, 999.0])
    monkeypatch.setattr(heartbeats, "_ready_without_cpu_ns", lambda pid: int(next(ready_s) * 1e9))
    began = beats._since_s
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: began + 50.0)
    assert [ranks.look()[0].starved_s for _ in range(2)] == [0.0, 4.0]
    beats._since_s = began + 1.0
    beats._write()
    assert [ranks.look()[0].starved_s for _ in range(2)] == [6.0, 7.0]
    assert ranks.look()[0].starved_s == 49.0  # never more than the phase's age


def test_a_new_generation_removes_the_pages_of_older_ones_of_its_node_alone(tmp_path):
    old = WatchedRanks(tmp_path / "run-node1-g001", [0])
    other = WatchedRanks(tmp_path / "run-node10-g001", [1])
    for ranks in (old, other):
        ranks.open()
        (ranks.folder / "rank0.beat").write_bytes(b"")
    new = WatchedRanks(tmp_path / "run-node1-g002", [0])
    new.open()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "run-node1-g002",
        "run-node10-g001",
    ]
    new.close()
    new.close()
    assert not new.folder.exists()


def test_the_folder_is_this_users_alone(tmp_path, monkeypatch):
    private = folder_of(str(tmp_path), 3, 2).parent
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert folder_of(str(tmp_path), 3, 2) == folder_of(str(tmp_path), 3, 2)
    assert folder_of(str(tmp_path), 3, 2) != folder_of(str(tmp_path / "a"), 3, 2)


def test_a_folder_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "_IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(heartbeats.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    name = f"moebius-{os.getuid()}"
    (tmp_path / "memory" / name).mkdir(parents=True, mode=0o777)
    (tmp_path / "memory" / name).chmod(0o777)
    (tmp_path / "tmp").mkdir()
    assert folder_of("/run", 1, 0).parent == tmp_path / "tmp" / name
    (tmp_path / "tmp" / name).rmdir()
    (tmp_path / "tmp" / name).symlink_to(tmp_path)
    assert folder_of(str(tmp_path), 1, 0).parent == tmp_path / "logs" / "heartbeats"


@linux
def test_what_killed_nodes_have_left_is_swept_and_nothing_else(tmp_path):
    """A folder is swept only if it is private, of this user, and of a dead process of this machine."""
    code = (
        "from pathlib import Path; import sys\n"
        "from moebius.cluster.watch.heartbeats import WatchedRanks\n"
        "for folder in sys.argv[1:]: WatchedRanks(Path(folder), range(1)).open()\n"
    )
    names = {
        "killed": f"{'a' * 16}-node0-g001",
        "open to others": f"{'b' * 16}-node0-g001",
        "of another container": f"{'c' * 16}-node0-g001",
        "with a rank that lives": f"{'d' * 16}-node0-g001",
        "of no owner": f"{'e' * 16}-node0-g001",
        "with a bad owner": f"{'f' * 16}-node0-g001",
    }
    paths = {what: tmp_path / name for what, name in names.items()}
    somebody_elses = tmp_path / "tmp-of-something"
    made = [somebody_elses, *paths.values()]
    subprocess.run([sys.executable, "-c", code, *map(str, made)], check=True)
    (tmp_path / f"{'0' * 16}-node0-g001").symlink_to(somebody_elses)
    paths["open to others"].chmod(0o755)
    owner = json.loads((paths["killed"] / "owner.json").read_text())
    assert owner["pid_namespace"]
    other = owner | {"pid_namespace": "pid:[1]"}
    (paths["of another container"] / "owner.json").write_text(json.dumps(other))
    (paths["of no owner"] / "owner.json").unlink()
    (paths["with a bad owner"] / "owner.json").write_text("[1, 2")
    page = page_of(paths["with a rank that lives"], 0)
    page.write_bytes(bytes(PAGE_BYTES))
    with open(page, "r+b") as file:
        Heartbeat(mmap.mmap(file.fileno(), PAGE_BYTES))

    before = {path.name for path in tmp_path.iterdir()}
    own = WatchedRanks(tmp_path / f"{'9' * 16}-node0-g001", range(1))
    own.open()
    assert {path.name for path in tmp_path.iterdir()} - {own.folder.name} == before - {
        names["killed"]
    }
    heartbeats.sweep(tmp_path)
    assert own.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_time_without_a_cpu_at_a_start_adds_up_from_template_to_ranks(tmp_path, monkeypatch):
    marks = {1: {}, 2: {}, 3: {"RANK": "0"}, 4: {"RANK": "1"}, 5: {"RANK": "9"}}
    ready_s = {1: 10.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 500.0}
    monkeypatch.setattr(heartbeats.processes, "find", lambda run_dir: {1: {}})
    monkeypatch.setattr(heartbeats, "_ready_without_cpu_ns", lambda pid: int(ready_s[pid] * 1e9))
    ranks = WatchedRanks(tmp_path / "run-node0-g001", range(2))
    ranks.open(str(tmp_path))
    monkeypatch.setattr(heartbeats.processes, "find", lambda run_dir: marks)
    ready_s[1] = 11.0  # only what was waited since the generation began
    assert ranks.starved_at_start_s() == pytest.approx(1.0 + 2.0 + 4.0)
