"""Collectives that are broken off from another thread, and ranks that meet anew in the same
processes.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from world import run_ranks

from moebius.cluster.nodes.processes import IS_LINUX
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.process.connections import break_off
from moebius.distributed.process.process import start_process, stop_process

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="elsewhere no connection is noted")


def meet_twice() -> tuple[str, bool, list[float]]:
    """One rank of each EP group waits for the other, which lives and never comes."""
    first = start_process("cpu", timeout_s=60)
    mesh = build_mesh(plan_layout(MeshConfig(ep=2), first.world_size), first)
    # a rank that still connects would find the connections closed that another breaks off
    first.store.set(f"built by {first.rank}", "")
    first.store.wait([f"built by {rank}" for rank in range(first.world_size)])
    broken: list[int] = []
    breaker = threading.Thread(target=lambda: broken.append(break_off()))
    raised = ""
    if first.rank % 2 == 0:
        breaker.start()
        try:
            dist.all_reduce(torch.ones(1), group=mesh.ep_group)
        except RuntimeError as error:
            raised = str(error)
        first.store.set(f"broken by {first.rank}", "")
    else:
        first.store.wait([f"broken by {first.rank - 1}"])
        breaker.start()
    breaker.join()
    stop_process()
    assert first.reporter is not None
    first.reporter.stop()

    with start_process("cpu", timeout_s=60, round_number=1) as second:
        mesh = build_mesh(plan_layout(MeshConfig(ep=2), second.world_size), second)
        sums = [torch.tensor([float(second.rank)]) for _ in range(2)]
        dist.all_reduce(sums[0])
        dist.all_reduce(sums[1], group=mesh.ep_group)
    return raised, broken[0] > 0, [total.item() for total in sums]


def test_a_wait_for_a_living_rank_is_broken_off_and_the_ranks_meet_anew():
    found = run_ranks(meet_twice, 4)
    assert [bool(raised) for raised, _, _ in found] == [True, False, True, False]
    assert all("gloo" in raised for raised, _, _ in found if raised)
    assert [any_broken for _, any_broken, _ in found][::2] == [True, True]
    assert [sums for *_, sums in found] == [[6.0, 1.0], [6.0, 1.0], [6.0, 5.0], [6.0, 5.0]]


def break_off_alone() -> int:
    with start_process("cpu", timeout_s=60) as process:
        broken = break_off()
        process.store.set("still", "there")
        assert process.store.get("still") == b"there"
        return broken


def test_the_store_is_no_connection_of_a_group():
    assert run_ranks(break_off_alone, 1) == [0]
