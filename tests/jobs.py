"""Observes a job's processes from outside."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.job import (
    JOURNAL,
    JobStatus,
    Journal,
    JournalEntry,
    Launch,
    State,
    begin_submission,
    read_status,
)
from moebius.cluster.liveness import beat
from moebius.cluster.nodes import processes
from moebius.cluster.nodes.provider import ThisMachine
from moebius.cluster.places.standing import (
    StandingCluster,
    cluster_at,
    end_cluster,
    start_cluster,
)
from moebius.cluster.supervise.job_supervisor import supervise

FAKE_RANK = Path(__file__).parent / "cluster" / "fake_rank.py"


@contextlib.contextmanager
def living(run_dir: Path) -> Iterator[None]:
    """Simulates a supervisor's signs of life in this folder."""
    ended = threading.Event()

    def beats() -> None:
        while not ended.wait(0.05):
            beat(run_dir)

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def fake_launch(run_dir: Path, *options: str, **values) -> Launch:
    """Launches ranks of fake_rank.py."""
    return Launch(
        str(run_dir), command=(sys.executable, str(FAKE_RANK), str(run_dir), *options), **values
    )


def run_here(launch: Launch) -> JobStatus:
    """Runs a job of one node in this process to its end."""
    begin_submission(launch)
    supervise(launch, ThisMachine())
    return read_status(Path(launch.run_dir))


@contextlib.contextmanager
def standing_cluster(folder: Path, nodes: int, *, cpus: int) -> Iterator[StandingCluster]:
    """Starts a simulated cluster known only in this folder."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        cluster = start_cluster(nodes, cpus_per_node=cpus)
        try:
            yield cluster
        finally:
            end_cluster(cluster, force=True)


def begin(launch: Launch) -> Path:
    """Hands a job to a supervisor in the connected cluster."""
    from moebius.cluster.supervise.actor import start_supervisor

    begin_submission(launch)
    start_supervisor(launch)
    return Path(launch.run_dir)


def begin_standing(launch: Launch) -> Path:
    """Hands a job to a supervisor in the simulated cluster that is up."""
    with cluster_at("simulated"):
        return begin(launch)


def entries_of(run_dir: Path, state: State) -> list[JournalEntry]:
    return [entry for entry in Journal(run_dir).entries() if entry.state is state]


def wait_for(
    condition: Callable[[], Any], *, timeout_s: float = 100.0, what: str = "the condition"
) -> Any:
    """Polls until the condition is true; returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return value


def wait_for_step(run_dir: Path, step: int, *, timeout_s: float = 100.0) -> JobStatus:
    wait_for((run_dir / JOURNAL).exists, what="the journal")
    return wait_for(
        lambda: (
            (status := read_status(run_dir)).step is not None and status.step >= step and status
        ),
        timeout_s=timeout_s,
        what=f"step {step} in {run_dir}",
    )


def let_go(run_dir: Path) -> None:
    """Ends the `hold` of fake ranks."""
    (run_dir / "go-on").touch()


def wait_for_end(run_dir: Path, *, timeout_s: float = 200.0) -> JobStatus:
    return wait_for(
        lambda: (status := read_status(run_dir)).state.is_final and status,
        timeout_s=timeout_s,
        what=f"the end of {run_dir}",
    )


def rank_pids(run_dir: Path) -> dict[int, int]:
    """Returns a run's living ranks: rank -> pid."""
    found = processes.find(str(run_dir)).items()
    return {int(environment["RANK"]): pid for pid, environment in found if "RANK" in environment}


def agent_pids(run_dir: Path) -> dict[int, int]:
    """Returns a run's living agents: their pid -> their parent's pid."""
    found = processes.find(str(run_dir)).items()
    return {
        pid: int(environment[processes.PARENT])
        for pid, environment in found
        if "RANK" not in environment and processes.MARK_GENERATION in environment
    }


def template_pids(run_dir: Path) -> list[int]:
    """Returns a run's living template processes."""
    found = processes.find(str(run_dir)).items()
    return [pid for pid, environment in found if processes.MARK_GENERATION not in environment]


def used_nodes(run_dir: Path, generation: int) -> list[int]:
    """Returns the simulated nodes that a generation runs on."""
    attempts = run_dir.glob(f"logs/g{generation:03d}/node*/assignment.json")
    addresses = [json.loads(path.read_text())["address"] for path in attempts]
    return sorted(int(address.rpartition(".")[2]) - 2 for address in addresses)


def assert_nothing_left(run_dir: Path, *, within_s: float = 30.0) -> None:
    wait_for(
        lambda: not processes.find(str(run_dir)),
        timeout_s=within_s,
        what=f"the processes of {run_dir} to be gone",
    )


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Returns a run's records of a kind."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def curve(run_dir: Path) -> dict[int, float]:
    """Returns the loss by step; the last one of a repeated step."""
    return {line["step"]: line["loss"] for line in metrics(run_dir, "train")}


def undisturbed(num_ranks: int, steps: int) -> dict[int, float]:
    """Returns what an undisturbed fake_rank.py computes."""
    loss, losses = 100.0, {}
    for step in range(1, steps + 1):
        loss = loss * 0.9 + sum(range(1, num_ranks + 1)) / 1000 + step % 7
        losses[step] = loss
    return losses
