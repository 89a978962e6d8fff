"""The runner of ranks: what it returns, and how it ends."""

import os
import time
from dataclasses import dataclass

import pytest
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


def test_results_come_by_rank_and_classes_of_the_test_file_travel():
    places = run_ranks(place, 3, Place(-1, -1))
    assert [found.rank for found in places] == [0, 1, 2]
    assert len({found.pid for found in places} | {os.getpid()}) == 4


@pytest.mark.parametrize(
    ("end", "arguments", "message"),
    [
        (one_fails, (1,), r"(?s)rank 1 of 2 failed.*raise KeyError\(.the cause.\)"),
        (one_dies, (), r"rank 1 of 2 failed:\nthe process died without a word .exit code 7"),
        (one_is_late, (), r"(?s)ranks \[1\] did not come back \(ranks \[0\] did\).*in one_is_late"),
    ],
)
def test_a_rank_that_fails_dies_or_is_late_is_named(end, arguments, message):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        run_ranks(end, 2, *arguments, timeout_s=2 if end is one_is_late else 20)
    assert time.monotonic() - started < 30


def test_a_nested_function_is_refused():
    with pytest.raises(ValueError, match="module-level function"):
        run_ranks(lambda: 1, 1)
