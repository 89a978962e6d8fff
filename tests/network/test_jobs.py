"""Jobs on a Ray cluster between whose nodes there is a network that is slow, loses, or is cut.

A head without CPUs for ranks and two workers, each a machine of its own (nodes.py), with one rank
on each worker. What must come out is the curve of a run on one machine that nothing happens to.

They take minutes: `make nightly` and `make chaos` run them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import assert_nothing_left, entries_of, rank_pids, wait_for, wait_for_end, wait_for_step

from moebius.cluster.job import Journal, JournalEntry, State, read_generation, read_status
from moebius.cluster.stop import request_stop, stop
from moebius.distributed.process.store import is_loopback
from tests.chaos.job_under_fire import changes, curve, write_texts
from tests.network.nodes import why_not
from tests.network.ray_nodes import RayCluster, ray_cluster

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS = 40  # a fast machine must not be through before something is cut
SMALLER = (
    f"train.steps={STEPS}",
    "train.global_batch=2",
    "model.num_layers=2",
    "checkpoint.every=4",
    "job.start_timeout_s=600",  # on a busy machine
)
PATIENCE_S = 600.0
# Who listens on a machine: address, port, and whether it is a rank; of a run's processes.
LISTENERS = """
import json, sys, psutil
from moebius.cluster.nodes import processes
run = processes.find(sys.argv[1])
print(json.dumps([
    [one.laddr.ip, one.laddr.port, processes.RANK in run[one.pid]]
    for one in psutil.net_connections("tcp")
    if one.status == psutil.CONN_LISTEN and one.pid in run
]))
"""
# As `moebius submit` does it, but nodes wait 15 s for their supervisor and not 120.
SUBMIT_IMPATIENT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from moebius.cluster.job import begin_submission
from moebius.cluster.places.standing import cluster_at
from moebius.cluster.launch import make_launch
from moebius.cluster.supervise.actor import start_supervisor
from moebius.train.record.run_folder import open_run
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
run_dir, address, overrides = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = resolve("smoke", overrides, RECIPES)
open_run(config, run_dir)
with cluster_at(address):
    launch = replace(make_launch(config, run_dir, address=address), supervisor_timeout_s=15.0)
    begin_submission(launch)
    start_supervisor(launch)
"""
# A stranger who knocks and says nonsense: how much each door tells him, and whether it is shut.
STRANGER = """
import json, secrets, socket, sys
told = []
for port in sys.argv[3:]:
    with socket.create_connection((sys.argv[1], int(port)), timeout=60) as door:
        door.sendall(secrets.token_bytes(512))
        door.settimeout(float(sys.argv[2]))
        heard, is_shut = 0, True
        try:
            while data := door.recv(4096):
                heard += len(data)
        except TimeoutError:
            is_shut = False
        except ConnectionError:
            pass
    told.append([heard, is_shut])
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Prepared:
    """Data on the file system that all share, and the curve of a run that nothing happens to."""

    folder: Path
    curve: Mapping[int, tuple[Any, float]]

    def overrides(self, *others: str) -> list[str]:
        small = changes(self.folder, "data", minutes=0.2, nodes=2)
        return ["smoke", *small, *SMALLER, *others]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # write_texts adds to it
        write_texts(folder, 0.2)
        here = ["job.num_nodes=1", "job.ranks_per_node=2", "--run-dir", str(folder / "alone")]
        program = "from moebius.cli.main import main; main()"
        overrides = Prepared(folder, {}).overrides(*here)
        done = subprocess.run(
            [sys.executable, "-c", program, "train", *overrides],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield Prepared(folder, curve(folder / "alone"))


@pytest.fixture(scope="module")
def standing(prepared: Prepared) -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(standing: RayCluster) -> Iterator[RayCluster]:
    """The cluster, with all of its nodes and whole wires."""
    standing.await_nodes()
    yield standing
    standing.net.reset()


def submit(cluster: RayCluster, prepared: Prepared, run_dir: Path, *overrides: str) -> None:
    asked = [*prepared.overrides(*overrides), "--run-dir", str(run_dir)]
    told = cluster.moebius("submit", *asked, "--address", cluster.address, "--detach")
    assert told.returncode == 0, told.stdout + told.stderr


def machine_of(cluster: RayCluster, run_dir: Path, node: int) -> int:
    """The number of the machine that is a node of the last generation."""
    generation = read_generation(run_dir)
    told = run_dir / "logs" / f"g{generation:03d}" / f"node{node}" / "assignment.json"
    return cluster.net.addresses.index(json.loads(told.read_text())["address"])


def wait_for_words(run_dir: Path, words: str) -> JournalEntry:
    """Until a line of the journal holds these words."""
    return wait_for(
        lambda: next((e for e in Journal(run_dir).entries() if words in e.reason), None),
        timeout_s=PATIENCE_S,
        what=f"{words!r} in the journal of {run_dir}",
    )


def assert_ended_right(run_dir: Path, prepared: Prepared, *, generation: int) -> None:
    """It has come to its last step with the undisturbed curve, and nothing is left of it."""
    status = wait_for_end(run_dir, timeout_s=PATIENCE_S)
    assert (status.state, status.generation) == (State.SUCCEEDED, generation), status.reason
    assert curve(run_dir) == prepared.curve
    assert_nothing_left(run_dir, within_s=PATIENCE_S)


def assert_stops_right(run_dir: Path, prepared: Prepared, *, after: int) -> None:
    """It makes some steps of the undisturbed curve in its first generation, and stops when asked."""
    wait_for_step(run_dir, after, timeout_s=PATIENCE_S)
    request_stop(run_dir)
    status = wait_for_end(run_dir, timeout_s=PATIENCE_S)
    assert status.state in (State.STOPPED, State.SUCCEEDED), status.reason
    assert status.generation == 1
    made = curve(run_dir)
    assert len(made) >= after
    assert made == {step: prepared.curve[step] for step in made}
    assert_nothing_left(run_dir, within_s=PATIENCE_S)


@pytest.mark.fault("N7")
def test_ranks_listen_on_the_cluster_s_addresses_alone(cluster, prepared, tmp_path):
    submit(cluster, prepared, tmp_path, "train.steps=100000")
    wait_for_step(tmp_path, 3, timeout_s=PATIENCE_S)
    for node in (0, 1):
        machine = machine_of(cluster, tmp_path, node)
        address = cluster.net.addresses[machine]
        command = [sys.executable, "-c", LISTENERS, str(tmp_path)]
        told = cluster.net.run(machine, *command, **cluster.environment)
        listeners = json.loads(told.stdout)
        assert {host for host, _, _ in listeners if not is_loopback(host)} == {address}
        of_ranks = [port for host, port, is_rank in listeners if host == address and is_rank]
        of_agent = [port for host, port, is_rank in listeners if host == address and not is_rank]
        assert of_ranks, "Gloo's"
        assert len(of_agent) == (1 if node == 0 else 0), "the gate of the store"
        for heard, is_shut in knock(cluster, address, of_agent, timeout_s=120):
            assert is_shut
            assert heard <= 32, "no more than the random number of the gate"
        knock(cluster, address, of_ranks, timeout_s=1)
    step = read_status(tmp_path).step
    assert step is not None
    wait_for_step(tmp_path, step + 3, timeout_s=PATIENCE_S)
    status = stop(tmp_path, timeout_s=PATIENCE_S)
    assert (status.state, status.generation) == (State.STOPPED, 1), status.reason
    assert_nothing_left(tmp_path, within_s=PATIENCE_S)


def knock(
    cluster: RayCluster, address: str, ports: list[int], *, timeout_s: int
) -> list[tuple[int, bool]]:
    """What the head, which is none of the job's nodes, hears at these ports."""
    if not ports:
        return []
    command = [sys.executable, "-S", "-c", STRANGER, address, str(timeout_s), *map(str, ports)]
    told = cluster.net.run(0, *command, timeout_s=PATIENCE_S)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


