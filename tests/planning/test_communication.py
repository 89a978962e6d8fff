"""Bytes and seconds of collectives, against published figures and against drawn routes."""

from dataclasses import replace
from math import comb
from typing import Any

import numpy as np
import pytest

from moebius.planning.communication import (
    Traffic,
    collective_s,
    combine_direction,
    dispatch_direction,
    distinct_destinations,
    exchange_s,
    exchange_traffic,
    ranks_sharing_a_node,
    ring_latency_s,
    row_copies,
    strided_group,
    tree_latency_s,
)
from moebius.planning.hardware import HARDWARE
from moebius.planning.workload import Bank

H100 = HARDWARE["h100"]
DEEPSEEK_V3 = Bank("feed_forward", "feed_forward", 256, 8, 7168, 7168, 0, 0, route_bytes=0)
QWEN3_30B = Bank("feed_forward", "feed_forward", 128, 8, 2048, 2048, 0, 0, route_bytes=0)


def traffic_of(
    bank: Bank,
    dispatcher: str,
    *,
    ep: int,
    tokens: int,
    way: Any = dispatch_direction,
    node: int = 8,
) -> Traffic:
    return exchange_traffic(
        way(bank, 2), tokens=tokens, ep=ep, ranks_per_node=node, dispatcher=dispatcher
    )


def dispatch_ms(bank: Bank, dispatcher: str, *, ep: int, tokens: int) -> float:
    traffic = traffic_of(bank, dispatcher, ep=ep, tokens=tokens)
    return 1e3 * exchange_s(traffic, H100, dispatcher=dispatcher)


