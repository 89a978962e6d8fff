"""Tests jobs on a simulated Ray cluster: whoever is killed, they end as they should and leave nothing behind."""

import os
import signal
from pathlib import Path

import pytest
from jobs import (
    agent_pids,
    assert_nothing_left,
    begin,
    curve,
    fake_launch,
    let_go,
    rank_pids,
    undisturbed,
    wait_for,
    wait_for_end,
    wait_for_step,
)

from moebius.cluster.job import JobError, JobStatus, Journal, State
from moebius.cluster.nodes import processes
from moebius.cluster.nodes.provider import NodesUnavailable
from moebius.cluster.places.ray_session import NAMESPACE
from moebius.cluster.stop import request_stop

pytestmark = pytest.mark.usefixtures("cluster")


def end_of(run_dir: Path) -> JobStatus:
    """Returns the job's final status once Ray holds nothing of it any more."""
    from ray.util import list_named_actors

    from moebius.cluster.nodes.ray_nodes import actor_name

    status = wait_for_end(run_dir)
    name = actor_name(str(run_dir))
    wait_for(
        lambda: (
            {"name": name, "namespace": NAMESPACE} not in list_named_actors(all_namespaces=True)
        ),
        what="the end of the supervisor",
    )
    assert_nothing_left(run_dir)
    assert groups_left(name) == []
    return status


def groups_left(name: str) -> list[str]:
    """Returns the states of placement groups with this name."""
    import ray

    groups = ray.util.placement_group_table().values()
    states = [group["state"] for group in groups if group["name"] == name]
    return [state for state in states if state != "REMOVED"]


def wait_for_generation(run_dir: Path, generation: int) -> None:
    """Waits until this generation makes steps."""
    wait_for(
        lambda: any(
            e.state is State.RUNNING and e.generation == generation
            for e in Journal(run_dir).entries()
        ),
        what=f"generation {generation} of {run_dir}",
    )


def processes_called(cluster, prefix: str) -> list[int]:
    """Returns Ray's processes with this name, which is their actor's."""
    return [
        pid
        for pid in processes.descendants(cluster.host_pid)
        if command_line(pid).startswith(prefix)
    ]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.fault("F1")
@pytest.mark.slow
def test_a_killed_rank_is_recovered_from_and_the_curve_is_as_if_nothing_had_happened(tmp_path):
    run_dir = begin(fake_launch(tmp_path, "hold=8:1", num_nodes=2, ranks_per_node=2))
    wait_for_step(run_dir, 7)
    os.kill(rank_pids(run_dir)[3], signal.SIGKILL)
    let_go(run_dir)
    status = end_of(run_dir)
    assert status.state is State.SUCCEEDED
    assert (status.generation, status.restarts) == (2, 1)
    assert status.root_cause is not None
    assert status.root_cause.summary == "rank 3 on node 1 was killed by SIGKILL"
    assert curve(run_dir) == undisturbed(4, 20)
    logs = {path.relative_to(run_dir).as_posix() for path in run_dir.glob("logs/*/*/rank*.log")}
    assert logs == {
        f"logs/g00{g}/node{rank // 2}/rank{rank}.log" for g in (1, 2) for rank in range(4)
    }


@pytest.mark.fault("F4", "F5", "F10")
@pytest.mark.slow
def test_whoever_is_killed_the_job_goes_on(tmp_path, cluster):
    """In turn: an agent process, a node agent's actor, the supervisor. Only the first two are failures."""
    run_dir = begin(
        fake_launch(tmp_path, "plain=1", "step_s=0.1", "steps=100000", num_nodes=2, max_restarts=2)
    )
    wait_for_step(run_dir, 3)
    agent, _ = next(iter(agent_pids(run_dir).items()))
    os.kill(agent, signal.SIGKILL)
    wait_for_generation(run_dir, 2)
    _, actor = next(iter(agent_pids(run_dir).items()))
    os.kill(actor, signal.SIGKILL)
    wait_for_generation(run_dir, 3)
    ranks, [supervisor] = rank_pids(run_dir), processes_called(cluster, "ray::Supervisor")
    os.kill(supervisor, signal.SIGKILL)
    wait_for(
        lambda: any(e.details.get("unwatched_s") for e in Journal(run_dir).entries()),
        what="the next supervisor",
    )
    assert rank_pids(run_dir) == ranks, "they have not noticed"
    request_stop(run_dir)
    status = end_of(run_dir)
    assert status.state is State.STOPPED
    assert status.step is not None
    assert status.generation == 3
    entries = Journal(run_dir).entries()
    lost = [entry.reason for entry in entries if entry.state is State.RECOVERING]
    assert len(lost) == 2
    assert "ended with exit code -9" in lost[0]
    assert "was lost: its agent actor died" in lost[1]
    [taken_over] = [entry for entry in entries if "unwatched_s" in entry.details]
    assert taken_over.reason.startswith("the supervisor was killed and has been restarted; gen")
    assert curve(run_dir) == undisturbed(1, status.step)


