"""ExpertMap and packing: every expert is placed, slots are respected, the load never gets worse, and
small cases match an exhaustive search.
"""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.distributed.dispatch.expert_map import ExpertMap, ExpertRange, contiguous_map
from moebius.distributed.placement.balance_load import (
    load_imbalance,
    packed,
    rank_loads,
    rebalanced,
)


@st.composite
def problems(draw):
    """(loads, ranks, replicas)"""
    num_ranks = draw(st.integers(1, 8))
    num_experts = draw(st.integers(num_ranks, 40))
    loads = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(0, 10**6)), min_size=num_experts, max_size=num_experts
        )
    )
    return loads, num_ranks, draw(st.integers(0, 4))


def slots_with(replicas, before):
    """Slots of every rank with so many more, but no more than there are experts."""
    return tuple(min(count + replicas, before.num_experts) for count in before.slots_P)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_a_packing_is_whole_fits_and_is_never_hotter(problem):
    loads, num_ranks, replicas = problem
    before = contiguous_map(len(loads), num_ranks)
    after = rebalanced(before, loads, replicas=replicas)
    assert load_imbalance(after, loads) <= load_imbalance(before, loads)
    slots_P = slots_with(replicas, before)
    for expert_map in (after, packed(loads, slots_P)):
        assert expert_map.slots_P in (before.slots_P, slots_P)
        assert expert_map.num_experts == len(loads)
        by_slot = [expert_map.expert_S[slot] for slot in range(expert_map.num_slots)]
        assert set(by_slot) == set(range(len(loads)))  # nothing empty, every expert at least once
        for rank in range(num_ranks):
            own = [expert_map.expert_S[slot] for slot in expert_map.own_slots(rank)]
            assert len(own) == expert_map.slots_P[rank]
            assert len(set(own)) == len(own)
        assert sum(rank_loads(expert_map, loads)) == pytest.approx(sum(loads))
        assert packed(loads, slots_P) == packed(list(loads), list(slots_P))
        assert ExpertMap.from_dict(json.loads(json.dumps(expert_map.as_dict()))) == expert_map


@settings(max_examples=200, deadline=None)
@given(problems())
def test_every_rank_sees_one_slot_per_expert_and_its_own_copy_first(problem):
    loads, num_ranks, replicas = problem
    expert_map = packed(loads, slots_with(replicas, contiguous_map(len(loads), num_ranks)))
    seen = [expert_map.seen_from(rank) for rank in range(num_ranks)]
    for expert, slots in enumerate(expert_map.slots_E):
        serving = [(view.slot_E or ())[expert] for view in seen]
        assert set(serving) == set(slots)
        for rank, slot in enumerate(serving):
            own = [copy for copy in slots if expert_map.rank_S[copy] == rank]
            assert own in ([], [slot])
        served = [serving.count(slot) for slot in slots]  # as evenly as can be
        assert max(served) - min(served) <= 1
    for view in seen:
        assert view.slots_P == expert_map.slots_P
        assert view.copies == ()
        assert view.filled_once == (expert_map.num_slots == len(loads))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_pieces_of_the_ranks_are_the_bank(problem):
    loads, num_ranks, replicas = problem
    expert_map = packed(loads, slots_with(replicas, contiguous_map(len(loads), num_ranks)))
    first, all_of = [], 0
    for rank in range(num_ranks):
        for piece in expert_map.ranges_of(rank):
            for offset in range(piece.length):
                slot = expert_map.own_slots(rank)[piece.slot + offset]
                assert expert_map.expert_S[slot] == piece.expert + offset
                all_of += 1
                first += [piece.expert + offset] * piece.is_first
    assert sorted(first) == list(range(len(loads)))  # each counted once
    assert all_of == expert_map.num_slots


def test_a_block_is_one_piece():
    expert_map = contiguous_map(155, 4)
    assert [expert_map.ranges_of(rank) for rank in range(4)] == [
        [ExpertRange(0, 0, 39, True)],
        [ExpertRange(39, 0, 39, True)],
        [ExpertRange(78, 0, 39, True)],
        [ExpertRange(117, 0, 38, True)],
    ]


def best_factor(loads, num_ranks):
    """By trying every way to give equally many experts to every rank."""
    share = len(loads) // num_ranks
    best = float("inf")
    for order in itertools.permutations(range(len(loads))):
        sums = [
            sum(loads[e] for e in order[rank * share : rank * share + share])
            for rank in range(num_ranks)
        ]
        best = min(best, max(sums))
    return best * num_ranks / sum(loads)


def test_packing_is_within_a_third_of_the_best():
    """Graham's bound for LPT, 4/3 − 1/(3P); with as many experts as slots it is not proven, so it
    is tried.
    """
    generator = random.Random(3)
    for _ in range(20):
        loads = [generator.randint(1, 50) for _ in range(6)]
        expert_map = packed(loads, (2, 2, 2))
        assert load_imbalance(expert_map, loads) <= (4 / 3 - 1 / 9) * best_factor(loads, 3)


def test_one_hot_expert_needs_copies():
    loads = [97, 1, 1, 1, 1, 1, 1, 1]
    expert_map = contiguous_map(8, 4)
    alone = rebalanced(expert_map, loads)
    assert load_imbalance(alone, loads) == pytest.approx(98 * 4 / 104)
    copied = rebalanced(expert_map, loads, replicas=1)
    assert len(copied.slots_E[0]) == 4
    assert load_imbalance(copied, loads) < 1.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2, 2), (0, 0, 1, 2)), r"slots \[0\] have two experts"),
        (((2, 2), (0, 1, 2), ((0, 1),)), r"slots \[1\] have two experts"),
        (((2, 2), (0, 2, 3), ((0, 1),)), r"expert 0 is twice on one rank: in slots \(0, 1\)"),
        (((2, 2), None, ((0, 3),)), "every slot has its own expert"),
    ],
)
def test_tables_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ExpertMap(*arguments)


def test_what_is_even_already_stays():
    expert_map = contiguous_map(6, 3)
    assert rebalanced(expert_map, [5] * 6) is expert_map
    assert rebalanced(expert_map, [0] * 6) is expert_map
    assert rebalanced(expert_map, [5] * 6, replicas=2) is expert_map
    assert load_imbalance(expert_map, [0] * 6) == 1.0
    assert rebalanced(contiguous_map(3, 1), [1, 2, 3], replicas=2) == contiguous_map(3, 1)