@pytest.mark.fault("N4")
def test_a_node_that_was_cut_off_comes_back_and_nobody_trains_twice(cluster, prepared, tmp_path):
    submit(cluster, prepared, tmp_path)
    wait_for_step(tmp_path, 5, timeout_s=PATIENCE_S)
    machine = machine_of(cluster, tmp_path, 1)
    address = cluster.net.addresses[machine]
    began = time.monotonic()
    cluster.net.cut(machine)
    old = list(rank_pids(tmp_path).values())
    missing = wait_for_words(tmp_path, "1 node(s) missing since")
    assert missing.state is State.PLACING
    assert "it needs at least 2" in missing.reason
    time.sleep(max(0.0, began + 10.0 - time.monotonic()))
    cluster.net.heal(machine)
    assert_ended_right(tmp_path, prepared, generation=2)
    [lost] = entries_of(tmp_path, State.RECOVERING)
    assert lost.reason.startswith(f"node 1 was lost: its agent actor died at {address} ")
    assert lost.details["charged_to"] == "infrastructure"
    assert not any(psutil.pid_exists(pid) for pid in old)


@pytest.mark.fault("N6")
def test_nodes_that_do_not_reach_each_other_are_named(cluster, prepared, tmp_path):
    limits = ["job.limits.step_s=15", "job.limits.phase_s=15"]
    submit(cluster, prepared, tmp_path, *limits)
    wait_for_step(tmp_path, 5, timeout_s=PATIENCE_S)
    names = [
        f"node {node} ({cluster.net.addresses[machine_of(cluster, tmp_path, node)]})"
        for node in (0, 1)
    ]
    cluster.net.cut(1, 2)
    waiting = wait_for_words(tmp_path, "the job waits for the network between them")
    assert waiting.state is State.PLACING
    cluster.net.heal(1, 2)
    assert_ended_right(tmp_path, prepared, generation=2)
    [hang] = entries_of(tmp_path, State.RECOVERING)
    words = f"{names[0]} and {names[1]} cannot reach each other over the network: all ranks hang"
    assert hang.reason.startswith(words)
    assert hang.details["charged_to"] == "infrastructure"


