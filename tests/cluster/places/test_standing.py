"""Tests the simulated cluster that stays: found by its note, asked through a socket, gone without a trace."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import wait_for

from moebius.cluster.job import JobError
from moebius.cluster.nodes import processes
from moebius.cluster.places import host, standing
from moebius.cluster.places.simulated import new_directory
from moebius.cluster.places.standing import (
    StandingCluster,
    cluster_if_up,
    find_cluster,
    start_cluster,
    state_folder,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "moebius"


class FakeNodes:
    """Answers like PretendedNodes, without Ray."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.added = 0

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"node": 0, "address": "127.0.0.2", "cpus": 4, "gpus": 0, "state": "alive"},
            {"node": 1, "address": "127.0.0.3", "cpus": 4, "gpus": 0, "state": "killed"},
        ]

    def kill(self, number: int) -> int:
        if number == 0:
            raise ValueError("node 0 is the head")
        self.killed.append(number)
        return 7

    def add(self) -> int:
        self.added += 1
        return 2


def note(directory: Path, pid: int, started: float) -> None:
    cluster = StandingCluster("127.0.0.2:1", str(directory), "token", pid, started)
    folder = state_folder() / "cluster"
    folder.mkdir(parents=True, mode=0o700)
    (folder / standing.NOTE).write_text(json.dumps(asdict(cluster)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNodes]:
    """Starts a cluster whose host is a thread of this process."""
    monkeypatch.setattr(host, "_reap", lambda: None)  # the children of the tests are not its own
    monkeypatch.setattr(host, "REAP_EVERY_S", 0.05)
    directory, nodes = new_directory(), FakeNodes()
    me = psutil.Process()
    note(directory, me.pid, me.create_time())
    listener = host._listen(directory / host.CONTROL)
    serving: Any = host._answer_requests
    thread = threading.Thread(target=serving, args=(nodes, listener))
    thread.start()
    yield nodes
    if thread.is_alive():
        find_cluster().ask("down")
    thread.join(100)
    listener.close()
    shutil.rmtree(directory)


def test_the_commands_ask_the_host(fake, moebius, monkeypatch):
    shown = moebius("cluster", "up")
    assert shown.code == 0
    assert "at 127.0.0.2:1 node 0 127.0.0.2 4 CPUs, 0 GPUs alive node 1" in shown.text
    record = json.loads(moebius("cluster", "up", "--json").out)
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    table = page.partition("<!-- cluster -->")[2].partition("<!-- end -->")[0]
    documented = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert documented == [*record, *(f"nodes[].{key}" for key in record["nodes"][0])]
    assert moebius("cluster", "up", "--simulate", "4").out == shown.out, "it is up"
    with pytest.raises(JobError, match="a simulated cluster is up: use it"):
        standing._claim()
    assert moebius("cluster", "down", "--node", "1").out == "killed node 1 with 7 processes\n"
    assert fake.killed == [1]
    refused = moebius("cluster", "down", "--node", "0")
    assert refused.code == 2
    assert "simulated cluster: node 0 is the head" in refused.text
    assert moebius("cluster", "up", "--add-node").code == 0
    assert fake.added == 1
    monkeypatch.setattr(host, "runs_at_work", lambda: ["/runs/at-work"])
    refused = moebius("cluster", "down")
    assert refused.code == 2
    assert "jobs are running in the simulated cluster: /runs/at-work" in refused.text


def test_a_host_is_asked_in_a_line_of_json_and_survives_anything_else(fake):
    import socket

    cluster = find_cluster()
    for sent in (b"", b"\n", b"[]\n", b"{" * 9000 + b"\n", b'{"do": "burn"}\n', b"\xff\xfe\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(Path(cluster.directory) / host.CONTROL))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    with pytest.raises(JobError, match="unknown request 'burn'"):
        cluster.ask("burn")
    assert cluster.ask("status")["runs"] == []


def test_only_one_command_starts_a_cluster_in_a_folder_of_the_users_own(state):
    state.mkdir(parents=True)
    state.chmod(0o777)
    folder = standing._claim()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (state, folder)] == [0o700] * 2
    with pytest.raises(JobError, match="another command has been starting this cluster"):
        standing._claim()


def test_what_a_dead_host_left_is_swept(state):
    directory = new_directory()
    code = "import time; time.sleep(60)"
    left = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"RAY_TMPDIR": str(directory)}
    )
    wait_for(lambda: host.processes_of(str(directory)) == [left.pid], what="its environment")
    me = psutil.Process()
    note(directory, me.pid, me.create_time() - 100)  # a number that was given out again
    assert cluster_if_up() is None
    left.wait(60)
    assert not directory.exists()
    assert not state.exists(), "nothing of it is left, nor of us"


LEAVE = """
import os, signal
from moebius.cluster.places.simulated import new_directory
print(new_directory(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_cluster_that_was_killed_with_its_command_is_swept():
    own = new_directory()
    for look in (new_directory, cluster_if_up):
        command = [sys.executable, "-c", LEAVE]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        left = Path(killed.stdout.strip())
        assert left.exists()
        if isinstance(made := look(), Path):
            shutil.rmtree(made)
        assert not left.exists()
    assert own.exists(), "a living process's is left alone"
    shutil.rmtree(own)


def test_a_note_never_leads_to_the_removal_of_a_folder_that_is_no_clusters(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    note(precious, os.getpid(), 1.0)
    with pytest.raises(JobError, match="start one with `moebius cluster up --simulate 4`"):
        find_cluster()
    assert precious.exists()


def is_there(pid: int) -> bool:
    """Returns whether a process runs; a zombie has no program."""
    return Path(f"/proc/{pid}/exe").exists()


@pytest.mark.slow
def test_a_cluster_whose_host_is_killed_is_swept(state):
    pytest.importorskip("ray")
    cluster = start_cluster(1, cpus_per_node=1)
    everything = processes.descendants(cluster.host_pid)
    processes.kill(cluster.host_pid)
    wait_for(lambda: not cluster.is_alive(), what="the host to be gone")
    assert cluster_if_up() is None
    wait_for(lambda: not any(map(is_there, everything)), what="all of it to be gone")
    assert not Path(cluster.directory).exists()
    assert not state.exists()
