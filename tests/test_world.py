"""The runner of ranks: what it returns, and how it ends."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from world import RankFailed, run_ranks

from moebius.distributed.process.process import start_process


@dataclass(frozen=True)
class Place:
    rank: int
    pid: int


def place(tag):
    assert tag == Place(-1, -1)
    return Place(int(os.environ["RANK"]), os.getpid())


def gathered():
    with start_process("cpu", timeout_s=20) as process:
        values = [torch.zeros(1) for _ in range(process.world_size)]
        dist.all_gather(values, torch.tensor([float(process.rank)]))
        return torch.cat(values)


def one_fails(bad_rank):
    with start_process("cpu", timeout_s=20) as process:
        if process.rank == bad_rank:
            raise KeyError("the cause")
        dist.barrier()


def one_dies():
    if os.environ["RANK"] == "1":
        os._exit(7)


def one_is_late():
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return os.getpid()


def test_results_come_by_rank_and_classes_of_the_test_file_travel():
    places = run_ranks(place, 3, Place(-1, -1))
    assert [found.rank for found in places] == [0, 1, 2]
    assert len({found.pid for found in places} | {os.getpid()}) == 4


def test_the_ranks_share_a_gloo_world():
    results = run_ranks(gathered, 4)
    assert all(torch.equal(result, torch.arange(4.0)) for result in results)


def test_the_first_failure_brings_its_traceback():
    with pytest.raises(RankFailed, match=r"(?s)rank 2 of 4 failed.*raise KeyError\(.the cause.\)"):
        run_ranks(one_fails, 4, 2)


def test_a_rank_that_dies_is_named():
    with pytest.raises(
        RankFailed, match=r"rank 1 of 2 failed:\nthe process died without a word .exit code 7"
    ):
        run_ranks(one_dies, 2)


def test_a_late_rank_is_named_with_its_stack_and_killed():
    started = time.monotonic()
    with pytest.raises(
        RankFailed, match=r"(?s)ranks \[1\] did not come back \(ranks \[0\] did\).*in one_is_late"
    ):
        run_ranks(one_is_late, 2, timeout_s=1)
    assert time.monotonic() - started < 5


def test_a_nested_function_is_refused():
    with pytest.raises(ValueError, match="module-level function"):
        run_ranks(lambda: 1, 1)
