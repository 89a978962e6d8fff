"""Tests the placing policy with a fake cluster."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.job import Launch
from moebius.cluster.nodes.provider import Capacity, NodesUnavailable, ThisMachine
from moebius.cluster.supervise import placing
from moebius.cluster.supervise.placing import Placing, ScaleRequest, scale_requested


class Cluster(ThisMachine):
    """Reports these numbers of nodes in turn; the last one stays."""

    def __init__(self, *could: int, free: Sequence[int] = ()):
        super().__init__()
        self.looks = [Capacity(*pair) for pair in zip(could, free or could, strict=True)]
        self.asked: list[int] = []

    def capacity(self) -> Capacity:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def provide_nodes(self, num_nodes: int, while_waiting: Callable[[str], None]):
        self.asked.append(num_nodes)
        for _ in range(3):
            while_waiting("")
        return [self._node] * num_nodes

    def adopt_nodes(self):
        return ()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(placing, "LOOK_EVERY_S", 0.0)


def placing_on(cluster: Cluster, run_dir: Path, *, has_run: bool = True, **values: Any):
    told: list[str] = []
    values = {"num_nodes": 4, "wait_for_node_s": 0.0, "place_timeout_s": 0.0} | values
    policy = Placing(
        Launch(str(run_dir), **values),
        cluster,
        lambda reason: told.append(reason) if reason else None,
        note=told.append,
        has_run=has_run,
        poll_s=0.0,
    )
    return policy, told


def test_a_replacement_is_waited_for_and_the_reason_told(tmp_path):
    cluster = Cluster(3, 3, 4)
    policy, told = placing_on(cluster, tmp_path, wait_for_node_s=60.0, min_nodes=2)
    assert len(policy.place()) == 4
    assert re.match(
        r"1 node\(s\) missing since \d{4}-.*: the job asks for 4 with room each", told[0]
    )
    assert "the cluster has 3; it continues with 3 after 60 s" in told[0]


@pytest.mark.fault("F7")
def test_with_a_number_that_fits_the_run(tmp_path):
    layouts = {4: {}, 2: {"ep": 2}, 1: {"ep": 1}}
    policy, _ = placing_on(Cluster(3), tmp_path, min_nodes=1, layouts=layouts)
    nodes = policy.place()
    assert len(nodes) == 2
    launch = policy.launch_on(len(nodes))
    assert (launch.num_nodes, launch.layouts) == (2, None)
    assert launch.mesh == {"ep": 2}
    assert policy.mesh_words(2) == " on 2 node(s) instead of 4, mesh.ep=2"
    assert policy.launch_on(4).mesh == {}


@pytest.mark.fault("F8")
def test_with_too_few_it_waits_for_ever(tmp_path):
    cluster = Cluster(1, 1, 1, 4)
    policy, told = placing_on(cluster, tmp_path)
    assert len(policy.place()) == 4
    assert "3 node(s) missing" in told[0]
    assert told[0].endswith("it needs at least 4")


def test_what_was_never_there_is_a_mistake(tmp_path):
    policy, told = placing_on(Cluster(1), tmp_path, has_run=False, place_timeout_s=0.01)
    with pytest.raises(
        NodesUnavailable, match=r"needs 4 node\(s\) with room each, but for .* only 1 node"
    ):
        policy.place()
    assert told == []


def test_nodes_that_are_lost_while_they_are_reserved_are_given_up(tmp_path):
    cluster = Cluster(4, 4, 3)
    policy, _ = placing_on(cluster, tmp_path, min_nodes=3)
    assert len(policy.place()) == 3
    assert cluster.asked == [4, 3]


def test_busy_nodes_are_waited_for_until_fewer_will_do(tmp_path):
    cluster = Cluster(4, free=[2])
    policy, _ = placing_on(cluster, tmp_path)
    assert len(policy.place()) == 4, "others use them: the reservation waits in the cluster"
    policy, _ = placing_on(cluster, tmp_path, min_nodes=2)
    assert len(policy.place()) == 2


def test_a_number_of_free_nodes_that_wavers_costs_no_reservation(tmp_path):
    cluster = Cluster(4, 4, 4, 4, free=[4, 2, 3, 4])
    policy, _ = placing_on(cluster, tmp_path, min_nodes=1, layouts={4: {}, 3: {}, 2: {}})
    assert len(policy.place()) == 4
    assert cluster.asked == [4]


def test_no_number_that_fits_is_said(tmp_path):
    policy, _ = placing_on(Cluster(4), tmp_path, layouts={})
    with pytest.raises(NodesUnavailable, match="the run fits no number of nodes from 4 to 4"):
        policy.place()


def test_more_nodes_are_wished_for_when_they_have_been_seen_twice(tmp_path):
    policy, _ = placing_on(Cluster(2, 4, 2, 3, 4), tmp_path, min_nodes=1)
    wishes = [policy.why_resize(2) for _ in range(5)]
    assert wishes[:4] == [""] * 4
    assert wishes[4] == "4 node(s) are available, and the job runs on 2 of 4"
    assert policy.why_resize(4) == ""


def test_a_pause_that_brought_no_nodes_is_not_repeated_at_once(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(placing.time, "monotonic", lambda: now_s[0])
    cluster = Cluster(4)
    policy, _ = placing_on(cluster, tmp_path, min_nodes=1)

    def wish_after(seconds: float) -> str:
        now_s[0] += seconds
        return [policy.why_resize(2) for _ in range(2)][1]

    assert wish_after(0)
    for pause_s in (60, 120, 240):
        cluster.looks = [Capacity(2, 2)]  # others were quicker
        assert len(policy.place()) == 2
        cluster.looks = [Capacity(4, 4)]
        assert not wish_after(pause_s - 1)
        assert wish_after(1)
    assert len(policy.place()) == 4
    assert wish_after(0), "what was worth it may be done again at once"


def test_a_node_that_will_be_taken_away_is_left_in_time(tmp_path):
    cluster = Cluster(4)
    policy, _ = placing_on(cluster, tmp_path)
    assert policy.why_resize(4) == ""
    cluster.looks = [Capacity(4, 4, leaving=("127.0.0.3",))]
    assert policy.why_resize(4) == "the cluster is draining 127.0.0.3"


def test_a_wish_of_a_person_goes_before_the_configuration(tmp_path):
    policy, _ = placing_on(Cluster(9), tmp_path)
    write = (tmp_path / "scale.json").write_text
    write('{"num_nodes": 2, "layouts": {"1": {}, "2": {"ep": 2}}}')
    assert scale_requested(tmp_path) == ScaleRequest(2, {1: {}, 2: {"ep": 2}})
    assert policy.why_resize(4) == "2 node(s) were requested, and the job runs on 4"
    assert len(policy.place()) == 2
    write('{"num_nodes": 8, "layouts": null}')
    assert [policy.why_resize(4) for _ in range(2)][
        1
    ] == "8 node(s) are available, and the job runs on 4 of 8"
    assert len(policy.place()) == 8
