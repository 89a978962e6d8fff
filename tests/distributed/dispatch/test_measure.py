"""`auto` selects the faster of two dispatchers with the same bits, or says why there is only one."""

import re

import pytest
import torch
from dispatch_cases import world
from world import RankFailed, run_ranks

from moebius.distributed.dispatch import choose
from moebius.distributed.dispatch.choose import choose_dispatcher
from moebius.distributed.symmetric.outbox import Outbox


def chosen(name: str, what: str = "") -> tuple[str, bool, str]:
    """The choice's name, whether it has memory, and why; `what` is made so on rank 1."""
    with world() as (process, group, _):
        device, per_node = torch.device("cpu"), None
        if what == "nodes":
            per_node = 1
        elif what == "gpu":
            device = torch.device("cuda")
        elif what == "compiler" and process.rank == 1:
            choose.open_outbox.__globals__["reason_against"] = lambda: "there is no C++ compiler"
        elif what == "slow memory" and process.rank == 1:
            slow_down(choose.SHARED_MEMORY)
        elif what == "slow collectives" and process.rank == 1:
            slow_down(choose.DEFAULT)
        found = choose_dispatcher(name, group, device=device, ranks_per_node=per_node, timeout_s=30)
        if isinstance(found.outbox, Outbox):
            found.outbox.close()
        return found.name, found.outbox is not None, found.why


def slow_down(slow: str) -> None:
    """One of the two takes much longer on this rank, by a clock that says so."""
    make, run = choose.make_dispatcher, choose._pass
    late: list[object] = []

    def made(name: str, *args: object, **options: object) -> object:
        dispatcher = make(name, *args, **options)  # pyright: ignore[reportArgumentType]
        if name == slow:
            late.append(dispatcher)
        return dispatcher

    now = [0.0]

    def passed(dispatcher: object, *args: object) -> None:
        run(dispatcher, *args)  # pyright: ignore[reportArgumentType]
        now[0] += 1000.0 if dispatcher in late else 0.001

    choose.make_dispatcher = made  # pyright: ignore[reportAttributeAccessIssue]
    choose._pass = passed  # pyright: ignore[reportAttributeAccessIssue]
    choose.time.perf_counter = lambda: now[0]


@pytest.mark.parametrize(
    ("what", "name"), [("slow memory", "dedup"), ("slow collectives", "symmetric")]
)
def test_auto_is_what_the_slowest_rank_has_faster(what: str, name: str) -> None:
    found = run_ranks(chosen, 2, "auto", what)
    assert found[0] == found[1]
    assert found[0][:2] == (name, name == "symmetric")
    times = re.search(r"takes ([\d.]+) ms through the node's memory, ([\d.]+) ms", found[0][2])
    assert times is not None
    by_memory, by_collectives = map(float, times.groups())
    assert (by_memory < by_collectives) == (name == "symmetric")
    assert max(by_memory, by_collectives) == 1e6


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nodes", "no shared memory: the ranks are on several nodes"),
        (
            "gpu",
            "no shared memory: rows are on cuda, and shared memory needs them on the CPU",
        ),
        ("compiler", "no shared memory: rank 1: there is no C++ compiler"),
    ],
)
def test_where_no_memory_can_be_shared_auto_is_dedup_and_says_why(what: str, why: str) -> None:
    assert run_ranks(chosen, 2, "auto", what) == [("dedup", False, why)] * 2
    with pytest.raises(
        RankFailed, match=r'mesh\.dispatcher="symmetric" cannot run here: .*; use "dedup"'
    ):
        run_ranks(chosen, 2, "symmetric", what)


def test_what_is_asked_for_is_not_measured() -> None:
    assert run_ranks(chosen, 2, "dedup") == [("dedup", False, "")] * 2
    assert run_ranks(chosen, 2, "symmetric") == [("symmetric", True, "")] * 2
    assert run_ranks(chosen, 1, "auto") == [("local", False, "")]
