"""Bytes and seconds of collectives, against published figures and against drawn routes."""

from dataclasses import replace

import numpy as np
import pytest

from moebius.planning.communication import (
    Traffic,
    collective_s,
    dispatch_direction,
    exchange_s,
    exchange_traffic,
    miss_probability,
    row_copies,
    strided_group,
)
from moebius.planning.hardware import HARDWARE
from moebius.planning.workload import Bank

H100 = HARDWARE["h100"]
DEEPSEEK_V3 = Bank("feed_forward", "feed_forward", 256, 8, 7168, 7168, 0, 0, route_bytes=0)
QWEN3_30B = Bank("feed_forward", "feed_forward", 128, 8, 2048, 2048, 0, 0, route_bytes=0)


def traffic_of(bank: Bank, name: str, *, ep: int, tokens: int, node: int = 8) -> Traffic:
    way = dispatch_direction(bank, 2)
    return exchange_traffic(way, tokens=tokens, ep=ep, ranks_per_node=node, dispatcher=name)


# Destinations -------------------------------------------------------------------------------------


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
        chosen = [draws.permutation(experts)[:top_k] + head * experts for head in range(heads)]
        by_row += len(set(np.concatenate(chosen) // block))
        by_head += sum(len(set(of_head // block)) for of_head in chosen)
    assert row_copies(bank, "row", ranks)[0] == pytest.approx(by_row / 4000, rel=0.02)
    assert row_copies(bank, "head", ranks)[0] == pytest.approx(by_head / 4000, rel=0.02)
    assert row_copies(bank, "route", ranks)[0] == heads * top_k


def test_broken_numbers_of_experts_and_limits_of_groups() -> None:
    one, half, two = (miss_probability(8, 2, top_k) for top_k in (1, 1.5, 2))
    assert half == pytest.approx((one + two) / 2)
    limited = replace(DEEPSEEK_V3, group_limit=(8, 4))
    assert row_copies(limited, "row", 8)[0] == 4
    assert row_copies(limited, "row", 2) == row_copies(DEEPSEEK_V3, "row", 2)


# Exchanges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bank", "dispatcher", "tokens", "expected_by_ep"),
    [
        (
            DEEPSEEK_V3,
            "alltoall",
            4096,
            {8: 1.15, 16: 5.2, 32: 7.9, 64: 9.2, 128: 9.9, 256: 10.4},
        ),
        (DEEPSEEK_V3, "dedup", 4096, {8: 0.77}),
        (QWEN3_30B, "alltoall", 16_384, {8: 1.32}),
        (QWEN3_30B, "dedup", 16_384, {8: 0.88}),
    ],
)
def test_estimated_costs_of_a_dispatch_on_h100s(
    bank: Bank, dispatcher: str, tokens: int, expected_by_ep: dict[int, float]
) -> None:
    """Milliseconds in bfloat16, as rounded in the estimate that the formulas come from."""
    for ep, expected in expected_by_ep.items():
        rounding = 0.006 if ep == 8 else 0.055
        traffic = traffic_of(bank, dispatcher, ep=ep, tokens=tokens)
        found = 1e3 * exchange_s(traffic, H100, dispatcher=dispatcher)
        assert found == pytest.approx(expected, abs=rounding)


def test_bytes_split_between_links() -> None:
    """K = 2, 8-byte rows, 4 ranks on 2 nodes: of 4 destinations one is local, one on the node, two
    remote.
    """
    bank = Bank("feed_forward", "feed_forward", 4, 2, 4, 4, 0, 0, route_bytes=0)
    flat, dedup, two, every = (
        traffic_of(bank, name, ep=4, tokens=100, node=2)
        for name in ("alltoall", "dedup", "hierarchical", "allgather")
    )
    assert (flat.fast_bytes, flat.slow_bytes) == (100 * 2 * 8 / 4, 100 * 2 * 8 / 2)
    assert (flat.fast_peers, flat.slow_peers) == (1, 2)
    # Two of four experts on four ranks are on two ranks; a node is missed once in C(4, 2).
    assert dedup.fast_bytes + dedup.slow_bytes == pytest.approx(100 * 8 * 2 * 3 / 4)
    assert two.slow_bytes == pytest.approx(100 * 8 * (2 * (1 - 1 / 6)) / 2)
    assert every.held_bytes == 4 * 100 * 8


# Dense collectives --------------------------------------------------------------------------------


def test_rings_of_1250_nodes_wait_12_ms_and_trees_do_not() -> None:
    group = strided_group(1250, 8, 8)
    assert collective_s("all_gather", 1, group, H100) == pytest.approx(12e-3, rel=0.01)
    assert collective_s("all_reduce", 1, group, H100) == pytest.approx(0.2e-3, rel=0.03)
