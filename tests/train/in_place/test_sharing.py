"""Who has whose state, and the newest step of which every part exists."""

import pytest

from moebius.train.in_place.sharing import RestorePlan, Sharing, plan_restore

REPLICATED = Sharing(world_size=4, ep=2, ranks_per_node=2)
ALONE = Sharing(world_size=4, ep=4, ranks_per_node=2)  # nobody else has a rank's experts


@pytest.mark.parametrize(
    ("sharing", "holders"),
    [
        (REPLICATED, [[2], [3], [0], [1]]),
        (ALONE, [[2], [3], [0], [1]]),  # on the other node
        (Sharing(4, ep=4, ranks_per_node=4), [[1], [2], [3], [0]]),
        (Sharing(3, ep=1, ranks_per_node=3), [[1, 2], [0, 2], [0, 1]]),
    ],
)
def test_who_holds_a_ranks_experts(sharing, holders):
    ranks = range(sharing.world_size)
    assert [sharing.holders_of(rank) for rank in ranks] == holders
    assert [sharing.buddy_of(sharing.ward_of(rank)) for rank in ranks] == list(ranks)
    assert sharing.needs_buddies == (sharing.ep == sharing.world_size)


@pytest.mark.parametrize("sharing", [REPLICATED, ALONE])
def test_all_go_back_to_the_newest_step_that_all_have(sharing):
    steps = {0: [6, 8], 1: [4, 6], 2: [8, 6], 3: []}
    assert plan_restore(steps, [3], sharing) == RestorePlan(6, 0, {3: 1})


def test_rank_0_may_be_lost():
    steps = {0: [], 1: [6], 2: [6], 3: [6]}
    assert plan_restore(steps, [0], REPLICATED) == RestorePlan(6, 1, {0: 2})


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ({0: [6], 1: [4], 2: [6], 3: []}, [3]),  # no step in common
        ({0: [], 1: [6], 2: [], 3: [6]}, [0, 2]),  # both that had the same experts
        ({}, [0, 1, 2, 3]),
        ({0: [6], 1: [6], 3: []}, [3]),  # rank 2 has none
    ],
)
def test_without_all_parts_there_is_no_way_back(steps, lost):
    assert plan_restore(steps, lost, REPLICATED) is None


def test_two_may_be_lost_whose_experts_others_have():
    steps = {0: [], 1: [], 2: [6], 3: [6]}
    assert plan_restore(steps, [1, 0], REPLICATED) == RestorePlan(6, 2, {0: 2, 1: 3})
