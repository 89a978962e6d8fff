"""An incomplete collective is explained on all ranks: operation, number, group, and absent ranks."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from meshes import meshed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from world import RankFailed, run_ranks

from moebius.distributed.process import diagnosis
from moebius.distributed.process.diagnosis import (
    BlockedCollective,
    CollectiveCall,
    CollectiveError,
    RankReport,
    describe_blocked,
    find_blocked,
)

TIMEOUT_S = 1.0


def told(act, *args):
    """What a rank hears when it lives through `act(mesh)`: the error's text and after how long."""
    started = time.monotonic()
    try:
        with meshed(ep=2, timeout_s=TIMEOUT_S) as (_, mesh):
            started = time.monotonic()
            act(mesh, *args)
    except CollectiveError as error:
        return (
            f"{error}{'' if error.__cause__ else ' (without a cause)'}",
            time.monotonic() - started,
        )
    except ZeroDivisionError as error:
        time.sleep(TIMEOUT_S + 1)  # the process lives on: the others hear of its end all the same
        return repr(error), 0.0
    return "went through", 0.0


def one_skips(mesh, skipper):
    """Three sums and an all-to-all that all make, then a sum of the ep group that one rank leaves
    out.
    """
    for _ in range(3):
        dist.all_reduce(torch.zeros(4), group=mesh.ep_group)
    dist.all_to_all_single(torch.zeros(2), torch.zeros(2), group=mesh.ep_group)
    if mesh.rank == skipper:
        time.sleep(TIMEOUT_S + 1)
    else:
        dist.all_reduce(torch.zeros(2, 3), group=mesh.ep_group)


def test_a_rank_that_skips_a_collective_is_named_with_the_collective():
    reports = run_ranks(told, 2, one_skips, 1, timeout_s=20)
    text, after_s = reports[0]
    assert text.startswith(
        "all_reduce no. 5 of group 'ep of ranks 0-1', of 2 × 3, did not complete: "
        "rank 1 did not come (rank 1 last called all_to_all no. 4 there)"
    )
    assert (
        "Timed out waiting 1000ms" in text
    )  # the backend's words, by which the job's report ranks failures
    assert "without a cause" not in text
    assert TIMEOUT_S * 0.9 <= after_s < TIMEOUT_S + diagnosis.REPORT_S
    assert reports[1] == ("went through", 0.0)


def one_waits_elsewhere(mesh):
    """Rank 1 leaves out the ep group's sum and waits for the world, which waits for rank 0."""
    dist.all_reduce(torch.zeros(1), group=mesh.world_group)
    if mesh.rank != 1:
        dist.all_reduce(torch.zeros(1), group=mesh.ep_group)
    dist.all_reduce(torch.zeros(1), group=mesh.world_group)


def test_all_ranks_that_wait_in_a_circle_hear_the_same_cause():
    texts = [text for text, _ in run_ranks(told, 4, one_waits_elsewhere, timeout_s=20)]
    causes = {text.partition(" (RuntimeError")[0] for text in texts}
    assert len(causes) == 1
    assert "did not come" in texts[0]
    assert (
        "all_reduce no. 1 of group 'ep of ranks 0-1'" in texts[0]
    )  # the missed one, as cause or as where rank 0 stands


def one_ends(mesh, how):
    dist.all_reduce(torch.zeros(1), group=mesh.ep_group)
    if mesh.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("a fault of its own")
    dist.all_reduce(torch.zeros(1), group=mesh.ep_group)


def test_a_rank_that_ended_with_an_error_is_named_with_it():
    (text, _), _ = run_ranks(told, 2, one_ends, "raised", timeout_s=20)
    assert "all_reduce no. 2 of group 'ep of ranks 0-1'" in text
    assert "rank 1 had ended with ZeroDivisionError: a fault of its own" in text


def outlive(act, *args):
    """Writes the survivor's error to a file, because a killed rank fails the world at once."""
    *args, file = args
    text, _ = told(act, *args)
    file.write_text(text)


def test_a_killed_rank_is_said_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("world._AFTERMATH_S", diagnosis.REPORT_S + 2)
    with pytest.raises(RankFailed):
        run_ranks(outlive, 2, one_ends, "killed", tmp_path / "told", timeout_s=20)
    text = (tmp_path / "told").read_text()
    assert "all_reduce no. 2 of group 'ep of ranks 0-1'" in text
    assert "rank 1 gave no answer (the process has died" in text
    assert "Connection closed by peer" in text or "Connection reset" in text


def silent_store(mesh):
    """Without a store nobody can be asked; the backend's error must come through as it is."""
    diagnosis.explain.__globals__["_collect"] = fail_to_ask
    one_skips(mesh, 1)


def fail_to_ask(*_):
    raise dist.DistNetworkError("the store is gone")


def told_plainly():
    try:
        return told(silent_store)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", 0.0


