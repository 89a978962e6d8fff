"""F9: the node of rank 0, which holds the ranks' store, is powered off while a spare exists.

The head of a simulated cluster cannot be killed alone. Its CPU is reserved, so the job runs on other nodes.
"""

import json
from pathlib import Path

import pytest
from jobs import (
    assert_nothing_left,
    begin,
    curve,
    fake_launch,
    standing_cluster,
    undisturbed,
    wait_for_end,
    wait_for_step,
)

from moebius.cluster.job import Journal, State
from moebius.cluster.places.standing import cluster_at

STEPS = 60


@pytest.mark.fault("F9")
@pytest.mark.slow
def test_a_spare_takes_its_place(tmp_path):
    run_dir = tmp_path / "run"
    launch = fake_launch(run_dir, f"steps={STEPS}", "step_s=0.1", num_nodes=2, place_timeout_s=60)
    with standing_cluster(tmp_path, 4, cpus=1) as cluster:
        with cluster_at("simulated"):
            from ray.util.placement_group import placement_group

            on_head = {"CPU": 1.0, "node:127.0.0.2": 0.001}
            taken = placement_group([on_head], name="taken", lifetime="detached")
            assert taken.wait(timeout_seconds=100)
            begin(launch)
        wait_for_step(run_dir, 10)
        cluster.ask("kill-node", node=number_of_rank_0(run_dir))
        status = wait_for_end(run_dir, timeout_s=200)
        assert_nothing_left(run_dir, within_s=30)
    entries = Journal(run_dir).entries()
    assert (status.state, status.generation) == (State.SUCCEEDED, 2)
    [lost] = [entry for entry in entries if entry.state is State.RECOVERING]
    assert lost.reason.startswith("node 0 was lost")
    assert lost.details["charged_to"] == "infrastructure"
    assert curve(run_dir) == undisturbed(2, STEPS)


def number_of_rank_0(run_dir: Path) -> int:
    """Returns the number of rank 0's node in the cluster: its address is 127.0.0.(number + 2)."""
    told = json.loads((run_dir / "logs" / "g001" / "node0" / "assignment.json").read_text())
    return int(told["address"].rpartition(".")[2]) - 2
