"""Which layouts are tried, which is best, and when expert parallelism pays."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.distributed.layout import MeshConfig, check_experts, plan_layout
from moebius.planning.cost_model import Choice, Setting, predict
from moebius.planning.hardware import HARDWARE
from moebius.planning.planner import (
    Stretch,
    Wishes,
    ep_pays,
    experts_at_break_even,
    plan,
    stretches,
)
from moebius.planning.routing_skew import RoutingSkew
from moebius.planning.workload import Bank, Member, Workload

H200 = HARDWARE["h200"]


def model(experts: int, *, d_model: int = 512, repeats: int = 4) -> Workload:
    bank = Bank(
        "feed_forward", "feed_forward", experts, 2, d_model, d_model, 8 * d_model**2, 4 * d_model
    )
    dense = 4.0 * d_model**2
    return Workload(
        (Member(dense, (bank,), copies=2),),
        repeats,
        2 * 8000.0 * d_model,
        2 * 2 * repeats * dense,
        34.0 * d_model * 8,
        d_model,
        8000,
        "bfloat16",
    )


def setting(experts: int = 16, tokens: int = 4096, **changes: int) -> Setting:
    return Setting(model(experts, **changes), H200, tokens, RoutingSkew())


@given(nodes=st.integers(1, 160), experts=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_every_layout_is_legal(nodes: int, experts: int) -> None:
    found = plan(setting(experts), nodes)
    for entry in found.ranked:
        choice = entry.choice
        assert choice.world_size + entry.unused_ranks == 8 * nodes
        assert choice.dp_replicate * choice.dp_shard == choice.world_size
        assert choice.dp_shard % choice.ep == 0
        counts = {bank.kind: bank.total_experts for bank, _ in entry.setting.workload.uses}
        mesh = MeshConfig(
            ep=choice.ep,
            dp_shard=choice.dp_shard,
            sharding=choice.sharding,
            dispatcher=choice.dispatcher,
        )
        layout = plan_layout(mesh, choice.world_size)
        assert (layout.dp_replicate, layout.efsdp) == (choice.dp_replicate, choice.efsdp)
        check_experts(layout, counts)
        assert dict(entry.changes) == ({} if experts % choice.ep == 0 else counts)
    ranked = [entry.prediction.tokens_per_s for entry in found.fitting]
    assert ranked == sorted(ranked, reverse=True)


def test_every_layout_is_there() -> None:
    """All pairs of ep and dp_shard, each sharded or not, counted by hand for one node and 16
    experts.
    """
    layouts = {
        (entry.choice.ep, entry.choice.dp_shard, entry.choice.sharding)
        for entry in plan(setting(), 1).ranked
    }
    whole = {(ep, ep, "none") for ep in (1, 2, 4, 8)}
    sharded = {(ep, shard, "fsdp") for ep in (1, 2, 4, 8) for shard in (2, 4, 8) if shard % ep == 0}
    assert layouts == whole | sharded


def test_the_way_taken_is_the_fastest_that_fits() -> None:
    base = setting(tokens=16_384)
    for entry in plan(base, 2).fitting:
        choice = entry.choice
        for name in ("allgather", "alltoall", "dedup", "hierarchical") if choice.ep > 1 else ():
            other = predict(base, replace(choice, dispatcher=name, recompute="none"))
            assert not other.fits or other.tokens_per_s <= entry.prediction.tokens_per_s * (
                1 + 1e-9
            )


def test_recomputation_comes_when_memory_ends() -> None:
    base = setting(tokens=65_536)
    needed = predict(base, Choice(1, 8, 1, "fsdp", "local")).memory.total
    for share, expected in ((1.01, "none"), (0.9, "selective")):
        machine = replace(H200, memory_bytes=needed * share / H200.usable_memory)
        ranked = plan(replace(base, hardware=machine), 1, Wishes(ep=1, sharding="fsdp")).ranked
        (entry,) = [found for found in ranked if found.choice.dp_shard == 8]
        assert entry.choice.recompute == expected


def test_wishes_are_kept() -> None:
    found = plan(
        setting(), 4, Wishes(ep=4, sharding="none", dispatcher="alltoall", recompute="full")
    )
    assert [entry.choice for entry in found.ranked] == [Choice(8, 4, 4, "none", "alltoall", "full")]


def test_ranks_that_do_not_divide_stay_unused() -> None:
    """10,000 ranks are no multiple of 64: 156 groups, 16 ranks unused."""
    found = plan(setting(64), 1250, Wishes(ep=64))
    assert {(entry.choice.world_size, entry.unused_ranks) for entry in found.ranked} == {(9984, 16)}


def test_a_prime_number_of_nodes_may_leave_some_out() -> None:
    found = plan(setting(64), 1249)
    assert any(entry.unused_ranks == 8 and entry.choice.ep == 64 for entry in found.ranked)
    assert all(entry.choice.ep <= 8 or entry.unused_ranks for entry in found.ranked)


@pytest.mark.parametrize(
    ("base", "nodes", "wishes", "message"),
    [
        (
            setting(64),
            1,
            Wishes(ep=64),
            "ep 64 needs 64 ranks, and there are 8, all of which would be unused; take 8 nodes",
        ),
        (setting(4), 1, Wishes(ep=8), r"no layout of 8 ranks has ep 8: .* \(feed_forward 4\)"),
        (
            setting(65_536, d_model=8192),
            1,
            Wishes(),
            r"fits on no layout of 1 node of h200: .* GB too many; most of it",
        ),
    ],
)
def test_what_is_missing(base: Setting, nodes: int, wishes: Wishes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(base, nodes, wishes)


def test_many_experts_make_expert_parallelism_pay() -> None:
    few, many = plan(setting(8), 4), plan(setting(2048, d_model=1024), 4)
    assert ep_pays(few) is False
    assert ep_pays(many) is True
    factor = experts_at_break_even(setting(8), 4)
    assert factor is not None
    assert ep_pays(plan(setting(8 * factor), 4)) is True
    assert ep_pays(plan(setting(4 * factor), 4)) is False


def test_a_model_without_experts_has_nothing_to_spread() -> None:
    dense = Workload((Member(1e6, ()),), 1, 1e6, 4e6, 1e3, 64, 100, "bfloat16")
    found = plan(Setting(dense, H200, 1024, RoutingSkew()), 2)
    assert {entry.choice.ep for entry in found.ranked} == {1}
    assert ep_pays(found) is None


def test_stretches_join_sizes_that_agree() -> None:
    plans = [plan(setting(experts), nodes) for nodes, experts in ((1, 8), (2, 8), (4, 2048))]
    assert stretches(plans, 8) == [Stretch(8, 16, False), Stretch(32, 32, True)]
    for before, after in pairwise(stretches(plans, 8)):
        assert before.ep_pays != after.ep_pays
