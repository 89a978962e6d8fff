"""Which ranks can share memory, and the errors if one dies, leaves, disagrees or does not come."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from world import RankFailed, run_ranks

from moebius.distributed.process.process import start_process
from moebius.distributed.symmetric import outbox as outbox_module
from moebius.distributed.symmetric.outbox import Outbox, OutboxError, open_outbox
from moebius.model.routing import token_routes


def opened(timeout_s: float = 30) -> Outbox:
    group = dist.group.WORLD
    assert group is not None
    found = open_outbox(group, timeout_s=timeout_s)
    assert isinstance(found, Outbox), found
    return found


def post(outbox: Outbox, *, tokens: int = 8, width: int = 4) -> int:
    """Posts a pass in which every token goes to every rank."""
    experts = torch.arange(outbox.num_ranks).expand(tokens, -1)
    routes = token_routes(experts, torch.ones(experts.shape), num_experts=outbox.num_ranks)
    rank_E = torch.arange(outbox.num_ranks, dtype=torch.int32)
    plan = outbox.plan(routes, tokens, rank_E=rank_E, slot_E=torch.zeros_like(rank_E))
    x = torch.full((tokens, width), float(outbox.rank))
    return outbox.post_rows(plan, x, routes.weight_N)


def take(outbox: Outbox, number: int, width: int = 4) -> list[float]:
    rows = outbox.take_rows(number, torch.empty(0, width), torch.float32).rows_MD
    return rows[:, 0].tolist()


def outgrown() -> tuple[list[bool], int, int]:
    """Messages of one row and of many, by turns: whether all came, and the memory of it."""
    with start_process("cpu", timeout_s=30) as process:
        outbox, right = opened(), []
        sizes = (1, 20_000, 3, 200_000, 5) * 3
        for tokens in sizes:
            number = post(outbox, tokens=tokens)
            right.append(
                take(outbox, number) == [float(p) for p in range(3) for _ in range(tokens)]
            )
        first = outbox.num_bytes
        for tokens in sizes:
            take(outbox, post(outbox, tokens=tokens))
        assert process.world_size == 3
        return right, first, outbox.num_bytes


@pytest.mark.slow
def test_a_message_that_outgrows_the_memory_gets_more_of_it_once() -> None:
    for right, first, last in run_ranks(outgrown, 3):
        assert all(right)
        assert first == last


def dying(death: str) -> None:
    with start_process("cpu", timeout_s=60) as process:
        outbox = opened(60)
        take(outbox, post(outbox))
        dist.barrier()
        if process.rank == 2:
            if death == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            outbox.close()
            time.sleep(60)  # it lives, and has left
        began = time.monotonic()
        try:
            take(outbox, post(outbox))
        finally:
            assert time.monotonic() - began < 30, "noticed by a time-out, not by looking"


@pytest.mark.parametrize(("death", "told"), [("kill", "has died"), ("leave", "has ended its run")])
def test_a_rank_that_died_or_left_is_named_at_once_and_leaves_no_file(
    death: str, told: str
) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(RankFailed, match=rf"rank 2 {told}; exchange no\. 2 of the ranks 0-2"):
        run_ranks(dying, 3, death)
    after = set(Path("/dev/shm").iterdir())
    assert not [path for path in after - before if "moebius" in path.name]


def forking() -> list[float]:
    """Rank 1 has a child that closes what it has inherited, and ends."""
    with start_process("cpu", timeout_s=60) as process:
        outbox = opened()
        take(outbox, post(outbox))
        if process.rank == 1:
            child = os.fork()
            if child == 0:
                outbox.close()
                os._exit(0)
            os.waitpid(child, 0)
        dist.barrier()
        time.sleep(0.3 if process.rank == 1 else 0.0)  # rank 0 waits, and looks after rank 1
        return take(outbox, post(outbox, tokens=2))


def test_a_child_that_ends_is_not_the_rank_that_leaves() -> None:
    assert run_ranks(forking, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def late() -> str:
    with start_process("cpu", timeout_s=60) as process:
        outbox, said = opened(0.5), ""
        if process.rank == 0:
            try:
                take(outbox, post(outbox))
            except RuntimeError as error:
                said = str(error)
        dist.barrier()
        if process.rank != 0:
            take(outbox, post(outbox))
        dist.barrier()
        return said


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    said = run_ranks(late, 2)[0]
    assert (
        "exchange no. 1 of the ranks 0-1 did not complete: rank 1 did not come within 0.5 s" in said
    )


def disagreeing() -> str:
    with start_process("cpu", timeout_s=60) as process:
        outbox = opened()
        number = post(outbox, width=4 + process.rank)
        try:
            take(outbox, number, width=4 + process.rank)
        except OutboxError as error:
            said = str(error)
        else:
            said = ""
        dist.barrier()
        return said


def test_ranks_that_post_different_things_are_told_both() -> None:
    for rank, said in enumerate(run_ranks(disagreeing, 2)):
        other = 1 - rank
        assert f"rank {other} of the group posted" in said
        assert f"{16 + 4 * other} bytes per row" in said


def arenas() -> dict[int, int]:
    """The size of each memory file of this rank, by its descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            if "moebius-exchange" in os.readlink(entry):
                found[int(entry.name)] = entry.stat().st_size
    return found


