"""Recorded routes on other numbers of ranks: every token keeps its routes, wherever it goes."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from family import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from moebius.model.routing import Routes, slot_routes
from moebius.simulation.recorded_routes import recorded_steps
from moebius.simulation.replay import cut, deal, replay
from moebius.train.record.route_tap import CallId, RoutedCall
from moebius.train.record.route_trace import RecordedRank, StepTrace, write_rank

EXPERTS = 6
CALL_ID = CallId(step=1, micro_batch=0, depth=1, layer="group.0.attention.value")


def recorded(tokens: int, *, rows: int, targets: int, drop: float, seed: int) -> RoutedCall:
    """Every (token, row) through 2 experts into a target row of the same token; some dropped."""
    draws = np.random.default_rng(seed)
    per_token = 2 * max(rows, targets)
    token = np.repeat(np.arange(tokens), per_token)
    within = np.tile(np.arange(per_token), tokens)
    routes = Routes(
        torch.from_numpy(token * rows + within * rows // per_token),
        torch.from_numpy(draws.integers(0, EXPERTS, len(token))),
        torch.ones(len(token)),
        torch.from_numpy(token * targets + within * targets // per_token),
        EXPERTS,
        tokens * targets,
        per_token // rows,
        per_token // targets,
    )
    if drop:
        routes = routes.kept(torch.from_numpy(draws.random(len(token)) >= drop))
    return RoutedCall(CALL_ID, routes, num_rows=tokens * rows, width_in=4, width_out=4)


def addresses(calls: list[RoutedCall], tokens: list[int], rows: int, targets: int) -> Counter:
    """(source row, expert, target row) of all routes, rows numbered over all ranks."""
    found, before = Counter(), 0
    for call, count in zip(calls, tokens, strict=True):
        found.update(
            zip(
                (call.routes.source_N + before * rows).tolist(),
                call.routes.expert_N.tolist(),
                (call.routes.target_N + before * targets).tolist(),
                strict=True,
            )
        )
        before += count
    return found


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    num_ranks=st.integers(1, 7),
    sizes=st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2)]),
    drop=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_every_route_is_dealt_to_the_rank_of_its_token(
    tokens, num_ranks, sizes, drop, seed
) -> None:
    rows, targets = sizes
    calls = [
        recorded(count, rows=rows, targets=targets, drop=drop, seed=seed + i)
        for i, count in enumerate(tokens)
    ]
    ends = cut(sum(tokens), num_ranks)
    dealt = Counter()
    for rank, call in enumerate(deal(calls, tokens, num_ranks)):
        own = call.routes
        first, last = int(ends[rank]), int(ends[rank + 1])
        assert call.num_rows == (last - first) * rows
        assert own.num_targets == (last - first) * targets
        assert max(own.source_N.tolist(), default=0) < max(1, call.num_rows)
        dealt.update(
            zip(
                (own.source_N + first * rows).tolist(),
                own.expert_N.tolist(),
                (own.target_N + first * targets).tolist(),
                strict=True,
            )
        )
        if own.per_source:  # the rule still says what the lists say
            number = torch.arange(len(own.expert_N))
            assert torch.equal(own.source_N, number // own.per_source)
            assert torch.equal(own.target_N, number // own.per_target)
        assert bool(own.per_source) is (not drop)
    assert dealt == addresses(calls, tokens, rows, targets)
    assert max(np.diff(ends)) - min(np.diff(ends)) <= 1


@pytest.mark.parametrize(
    ("shares", "num_ranks", "known"),
    [([2, 2], 2, True), ([2, 2], 4, True), ([3, 3], 4, False), ([1], 3, False)],
)
def test_slots_are_shared_expert_by_expert(shares: list[int], num_ranks: int, known: bool) -> None:
    calls = [
        RoutedCall(
            CALL_ID,
            slot_routes(share * EXPERTS, num_experts=EXPERTS, device=torch.device("cpu")),
            num_rows=share * EXPERTS,
            width_in=4,
            width_out=4,
        )
        for share in shares
    ]
    dealt = deal(calls, [1] * len(shares), num_ranks)
    routes = [call.routes for call in dealt]
    load = np.sum([np.bincount(own.expert_N.numpy(), minlength=EXPERTS) for own in routes], axis=0)
    assert load.tolist() == [sum(shares)] * EXPERTS
    assert [call.num_rows for call in dealt] == [len(own.expert_N) for own in routes]
    assert all((own.per_expert > 0) is known for own in routes)


def test_on_as_many_ranks_every_rank_gets_what_it_had(tmp_path: Path) -> None:
    tapped = []
    for rank in range(3):
        model = tiny_model("moeut")
        trace = StepTrace(model, tmp_path, step=1, every=1, rank=rank, num_ranks=3)
        for micro_batch in range(2):
            tokens = torch.randint(
                61, (2, 5), generator=torch.Generator().manual_seed(10 * rank + micro_batch)
            )
            with trace.micro_batch(tokens):
                model(tokens)
        trace.save()
        tapped.append(trace._calls)
    dealt = list(replay(recorded_steps(tmp_path), 3))
    assert len(dealt) == len(tapped[0]) == 2 * 4 * 3
    for number, calls in enumerate(dealt):
        for rank in range(3):
            then, now = tapped[rank][number], calls[rank].routes
            assert calls[rank].id == then.id
            assert calls[rank].num_rows == then.num_rows
            for name in ("source_N", "expert_N", "target_N"):
                assert torch.equal(getattr(now, name), getattr(then.routes, name))
            for name in ("num_experts", "num_targets", "per_source", "per_target", "per_expert"):
                assert getattr(now, name) == getattr(then.routes, name)


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    straying = recorded(4, rows=1, targets=1, drop=0.1, seed=0)
    straying.routes.target_N[0] = 3
    with pytest.raises(ValueError, match="leads from one token to another"):
        deal([straying], [4], 2)
    with pytest.raises(ValueError, match=r"\[5\] recorded rows do not belong to \[4\] tokens"):
        deal(
            [dataclasses.replace(recorded(4, rows=1, targets=1, drop=0, seed=0), num_rows=5)],
            [4],
            2,
        )
    call = recorded(4, rows=1, targets=1, drop=0, seed=0)
    for rank, calls in enumerate([(call, call), (call,)]):
        write_rank(tmp_path, RecordedRank(1, rank, 2, (4,), calls))
    with pytest.raises(ValueError, match=r"step 1: its ranks recorded \[2, 1\] calls"):
        list(replay(recorded_steps(tmp_path), 2))
    other = dataclasses.replace(call, id=dataclasses.replace(CALL_ID, depth=2))
    write_rank(tmp_path, RecordedRank(1, 1, 2, (4,), (other, call)))
    with pytest.raises(
        ValueError, match=r"step 1: its ranks recorded different calls.*depth step 2"
    ):
        list(replay(recorded_steps(tmp_path), 2))
