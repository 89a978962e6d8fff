"""Ranks on threads: collectives with real values on up to 256 ranks, traffic counts, failures."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moebius.distributed.dispatch.exchange import (
    AllGather,
    AllToAll,
    AsyncCollective,
    Counters,
    ExchangeMismatch,
    ReduceScatter,
    _check_splits,
)
from moebius.distributed.layout import Layout, group_of
from moebius.planning.simulation import threads as simulated_world
from moebius.planning.simulation.threads import (
    RankFailed,
    SimulationUnavailable,
    TrafficCounter,
    run_threads,
)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def lengths(num_ranks: int) -> np.ndarray:
    """Returns row counts [from, to]; some ranks send or receive nothing, some pairs exchange
    nothing.
    """
    counts = np.random.default_rng(num_ranks).integers(0, 3, (num_ranks, num_ranks))
    counts[1], counts[:, num_ranks // 2] = 0, 0
    return counts


def rows_between(source: int, target: int, count: int) -> Tensor:
    return torch.full((count, 3), float(source * 1000 + target)) + torch.arange(count)[:, None] / 8


@pytest.mark.parametrize("num_ranks", [2, 64])  # 256: a whole layer in test_dispatch.py
def test_uneven_exchanges_bring_every_row_where_it_belongs(num_ranks: int) -> None:
    counts = lengths(num_ranks)
    traffic = TrafficCounter(num_ranks)

    def run_rank(rank: int) -> tuple[Tensor, Tensor]:
        sent = torch.cat(
            [rows_between(rank, to, int(count)) for to, count in enumerate(counts[rank])]
        ).requires_grad_()
        collective = AllToAll(world(), counts[rank].tolist(), counts[:, rank].tolist())
        with traffic.counting(rank, widths={3}):
            came = AsyncCollective(sent, collective, Counters()).wait()
        (came * (rank + 1)).sum().backward()
        assert sent.grad is not None
        return came.detach(), sent.grad

    for rank, (came, grad) in enumerate(run_threads(run_rank, num_ranks, traffic=traffic)):
        expected = [
            rows_between(source, rank, int(count)) for source, count in enumerate(counts[:, rank])
        ]
        assert torch.equal(came, torch.cat(expected))
        back = [torch.full((int(count), 3), to + 1.0) for to, count in enumerate(counts[rank])]
        assert torch.equal(grad, torch.cat(back))
    assert (traffic.rows_PP == counts).all()
    assert (traffic.bytes_PP == 12 * counts).all()


def test_the_wire_counts_gathers_and_reductions_and_tells_rows_from_all_else() -> None:
    traffic, layout = TrafficCounter(6), Layout(dp_replicate=2, ep=3)

    def run_rank(rank: int) -> None:
        group = dist.new_group(group_of(layout, "ep", rank), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        with traffic.counting(rank, widths={5}):
            for collective, shape in (
                (AllGather(group), (4, 5)),
                (ReduceScatter(group), (6, 5)),
                (AllGather(group), (2, 7)),
            ):
                collective.start(torch.ones(shape)).wait()
        AllGather(group).start(torch.ones(4, 5)).wait()

    run_threads(run_rank, 6, traffic=traffic)
    same_group = np.kron(np.eye(2, dtype=int), np.ones((3, 3), int))
    # Four rows gathered and a third of six reduced; a line of width 7 is not a row.
    assert (traffic.rows_PP == same_group * (4 + 2)).all()
    assert (traffic.bytes_PP == same_group * 4 * (4 * 5 + 2 * 5 + 2 * 7)).all()


def test_one_failure_ends_the_world_and_the_next_one_is_sound() -> None:
    hook, before = sys.excepthook, threading.active_count()

    def run_rank(rank: int) -> int:
        if rank == 3:
            raise RuntimeError("a dispatcher's fault")
        dist.all_reduce(torch.zeros(1))
        return rank

    with pytest.raises(
        RankFailed, match="simulated rank 3 of 8: RuntimeError: a dispatcher's fault"
    ):
        run_threads(run_rank, 8)
    assert threading.active_count() == before
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert run_threads(lambda rank: rank, 8) == list(range(8))


def test_ranks_that_disagree_about_an_exchange_are_named() -> None:
    def run_rank(rank: int) -> None:
        received = [1, 1] if rank == 0 else [2, 1]
        AsyncCollective(torch.ones(2, 3), AllToAll(world(), [1, 1], received), Counters()).wait()

    with pytest.raises(
        RankFailed, match="rank 0 of the group sends 1 rows to rank 1, which expects 2"
    ):
        run_threads(run_rank, 2)


def test_a_rank_that_sends_other_rows_than_it_has_is_named_on_all() -> None:
    def run_rank(rank: int) -> str:
        collective = AllToAll(world(), [1, 1], [1, 1])
        with pytest.raises(ExchangeMismatch) as caught:
            _check_splits(torch.ones(2 + rank, 3), collective, world())
        return str(caught.value)

    told = run_threads(run_rank, 2)
    assert told[0] == told[1]
    assert told[0].endswith("disagree about an exchange: rank 1 has 3 rows but sends 2 ([1, 1])")


def test_a_rank_that_does_not_come_is_found() -> None:
    before = threading.active_count()
    with pytest.raises(
        RankFailed,
        match=r"no progress for 0\.5 s: simulated ranks 0-1, 3 are still waiting for others",
    ):
        run_threads(lambda rank: rank == 2 or dist.all_reduce(torch.zeros(1)), 4, timeout_s=0.5)
    assert threading.active_count() == before


def test_ranks_that_end_one_after_another_are_not_late() -> None:
    """Consecutive signs of life are within the limit, the first and the last are not."""

    def run_rank(rank: int) -> int:
        time.sleep(0.5 * rank)
        return rank

    assert run_threads(run_rank, 4, timeout_s=1.0) == [0, 1, 2, 3]


def test_a_mistake_of_the_user_stays_a_value_error() -> None:
    def run_rank(rank: int) -> None:
        raise ValueError("wrong: mesh")

    with pytest.raises(ValueError, match=r"^wrong: mesh$"):
        run_threads(run_rank, 2)


@pytest.mark.parametrize("num_ranks", [0, 257])
def test_there_are_only_so_many_threads(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} simulated ranks: must be 1 to 256"):
        run_threads(lambda rank: rank, num_ranks)


def test_a_torch_without_the_private_parts_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated_world._threaded.cache_clear()
    module = "torch.testing._internal.distributed.multi_threaded_pg"
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(module, raising=False)
    with pytest.raises(
        SimulationUnavailable,
        match=rf"torch {torch.__version__.split('+')[0]}.* has no .*install a torch",
    ):
        run_threads(lambda rank: rank, 2)
    assert not dist.is_initialized()
