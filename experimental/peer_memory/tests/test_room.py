"""Room for what comes, whose number nobody reads: the bits of exact counts, and a step that is made
again where there was too little.
"""

from typing import Any

import pytest
import torch
from dispatch_cases import (
    Case,
    Scene,
    case,
    choose,
    dispatcher_of,
    own_layer,
    run_layer,
    world,
)
from world import run_ranks

from experimental.peer_memory.peer_outbox import PeerOutbox
from experimental.peer_memory.tests.shared_files import open_files, to_nearest
from moebius.distributed.dispatch.base import equal_rows
from moebius.kernels import sends

TOKENS = 13
CHOICES = ("even", "first", "last rank", "not rank 0")
KINDS = ("token", "token to head", "head to token")


def equal_case(kind: str, choice: str, rank: int, dtype: torch.dtype) -> Case:
    """As many rows on every rank."""
    scene = Scene((TOKENS,) * 4, choice=choice)
    experts_TK = choose(scene, TOKENS, torch.Generator().manual_seed(rank))
    return case(kind, experts_TK, 100 + rank, dtype)


def through_room(dtype: torch.dtype) -> tuple[dict[tuple, Any], int]:
    """What differs from `dedup`, and whether there was too little; and how often headers were read."""
    found, reads = {}, list[int]()
    with world() as (process, group, nodes):
        sends._sum_by_row = to_nearest
        compare = PeerOutbox._compare
        PeerOutbox._compare = lambda self, heads: reads.append(1) or compare(self, heads)  # pyright: ignore[reportAttributeAccessIssue]
        outbox = open_files(group, row_bytes=64)
        torch.use_deterministic_algorithms(True)  # and what is not written is NaN
        for kind in KINDS:
            for choice in CHOICES:
                given = equal_case(kind, choice, process.rank, dtype)
                exact: Any = dispatcher_of("dedup", group, nodes)
                wanted = run_layer(own_layer(process, exact, dtype), given)
                for factor in (0.2, 2.0, 9.0):
                    roomy: Any = dispatcher_of("symmetric", group, nodes, outbox=outbox)
                    roomy.setup.room.factor = factor
                    with equal_rows():
                        result = run_layer(own_layer(process, roomy, dtype), given)
                    is_over = roomy.setup.room.take()
                    assert is_over is not None
                    same = all(torch.equal(value, result[name]) for name, value in wanted.items())
                    ours, theirs = roomy.stats(), exact.stats()
                    counted = (ours.rows_sent, ours.routes_served) == (
                        theirs.rows_sent,
                        theirs.routes_served,
                    )
                    found[kind, choice, factor] = same, counted, bool(is_over)
    return found, len(reads)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_room_gives_the_bits_of_exact_counts_or_says_that_it_is_too_little(
    dtype: torch.dtype,
) -> None:
    ranks = run_ranks(through_room, 4, dtype, timeout_s=120)
    for found, reads in ranks:
        assert reads == 0
        assert len(found) == len(KINDS) * len(CHOICES) * 3
    for key, (_, _, _) in ranks[0][0].items():
        here = [found[key] for found, _ in ranks]
        assert all(counted for _, counted, _ in here), key
        any_over = any(is_over for _, _, is_over in here)
        assert any_over or all(same for same, _, _ in here), key
        _, choice, factor = key
        if factor == 9.0 or (factor == 2.0 and choice == "even"):
            assert not any_over, key
        if factor == 0.2:
            assert any_over, key
    lopsided = [found["token", "last rank", 2.0][2] for found, _ in ranks]
    assert lopsided == [False, False, False, True]