@pytest.mark.fault("F10")
@pytest.mark.slow
def test_nodes_whose_supervisor_was_ended_for_good_end_themselves(tmp_path):
    import ray

    from moebius.cluster.nodes.ray_nodes import actor_name

    run_dir = begin(
        fake_launch(tmp_path, "plain=1", "step_s=0.1", "steps=100000", supervisor_timeout_s=1.0)
    )
    wait_for_step(run_dir, 3)
    name = actor_name(str(run_dir))
    ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    assert_nothing_left(run_dir, within_s=60)
    wait_for(lambda: groups_left(name) == [], what="the bundles to be given back")


@pytest.mark.fault("F25")
@pytest.mark.slow  # 11 s
def test_two_jobs_share_a_cluster_and_the_failure_of_one_is_not_the_other_s(tmp_path):
    from moebius.cluster.supervise.actor import start_supervisor

    good = begin(
        fake_launch(tmp_path / "good", "plain=1", "hold=30:1", "steps=30", num_nodes=2, name="same")
    )
    bad = begin(
        fake_launch(
            tmp_path / "bad",
            "plain=1",
            "fail=1:5:*:raise",
            "hold=5:1",  # rank 0 must not be through before rank 1 has begun
            num_nodes=2,
            max_restarts=0,
            name="same",
        )
    )
    with pytest.raises(JobError, match="another supervisor of this run folder is still running"):
        start_supervisor(fake_launch(good))
    let_go(good)
    failed, succeeded = end_of(bad), end_of(good)
    assert (failed.state, succeeded.state) == (State.FAILED, State.SUCCEEDED)
    assert succeeded.generation == 1
    assert failed.root_cause is not None
    assert (failed.root_cause.rank, failed.root_cause.error) == (
        1,
        "ArithmeticError: bad batch at step 5",
    )
    assert "fail_if_told" in (failed.root_cause.traceback or "")


@pytest.mark.slow
@pytest.mark.fault("F24")
@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"num_nodes": 3}, "needs 3 node(s) with 1 CPUs each, but for 0.5 s only 2 node(s)"),
        ({"ranks_per_node": 64}, "needs 1 node(s) with 64 CPUs each, but for 0.5 s only 0 node(s)"),
        (
            {"gpus_per_node": 8},
            "needs 1 node(s) with 1 CPUs and 8 GPUs each, but for 0.5 s only 0 node(s)",
        ),
    ],
)
def test_what_the_cluster_cannot_hold_fails_in_time_and_says_what_is_missing(
    tmp_path, wanted, told
):
    status = end_of(begin(fake_launch(tmp_path, place_timeout_s=0.5, **wanted)))
    assert status.state is State.FAILED
    assert told in status.reason
    assert "127.0.0.2 (4 CPUs, 0 GPUs)" in status.reason


def test_a_job_waits_while_others_hold_the_nodes_and_can_be_stopped_meanwhile(tmp_path):
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"CPU": 3}, {"CPU": 3}], strategy="STRICT_SPREAD")
    assert others.wait(timeout_seconds=100)
    try:
        run_dir = begin(fake_launch(tmp_path, num_nodes=2, ranks_per_node=3, place_timeout_s=0.2))
        wait_for(
            lambda: any("busy with other work" in e.reason for e in Journal(run_dir).entries()),
            what="the reason",
        )
        request_stop(run_dir)
        assert end_of(run_dir).state is State.STOPPED
        assert not (run_dir / "logs").exists()
    finally:
        remove_placement_group(others)


def test_what_a_job_has_reserved_counts_as_free_for_it(tmp_path):
    """It reserves all CPUs of both nodes, before an agent is up."""
    import ray

    from moebius.cluster.nodes.ray_nodes import RayNodeProvider

    provider = RayNodeProvider(fake_launch(tmp_path, num_nodes=2, ranks_per_node=4), 1)
    wait_for(lambda: provider.capacity().free == 2, what="an idle cluster")
    try:
        provider._reserve(2, lambda reason: None)
        wait_for(
            lambda: not ray.available_resources().get("CPU"),
            what="the cluster to say that its CPUs are taken",
        )
        assert provider.capacity().free == 2
    finally:
        provider.release()


@pytest.mark.fault("F24")
def test_nodes_must_run_the_same_software():
    from moebius.cluster.nodes.ray_nodes import check_versions

    same = {"moebius": "1", "torch": "2.13.0", "python": "3.11"}
    check_versions([{"host": "a", "versions": same}, {"host": "b", "versions": dict(same)}])
    with pytest.raises(
        NodesUnavailable,
        match=r"torch 2.13.0, .* on a; .*torch 2.11.0, .* on b\): install the same",
    ):
        check_versions(
            [{"host": "a", "versions": same}, {"host": "b", "versions": same | {"torch": "2.11.0"}}]
        )
