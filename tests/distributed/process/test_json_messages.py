"""JSON values arrive unchanged, by rank, and only within the size limit."""

import torch
import torch.distributed as dist
from world import run_ranks

from moebius.distributed.process import json_messages
from moebius.distributed.process.json_messages import all_gather_json, gather_json
from moebius.distributed.process.process import start_process


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def exchange():
    with start_process("cpu", timeout_s=20) as process:
        own = {"rank": process.rank, "text": "ä" * 1000 * process.rank, "list": [(1, None), 2.5]}
        return all_gather_json(own, world()), gather_json(process.rank * "x", world())


def test_values_arrive_by_rank():
    results = run_ranks(exchange, 3)
    sent = [{"rank": r, "text": "ä" * 1000 * r, "list": [[1, None], 2.5]} for r in range(3)]
    assert [everywhere for everywhere, _ in results] == [sent] * 3
    assert [at_first for _, at_first in results] == [["", "x", "xx"], None, None]


def announce(size):
    """Rank 1 lies about the size of its text."""
    with start_process("cpu", timeout_s=20) as process:
        if process.rank == 1:
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([size]))
            return "lied"
        try:
            all_gather_json("mine", world())
        except ValueError as error:
            return str(error)


def test_a_size_beyond_the_bound_is_refused_before_memory_is_taken():
    for size in (json_messages.MAX_BYTES + 1, 1 << 60, 0, -5):
        said, _ = run_ranks(announce, 2, size)
        assert f"rank 1 of group 'default_pg' announced a message of {size} bytes" in said


def send_no_json():
    with start_process("cpu", timeout_s=20) as process:
        if process.rank == 1:  # what the object collectives would have unpickled
            real, json_messages._encoded = json_messages._encoded, lambda value: value
            try:
                return str(
                    all_gather_json(
                        torch.frombuffer(bytearray(b"cos\n."), dtype=torch.uint8), world()
                    )
                )
            except ValueError as error:
                return str(error)
            finally:
                json_messages._encoded = real
        try:
            all_gather_json("mine", world())
        except ValueError as error:
            return str(error)


def test_what_is_no_json_is_an_error_on_every_rank():
    assert all("Expecting value" in said for said in run_ranks(send_no_json, 2))
