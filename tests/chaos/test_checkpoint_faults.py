"""F15, F22 in whole jobs: two ranks on two simulated nodes share the experts and save every five steps.

The tests damage their checkpoints. Each job must end with the samples, losses and weights of an undisturbed
run.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import (
    assert_nothing_left,
    begin,
    metrics,
    standing_cluster,
    wait_for,
    wait_for_end,
    wait_for_step,
)
from world import run_ranks

from moebius.cluster.job import JobStatus, Journal, State, read_status
from moebius.cluster.launch import make_launch
from moebius.cluster.nodes import processes
from moebius.cluster.places.standing import StandingCluster, cluster_at
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.checkpoint.format import list_checkpoints
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data
from tests.chaos.job_under_fire import curve, weights_hash
from tests.tiny_job import TINY_JOB, write_paragraphs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("standing"),
]
SMALL = (
    *TINY_JOB,
    "train.steps=40",
    "checkpoint.every=5",
    "mesh.ep=2",
    "mesh.dp_replicate=1",
    "job.num_nodes=2",
    "job.ranks_per_node=1",
    "job.max_restarts=9",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint-faults")
    write_paragraphs(folder, paragraphs=120)
    return folder


def make_config(folder: Path, *changes: str) -> Config:
    overrides = [*SMALL, f"prepare.input=['{folder}/text.txt']", *changes]
    return place_data(resolve("smoke", overrides, RECIPES), folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """Makes the same run without a cluster, an agent or a fault."""
    config, run_dir = make_config(folder), folder / "undisturbed"
    open_run(config, run_dir)
    prepare(config.prepare, config.data.directory)
    assert run_ranks(train, 2, config, run_dir, timeout_s=180) == ["finished"] * 2
    return run_dir


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingCluster]:
    with standing_cluster(tmp_path_factory.mktemp("known"), 2, cpus=1) as made:
        yield made


class Disk:
    """Sends orders to faults/sitecustomize.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def environment(self) -> dict[str, str]:
        paths = [str(Path(__file__).parent / "faults"), os.environ.get("PYTHONPATH", "")]
        return {"MOEBIUS_TEST_FAULTS": str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}

    def order(self, text: str) -> None:
        (self.folder / "order.tmp").write_text(text)
        (self.folder / "order.tmp").rename(self.folder / "order")

    def held(self) -> int:
        """Returns the pid of the process that is held at the ordered place."""
        file = self.folder / "held"
        return int(
            wait_for(lambda: file.exists() and file.read_text(), timeout_s=120, what="the phase")
        )

    def let_go(self) -> None:
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "order").unlink()


def submit(config: Config, run_dir: Path, disk: Disk) -> None:
    open_run(config, run_dir)
    with cluster_at("simulated"):
        launch = make_launch(config, run_dir, address="simulated")
        begin(replace(launch, environment={**launch.environment, **disk.environment()}))


def ended_like(run_dir: Path, undisturbed: Path) -> JobStatus:
    """Waits for the job's end, and checks that it equals the undisturbed run."""
    status = wait_for_end(run_dir, timeout_s=180)
    assert status.state is State.SUCCEEDED, status.reason
    assert curve(run_dir) == curve(undisturbed)
    assert weights_hash(run_dir) == weights_hash(undisturbed)
    assert_nothing_left(run_dir, within_s=30)
    return status


def reasons(run_dir: Path) -> str:
    return "\n".join(entry.reason for entry in Journal(run_dir).entries())


def resumed_from(run_dir: Path) -> list[int | None]:
    return [line["resumed_from_step"] for line in metrics(run_dir, "start")]


@pytest.mark.fault("F15")
def test_f15_a_rank_is_killed_in_each_phase_of_a_save(folder: Path, undisturbed: Path) -> None:
    """While it writes tensors, while the manifest is written, and before the rename."""
    run_dir, disk = folder / "killed", Disk(folder / "disk of killed")
    submit(make_config(folder), run_dir, disk)
    committed = []
    for place in (".distcp", "manifest.json", "commit"):
        wait_for_step(run_dir, 6 * len(committed) + 6, timeout_s=120)
        disk.order(f"hold {place}")
        victim = disk.held()
        step = read_status(run_dir).step
        committed.append(list_checkpoints(run_dir / "checkpoints")[-1].step)
        assert list((run_dir / "checkpoints").glob("*.tmp"))
        processes.kill(victim)
        disk.let_go()
        wait_for_step(run_dir, (step or 0) + 1, timeout_s=120)
    ended_like(run_dir, undisturbed)
    assert resumed_from(run_dir) == [None, *committed]
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


@pytest.mark.fault("F22")
def test_f22_the_disk_is_full_for_a_while(folder: Path, undisturbed: Path) -> None:
    run_dir, disk = folder / "full", Disk(folder / "disk of full")
    disk.order("full .distcp")
    submit(make_config(folder), run_dir, disk)
    wait_for(
        lambda: run_dir.exists() and "No space left on device" in reasons(run_dir),
        timeout_s=120,
        what="the journal to say so",
    )
    disk.let_go()
    status = ended_like(run_dir, undisturbed)
    assert status.restarts == 0
    assert "there is no earlier one" in reasons(run_dir)


@pytest.mark.fault("F22")
def test_f22_a_job_may_be_told_to_end_then(folder: Path) -> None:
    run_dir, disk = folder / "stop", Disk(folder / "disk of stop")
    disk.order("full .distcp")
    config = make_config(folder, "checkpoint.on_failure=stop", "train.steps=100000")
    submit(config, run_dir, disk)
    status = wait_for_end(run_dir, timeout_s=180)
    assert status.state is State.FAILED
    assert status.restarts == 0
    assert 'checkpoint.on_failure="stop": the checkpoint of step 5 was not saved' in status.reason
    assert "No space left on device" in status.reason
    assert_nothing_left(run_dir, within_s=30)
