"""Which layouts are tried, which is best, and when expert parallelism pays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.distributed.layout import MeshConfig, check_experts, plan_layout
from moebius.planning.cost_model import predict
from moebius.planning.hardware import HARDWARE
from moebius.planning.planner import (
    Constraints,
    ep_pays,
    rank_plans,
)
from moebius.planning.prediction import LayoutCandidate, Scenario
from moebius.planning.routing_skew import RoutingSkew
from moebius.planning.workload import Bank, Member, Workload

H200 = HARDWARE["h200"]


def model(experts: int, *, d_model: int = 512, repeats: int = 4) -> Workload:
    bank = Bank(
        "feed_forward", "feed_forward", experts, 2, d_model, d_model, 8 * d_model**2, 4 * d_model
    )
    dense = 4.0 * d_model**2
    return Workload(
        (Member(dense, (bank,), copies=2, repeats=repeats),),
        2 * 8000.0 * d_model,
        2 * 2 * repeats * dense,
        34.0 * d_model * 8,
        d_model,
        8000,
        "bfloat16",
    )


def scenario(experts: int = 16, tokens: int = 4096, **changes: int) -> Scenario:
    return Scenario(model(experts, **changes), H200, tokens, RoutingSkew())


@given(nodes=st.integers(1, 160), experts=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_every_layout_is_legal(nodes: int, experts: int) -> None:
    found = rank_plans(scenario(experts), nodes)
    for entry in found.plans:
        candidate = entry.candidate
        assert candidate.world_size == 8 * nodes
        assert candidate.dp_replicate * candidate.dp_shard == candidate.world_size
        assert candidate.dp_shard % candidate.ep == 0
        counts = {bank.kind: bank.total_experts for bank, _ in entry.scenario.workload.uses}
        mesh = MeshConfig.model_validate(
            {
                "ep": candidate.ep,
                "dp_shard": candidate.dp_shard,
                "sharding": candidate.sharding,
                "dispatcher": candidate.dispatcher,
            }
        )
        layout = plan_layout(mesh, candidate.world_size)
        assert (layout.dp_replicate, layout.efsdp) == (candidate.dp_replicate, candidate.efsdp)
        check_experts(layout, counts)
        assert dict(entry.changes) == ({} if experts % candidate.ep == 0 else counts)
    ranked = [entry.prediction.tokens_per_s for entry in found.fitting]
    assert ranked == sorted(ranked, reverse=True)


def test_every_layout_is_there() -> None:
    """All pairs of ep and dp_shard, sharded or not, counted by hand for one node and 16 experts."""
    layouts = {
        (entry.candidate.ep, entry.candidate.dp_shard, entry.candidate.sharding)
        for entry in rank_plans(scenario(), 1).plans
    }
    whole = {(ep, ep, "none") for ep in (1, 2, 4, 8)}
    sharded = {(ep, shard, "fsdp") for ep in (1, 2, 4, 8) for shard in (2, 4, 8) if shard % ep == 0}
    assert layouts == whole | sharded


def test_the_way_taken_is_the_fastest_that_fits() -> None:
    base = scenario(tokens=16_384)
    for entry in rank_plans(base, 2).fitting:
        candidate = entry.candidate
        for name in ("allgather", "alltoall", "dedup", "hierarchical") if candidate.ep > 1 else ():
            other = predict(base, replace(candidate, dispatcher=name, recompute="none"))
            assert not other.fits or other.tokens_per_s <= entry.prediction.tokens_per_s * (
                1 + 1e-9
            )


def test_recomputation_comes_when_memory_ends() -> None:
    base = scenario(tokens=65_536)
    needed = predict(base, LayoutCandidate(1, 8, 1, "fsdp", "local")).memory.total
    for share, expected in ((1.01, "none"), (0.9, "selective")):
        machine = replace(H200, memory_bytes=needed * share / H200.usable_memory)
        ranked = rank_plans(
            replace(base, hardware=machine), 1, Constraints(ep=1, sharding="fsdp")
        ).plans
        (entry,) = [found for found in ranked if found.candidate.dp_shard == 8]
        assert entry.candidate.recompute == expected


def test_constraints_are_kept() -> None:
    found = rank_plans(
        scenario(), 4, Constraints(ep=4, sharding="none", dispatcher="alltoall", recompute="full")
    )
    assert [entry.candidate for entry in found.plans] == [
        LayoutCandidate(8, 4, 4, "none", "alltoall", "full")
    ]


@pytest.mark.parametrize(
    ("base", "nodes", "constraints", "message"),
    [
        (
            scenario(64),
            1,
            Constraints(ep=64),
            "ep 64 needs 64 ranks, and there are only 8; take 8 nodes",
        ),
        (
            scenario(4),
            1,
            Constraints(ep=8),
            r"no layout of 8 ranks has ep 8: .* \(feed_forward 4\)",
        ),
        (
            scenario(64),
            3,
            Constraints(ep=16),
            "no layout of 24 ranks has ep 16: it must divide the",
        ),
        (
            scenario(65_536, d_model=8192),
            1,
            Constraints(),
            r"fits on no layout of 1 node of h200: .* GB per rank, mostly",
        ),
    ],
)
def test_what_is_missing(
    base: Scenario, nodes: int, constraints: Constraints, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rank_plans(base, nodes, constraints)


def test_a_model_without_experts_has_nothing_to_spread() -> None:
    dense = Workload((Member(1e6, ()),), 1e6, 4e6, 1e3, 64, 100, "bfloat16")
    found = rank_plans(Scenario(dense, H200, 1024, RoutingSkew()), 2)
    assert {entry.candidate.ep for entry in found.plans} == {1}
    assert ep_pays(found) is None


def test_many_experts_make_expert_parallelism_pay() -> None:
    plans = [rank_plans(scenario(experts), nodes) for nodes, experts in ((1, 8), (2, 8), (4, 2048))]
    assert [ep_pays(ranked) for ranked in plans] == [False, False, True]