def test_without_a_store_the_backends_own_error_remains():
    (text, _), _ = run_ranks(told_plainly, 2, timeout_s=20)
    assert text.startswith("RuntimeError: [")
    assert "Timed out waiting 1000ms" in text


def call(number, *, group="g", operation="all_reduce", sizes=((4,),), age_s=0.0):
    return CollectiveCall(group, f"{group} of ranks 0-3", number, operation, sizes, age_s, 10.0)


def blocked_by(reports, **members) -> BlockedCollective:
    found = find_blocked(0, reports, members or {"g": [0, 1]})
    assert found is not None
    return found


def test_who_keeps_a_collective_from_completing():
    """Rank 0 waits in no. 3: rank 1 is behind, rank 2 ended, rank 3 is silent; other groups are as
    they should be.
    """
    reports = {
        0: RankReport([call(7, group="far"), call(2), call(3, age_s=9.9)]),
        1: RankReport([call(2), call(9, group="far")]),
        2: RankReport([call(2)], ended="ValueError: no"),
    }
    blocked = blocked_by(reports, g=[0, 1, 2, 3], far=[0])
    assert blocked.call.number == 3
    assert (blocked.behind, blocked.ended, blocked.silent) == ([1], [2], [3])
    text = describe_blocked(blocked, reports)
    assert (
        "rank 1 did not come (rank 1 last called all_reduce no. 9 of group 'far of ranks 0-3')"
        in text
    )
    assert "rank 2 had ended with ValueError: no" in text
    assert "rank 3 gave no answer" in text


def test_a_rank_that_is_only_slower_is_not_blamed_for_what_is_not_overdue():
    reports = {0: RankReport([call(3, age_s=1.0)]), 1: RankReport([call(2)])}
    assert find_blocked(0, reports, {"g": [0, 1]}) is None
    reports[1] = RankReport([call(2)], ended="ValueError: no")
    assert blocked_by(reports).ended == [1]


def test_a_silent_rank_is_not_said_to_have_missed_what_completed():
    """Rank 1 died in no. 100; 85 to 99 are as old as a time-out, and are over. Async ones that are
    not over yet came after the one that failed.
    """
    old = [
        CollectiveCall("g", "g", number, "all_reduce", ((4,),), 9.9, 10.0, is_over=number <= 100)
        for number in range(85, 103)
    ]
    for calls in (old[:16], old):
        blocked = blocked_by({0: RankReport(calls)})
        assert (blocked.call.number, blocked.silent) == (100, [1])
    assert blocked_by({0: RankReport(old[16:])}).call.number == 101


def test_a_report_shows_more_than_a_silence():
    """No. 2 of three ranks: rank 1 has not come, which is certain; rank 2 is silent in no. 1 as well."""
    calls = [replace(call(number, age_s=9.9), is_over=True) for number in (1, 2, 3)]
    reports = {0: RankReport(calls), 1: RankReport([call(1)])}
    blocked = blocked_by(reports, g=[0, 1, 2])
    assert (blocked.call.number, blocked.behind, blocked.silent) == (2, [1], [2])


MISMATCH = (
    "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in "
    "your code?"
)


@pytest.mark.parametrize(("text", "named"), [(MISMATCH, True), ("gloo: Timed out", False)])
def test_splits_that_do_not_agree_are_not_blamed_on_the_network(text, named, monkeypatch):
    """All ranks came, with all-to-alls: who waits hears what the one that got too much has seen."""
    mine = call(3, operation="all_to_all")
    monkeypatch.setattr(diagnosis, "recorded_calls", lambda: [mine])
    monkeypatch.setattr(diagnosis, "_members", lambda group: [0, 1])
    store = HashStore()
    store.set("diagnosis/report/1", diagnosis._encoded(RankReport([mine])))
    heard = diagnosis.explain(RuntimeError(text), store=store, rank=0, world_size=2)
    other = diagnosis.explain(RuntimeError("gloo: closed"), store=store, rank=1, world_size=2)
    for told_to_rank in (heard, other):
        assert told_to_rank is not None
        assert ("the network is slow or broken" in told_to_rank) != named
        expected = "rank 0 was sent 8 bytes where it expected 4, in all_to_all no. 3 of group"
        assert (expected in told_to_rank) == named


@pytest.mark.parametrize(
    ("other", "blamed"), [({"sizes": ((5,),)}, True), ({"operation": "barrier"}, True), ({}, False)]
)
def test_another_operation_or_size_under_the_same_number(other, blamed):
    reports = {0: RankReport([call(3)]), 1: RankReport([call(3, **other)])}
    blocked = find_blocked(0, reports, {"g": [0, 1]})
    assert (blocked is not None and blocked.unlike == [1]) == blamed


