"""`auto` sends rows through shared memory, or says why it cannot."""

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
        found = choose_dispatcher(name, group, device=device, ranks_per_node=per_node, timeout_s=30)
        if isinstance(found.outbox, Outbox):
            found.outbox.close()
        return found.name, found.outbox is not None, found.why


@pytest.mark.quick(1)
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


def test_auto_is_symmetric_and_a_name_is_kept() -> None:
    assert run_ranks(chosen, 2, "auto") == [("symmetric", True, "")] * 2
    assert run_ranks(chosen, 2, "dedup") == [("dedup", False, "")] * 2
    assert run_ranks(chosen, 2, "symmetric") == [("symmetric", True, "")] * 2
    assert run_ranks(chosen, 1, "auto") == [("local", False, "")]