# Destinations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "expected"), [(2, 1.99), (4, 3.61), (8, 5.29), (16, 6.52), (32, 7.27), (64, 7.68)]
)
def test_distinct_destinations_of_8_of_256(groups: int, expected: float) -> None:
    exact = groups * (1 - comb(256 - 256 // groups, 8) / comb(256, 8))
    assert distinct_destinations(groups, num_experts=256, top_k=8) == pytest.approx(
        exact, rel=1e-12
    )
    assert round(exact, 2) == expected
    assert row_copies(DEEPSEEK_V3, "row", groups).rows == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("heads", "experts", "top_k", "ranks"),
    [(1, 16, 4, 4), (4, 10, 2, 8), (4, 4, 2, 2), (2, 6, 3, 4)],
)
def test_spread_agrees_with_drawn_routes(heads: int, experts: int, top_k: int, ranks: int) -> None:
    """Every head chooses among its own experts; ranks hold blocks of all heads' experts."""
    bank = Bank("value", "value", experts, top_k, 8, 4, 32, 4, heads=heads)
    draws, block = np.random.default_rng(1), heads * experts // ranks
    by_row = by_head = 0
    for _ in range(4000):
        ranks_of_heads = [
            {
                (head * experts + int(expert)) // block
                for expert in draws.permutation(experts)[:top_k]
            }
            for head in range(heads)
        ]
        by_row += len(set().union(*ranks_of_heads))
        by_head += sum(map(len, ranks_of_heads))
    assert row_copies(bank, "row", ranks).rows == pytest.approx(by_row / 4000, rel=0.02)
    assert row_copies(bank, "head", ranks).rows == pytest.approx(by_head / 4000, rel=0.02)
    assert row_copies(bank, "route", ranks).rows == heads * top_k


def test_a_broken_number_of_experts_lies_between_its_neighbours() -> None:
    one, half, two = (distinct_destinations(4, num_experts=8, top_k=top_k) for top_k in (1, 1.5, 2))
    assert half == pytest.approx((one + two) / 2)


def test_a_group_limit_caps_destinations() -> None:
    limited = replace(DEEPSEEK_V3, group_limit=(8, 4))
    assert row_copies(limited, "row", 8).rows == 4
    assert row_copies(limited, "row", 2).rows == pytest.approx(
        distinct_destinations(2, num_experts=256, top_k=8)
    )


# Exchanges: the published table of dispatch costs for DeepSeek-V3's shape, 4,096 tokens, bf16, H100


@pytest.mark.parametrize(
    ("ep", "flat", "deduplicated"),
    [
        (8, 1.15, 0.77),
        (16, 5.2, 1.3),
        (32, 7.9, 3.6),
        (64, 9.2, 6.1),
        (128, 9.9, 8.0),
        (256, 10.4, 9.3),
    ],
)
def test_dispatch_of_deepseek_v3(ep: int, flat: float, deduplicated: float) -> None:
    rounding = 0.006 if ep == 8 else 0.055  # of the printed figures
    for dispatcher, expected in (("alltoall", flat), ("hierarchical", deduplicated)):
        found = dispatch_ms(DEEPSEEK_V3, dispatcher, ep=ep, tokens=4096)
        assert found == pytest.approx(expected, abs=rounding)


def test_dispatch_of_qwen3_30b() -> None:
    assert dispatch_ms(QWEN3_30B, "dedup", ep=8, tokens=16384) == pytest.approx(0.88, abs=0.006)
    assert dispatch_ms(QWEN3_30B, "alltoall", ep=8, tokens=16384) == pytest.approx(1.32, abs=0.006)


def test_bytes_split_between_links() -> None:
    """K = 2, 8-byte rows, 4 ranks on 2 nodes: of 4 destinations one is local, one on the node, two
    remote.
    """
    bank = Bank("feed_forward", "feed_forward", 4, 2, 4, 4, 0, 0, route_bytes=0)
    traffic, dedup, two = (
        traffic_of(bank, name, ep=4, tokens=100, node=2)
        for name in ("alltoall", "dedup", "hierarchical")
    )
    assert (traffic.fast_bytes, traffic.slow_bytes) == (100 * 2 * 8 / 4, 100 * 2 * 8 / 2)
    assert (traffic.fast_peers, traffic.slow_peers) == (1, 2)
    # Two of four experts on four ranks are on two ranks; a node is missed once in C(4, 2).
    assert dedup.num_bytes == pytest.approx(100 * 8 * 2 * 3 / 4)
    assert two.slow_bytes == pytest.approx(100 * 8 * (2 * (1 - 1 / 6)) / 2)


def test_answers_of_heads_travel_one_by_one() -> None:
    """V of SwitchHead sends one wide row out and a narrow one per head back; O does the reverse."""
    value = Bank("value", "value", 10, 2, 1024, 128, 0, 0, heads=4, target="head", route_bytes=0)
    there, back = (
        traffic_of(value, "dedup", ep=8, tokens=1, way=way).held_bytes
        for way in (dispatch_direction, combine_direction)
    )
    per_head = 2 * (1 - comb(5, 2) / comb(10, 2))  # 5 of a head's 10 experts are on each of 2 ranks
    assert there == pytest.approx(4 * per_head * 1024 * 2)
    assert back == pytest.approx(4 * per_head * 128 * 2)


def test_a_rank_gets_no_row_twice() -> None:
    """With 16 of 32 experts on 2 ranks, nearly every row goes everywhere, so skew adds routes but
    no rows.
    """
    bank = Bank("feed_forward", "feed_forward", 32, 16, 64, 64, 0, 0, route_bytes=0)
    slower = {}
    for name in ("dedup", "alltoall"):
        traffic = traffic_of(bank, name, ep=2, tokens=1000)
        even, skewed = (
            exchange_s(traffic, H100, dispatcher=name, skew=skew) for skew in (1.0, 1.8)
        )
        slower[name] = skewed / even
    assert slower["dedup"] == pytest.approx(1, rel=1e-2)
    assert slower["alltoall"] > 1.02


def test_posting_to_peers_is_hockneys_latency() -> None:
    traffic = traffic_of(QWEN3_30B, "alltoall", ep=8, tokens=64)
    message = traffic.fast_bytes / 7
    reached = H100.fast * message / (message + H100.fast_post_s * H100.fast)
    assert exchange_s(traffic, H100, dispatcher="alltoall") == pytest.approx(
        H100.exchange_start_s + traffic.fast_bytes / reached
    )


# Dense collectives --------------------------------------------------------------------------------


def test_rings_of_1250_nodes_wait_12_ms_and_trees_do_not() -> None:
    group = strided_group(1250, 8, 8)
    assert ring_latency_s(group, H100) == pytest.approx(12e-3, rel=0.01)
    assert tree_latency_s(group, H100) == pytest.approx(0.2e-3, rel=0.03)


def test_a_ring_uses_every_adapter_of_its_ranks() -> None:
    gigabyte = 1e9
    one_each, eight_each = strided_group(16, 8, 8), strided_group(128, 1, 8)
    assert (one_each.per_node, one_each.nodes) == (1, 16)
    assert (eight_each.per_node, eight_each.nodes) == (8, 16)
    slow = collective_s("all_gather", gigabyte, one_each, H100)
    fast = collective_s("all_gather", gigabyte, eight_each, H100)
    assert slow == pytest.approx(gigabyte * 15 / 16 / 45e9, rel=0.02)
    assert fast == pytest.approx(gigabyte * 127 / 128 / 360e9, rel=0.3)


@pytest.mark.parametrize(
    ("size", "expected"), [(4, 4), (8, 8), (64, 8), (12, 4), (5, 1), (25, 1), (20, 4)]
)
def test_groups_that_straddle_nodes_count_their_loneliest_rank(size: int, expected: int) -> None:
    groups = (
        [rank // 8 for rank in range(start, start + size)] for start in range(0, 40 * size, size)
    )
    fewest = min(nodes.count(node) for nodes in groups for node in set(nodes))
    assert ranks_sharing_a_node(size, 8) == fewest == expected


def test_a_rank_alone_waits_for_nobody() -> None:
    assert dispatch_ms(QWEN3_30B, "alltoall", ep=1, tokens=100) == 0
    assert collective_s("all_reduce", 4e3, strided_group(1, 1, 8), H100) == 0
    assert collective_s("all_reduce", 0, strided_group(8, 1, 8), H100) == 0
