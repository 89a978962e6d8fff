"""Kills Ray's control store under a job: the journal says so, Ray ends, and a new cluster continues the job.

Ray ends its processes a minute later, which is most of the time of this test.
"""

from pathlib import Path

import psutil
import pytest
from jobs import (
    assert_nothing_left,
    begin_standing,
    curve,
    fake_launch,
    standing_cluster,
    undisturbed,
    wait_for,
    wait_for_step,
)

from moebius.cluster.job import Journal, State, read_status
from moebius.cluster.nodes import processes
from moebius.cluster.stop import stop


@pytest.mark.slow
@pytest.mark.nightly
def test_its_death_is_told_and_the_job_goes_on_in_another_cluster(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("plain=1", "steps=100000", "step_s=0.05", "every=5")
    launch = fake_launch(run_dir, *options, num_nodes=2, place_timeout_s=60.0)
    with standing_cluster(tmp_path, 2, cpus=1) as first:
        begin_standing(launch)
        wait_for_step(run_dir, 10)
        below = processes.descendants(first.host_pid)
        [store] = [pid for pid in below if psutil.Process(pid).name() == "gcs_server"]
        processes.kill(store)
        wait_for(lambda: read_status(run_dir).state is State.LOST, timeout_s=200, what="LOST")
        assert_nothing_left(run_dir, within_s=60)
    told = [entry.reason for entry in Journal(run_dir).entries()][-1]
    assert told.startswith(f"the cluster's control store at {first.address} does not answer")
    assert "run `moebius resume`" in told
    reached = max(curve(run_dir))
    with standing_cluster(tmp_path, 2, cpus=1):
        begin_standing(launch)  # as `moebius resume` does
        wait_for_step(run_dir, reached + 5)
        status = stop(run_dir, timeout_s=60)
        assert_nothing_left(run_dir, within_s=30)
    assert status.state is State.STOPPED, status.reason
    assert status.step is not None
    assert curve(run_dir) == pytest.approx(undisturbed(1, status.step))