def overwritten(what: str) -> str:
    """Rank 1 spoils its message after it was posted."""
    with start_process("cpu", timeout_s=60) as process:
        outbox = opened()
        outbox.check(what == "a bit")
        number = post(outbox)
        if process.rank == 1:
            sizes = arenas()
            with open(f"/proc/self/fd/{max(sizes, key=sizes.__getitem__)}", "r+b") as memory:
                words = memory.read(4096)
                if what == "a bit":
                    place = words.index(torch.ones(4).numpy().tobytes())  # a row
                    memory.seek(place + 1)
                    memory.write(b"\1")
                else:  # how many rows there are for rank 0: behind header and sizes
                    memory.seek(64)
                    memory.write((10**6).to_bytes(8, "little"))
        dist.barrier()
        try:
            take(outbox, number)
        except OutboxError as error:
            said = str(error)
        else:
            said = "nothing"
        dist.barrier()
        return said


def test_a_row_that_changes_under_way_is_noticed_by_every_reader() -> None:
    for said in run_ranks(overwritten, 3, "a bit"):
        assert said == (
            "message 1 of rank 1 of the group is not what was posted: its bits have changed"
        )


def test_sizes_are_checked_before_they_are_used() -> None:
    first, *others = run_ranks(overwritten, 3, "a size")
    assert re.match(r"message 1 of rank 1 of the group speaks of more than its \d+ bytes", first)
    assert others == ["nothing"] * 2  # what is for them is sound


def refused(what: str) -> str:
    with start_process("cpu", timeout_s=60) as process:
        if process.rank == 1:
            if what == "machine":
                outbox_module._BOOT_ID = Path("/proc/sys/kernel/version")
            elif what == "compiler":
                outbox_module.reason_against = lambda: "there is no C++ compiler"
            elif what == "pid namespace":
                outbox_module.os.getpid = lambda: 1  # another process than the one with the memory
        group = dist.group.WORLD
        assert group is not None
        found = open_outbox(group, timeout_s=30)
        assert isinstance(found, str)
        return found


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("machine", "rank 0: the ranks are on several machines"),
        ("compiler", r"rank 1: there is no C\+\+ compiler"),
        ("pid namespace", r"rank 0: (the memory of process 1 cannot be opened|process 1 is not)"),
    ],
)
def test_ranks_that_cannot_share_memory_say_so_alike(what: str, told: str) -> None:
    first, second = run_ranks(refused, 2, what)
    assert first == second
    assert re.match(told, first)


def memory_of_a_stranger() -> str:
    """What another user of the machine finds."""
    with start_process("cpu", timeout_s=60):
        outbox = opened()
        post(outbox)
        files = arenas()
        assert len(files) >= 2
        path = f"/proc/{os.getpid()}/fd/{min(files)}"
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(path, os.O_RDONLY)
            except PermissionError:
                os._exit(0)
            os._exit(1)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_memory() -> None:
    assert run_ranks(memory_of_a_stranger, 1) == ["0"]