def test_positions_tell_the_last_collective_of_each_group_and_the_oldest_that_has_not_ended(
    monkeypatch,
):
    def entry(group: str, number: int, *, retired: bool, is_p2p: bool = False) -> dict:
        return {
            "process_group": [group, "default_pg" if group == "0" else "mesh_ep"],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": number,
            "input_sizes": [[2, 3]],
            "time_created_ns": number,
            "timeout_ms": 1000,
            "retired": retired,
            "is_p2p": is_p2p,
        }

    entries = [
        entry("0", 3, retired=False),
        entry("0", 1, retired=True),
        entry("0", 4, retired=False),
    ]
    entries += [entry("1", 2, retired=True), entry("1", 9, retired=False, is_p2p=True)]
    monkeypatch.setattr(diagnosis, "_recorded_entries", lambda: entries)
    monkeypatch.setattr(diagnosis, "_members", lambda group: [0, 1])
    found = {position["group"]: position for position in diagnosis.positions_in_groups()}
    world, ep = found["gloo:0"], found["gloo:1"]
    assert (world["issued"], world["pending"]) == (4, [3, "all_reduce", "2 × 3"])
    assert (ep["issued"], ep["pending"], ep["description"]) == (2, None, "mesh_ep")
    assert world["members"] == [0, 1]


class GoneStore:
    """The store of a run that has ended."""

    def set(self, key, value):
        raise dist.DistNetworkError("Broken pipe")

    def check(self, keys):
        raise dist.DistNetworkError("Broken pipe")


def async_sums(mesh):
    """Many sums are under way when one of them is never joined: the oldest is named, not the
    newest.
    """
    if mesh.rank == 0:
        sums = [
            dist.all_reduce(torch.zeros(1), group=mesh.world_group, async_op=True) for _ in range(5)
        ]
        for work in sums:
            assert work is not None
            work.wait()
    else:
        dist.all_reduce(torch.zeros(1), group=mesh.world_group)
        dist.all_reduce(torch.zeros(1), group=mesh.world_group)
        time.sleep(TIMEOUT_S + 1)


class SilentStore:
    """A store in which another rank asked first, and found nothing."""

    def add(self, key, amount):
        return 2

    def wait(self, keys, timeout):
        raise dist.DistStoreError("wait timeout")


def one_calls_another(mesh):
    dist.all_reduce(torch.zeros(1), group=mesh.ep_group)
    if mesh.rank == 1:
        dist.broadcast(torch.zeros(7), 0, group=mesh.ep_group)
        time.sleep(TIMEOUT_S + 1)
    else:
        dist.all_reduce(torch.zeros(3), group=mesh.ep_group)
        dist.all_reduce(torch.zeros(3), group=mesh.ep_group)


def test_the_oldest_of_several_open_collectives_is_named():
    (text, _), _ = run_ranks(told, 2, async_sums, timeout_s=20)
    assert text.startswith("all_reduce no. 3 of group 'world'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms", True),
        ("Application timeout caused pair closure", True),
        ("NCCL error in: ProcessGroupNCCL.cpp, unhandled system error", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_which_errors_are_of_a_collective(text, expected):
    assert diagnosis.is_of_a_collective(text) is expected


def test_a_rank_that_calls_another_operation_is_named():
    texts = [text for text, _ in run_ranks(told, 2, one_calls_another, timeout_s=20)]
    assert any(
        "no. 2 of group 'ep of ranks 0-1'" in text and "came with" in text and "instead" in text
        for text in texts
    )


def test_uneven_all_to_alls_are_alike():
    reports = {
        rank: RankReport([call(3, operation="all_to_all", sizes=((rank,),))]) for rank in range(2)
    }
    assert find_blocked(0, reports, {"g": [0, 1]}) is None


def test_a_rank_that_cannot_tell_why_it_ends_says_so_in_its_log(caplog):
    diagnosis.report_exception(GoneStore(), 3, ValueError("no"))  # pyright: ignore[reportArgumentType]
    assert "rank 3 could not report to the others why it ends: Broken pipe" in caplog.text


def test_a_rank_whose_store_ends_before_it_asks_nobody_any_more(caplog, monkeypatch):
    """The store is rank 0's, which may be done first: that is no error of the others."""
    monkeypatch.setattr(diagnosis, "_own_connection", lambda store: store)
    monkeypatch.setattr(diagnosis, "_LOOK_S", 0.01)
    with caplog.at_level("DEBUG", diagnosis.__name__):
        reporter = diagnosis.Reporter(GoneStore(), 3)  # pyright: ignore[reportArgumentType]
        reporter._thread.join(10)
        reporter.stop()
    assert "the store is gone, so the run has ended: Broken pipe" in caplog.text


def test_where_the_first_rank_found_no_cause_the_others_say_that():
    said = diagnosis._collect(SilentStore(), 1, 4, [call(3)])  # pyright: ignore[reportArgumentType]
    assert "all_reduce no. 3" in said
    assert said.endswith("did not complete, and the rank that asked first found no cause")


def test_a_rank_that_was_never_seen_in_a_collective():
    reports = {0: RankReport([call(1, age_s=9.9)]), 1: RankReport([])}
    assert "rank 1 has called no collective yet" in describe_blocked(blocked_by(reports), reports)