@pytest.mark.fault("N1", "N2")
@pytest.mark.parametrize("harm", ["50 ms of delay", "a loss of 5 percent"])
def test_a_network_that_is_slow_or_loses_changes_no_bit(cluster, prepared, tmp_path, harm):
    loses = "loss" in harm
    cluster.net.lose(0.05) if loses else cluster.net.slow(0.05)
    submit(cluster, prepared, tmp_path)
    assert_stops_right(tmp_path, prepared, after=10 if loses else 5)
    assert bool(cluster.net.wire(1, 2)["lost"]) == loses


@pytest.mark.fault("N3")
def test_a_cut_of_10_s_is_waited_out(cluster, prepared, tmp_path):
    submit(cluster, prepared, tmp_path)
    wait_for_step(tmp_path, 5, timeout_s=PATIENCE_S)
    machine = machine_of(cluster, tmp_path, 1)
    cluster.net.cut(machine)
    time.sleep(10.0)
    cluster.net.heal(machine)
    assert_ended_right(tmp_path, prepared, generation=1)


@pytest.mark.fault("N5")
def test_a_node_that_stays_cut_off_is_done_without(cluster, prepared, tmp_path):
    """Ray leaves the ranks there alone for minutes, and so does their collective's timeout here:
    the silence of their supervisor ends them.
    """
    fewer = ["job.min_nodes=1", "job.wait_for_node_s=2", "train.timeout_s=600"]
    overrides = json.dumps(prepared.overrides(*fewer)[1:])
    command = [sys.executable, "-c", SUBMIT_IMPATIENT, str(tmp_path), cluster.address, overrides]
    told = cluster.net.run(0, *command, timeout_s=PATIENCE_S, **cluster.environment)
    assert told.returncode == 0, told.stderr
    wait_for_step(tmp_path, 5, timeout_s=PATIENCE_S)
    machine = machine_of(cluster, tmp_path, 0)
    address = cluster.net.addresses[machine]
    old = rank_pids(tmp_path)
    cluster.net.cut(machine)
    status = wait_for_end(tmp_path, timeout_s=PATIENCE_S)
    assert (status.state, status.generation) == (State.SUCCEEDED, 2), status.reason
    wait_for(
        lambda: not any(psutil.pid_exists(pid) for pid in old.values()),
        timeout_s=PATIENCE_S,
        what="the end of the ranks that are cut off",
    )
    cluster.net.heal(machine)
    assert_nothing_left(tmp_path, within_s=PATIENCE_S)  # Ray ends their node's actor
    [lost] = entries_of(tmp_path, State.RECOVERING)
    assert lost.reason.startswith(f"node 0 was lost: its agent actor died at {address} ")
    [_, smaller] = entries_of(tmp_path, State.STARTING)
    assert "on 1 node(s) instead of 2" in smaller.reason
    made = curve(tmp_path)
    assert {step: digest for step, (digest, _) in made.items()} == {
        step: digest for step, (digest, _) in prepared.curve.items()
    }
    losses = [pytest.approx(loss, rel=1e-3) for _, loss in prepared.curve.values()]
    assert [loss for _, loss in made.values()] == losses
