"""The cost of a step, against the project's own measurements, published runs, hand arithmetic, and
monotonicity in the hardware.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_cases import EXPERTS, case, dispatcher_of, own_layer, run_layer, world
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import make_config
from small_model import MODEL
from trained import assembled
from world import run_ranks

from benchmarks.muon import bytes_sent
from benchmarks.report import RESULTS
from moebius.distributed.dispatch.table import LOCAL, by_collectives
from moebius.model.moe import LocalDispatcher
from moebius.planning.cost_model import dense_s, elementwise_s, expert_s, host_s, predict
from moebius.planning.hardware import HARDWARE, Hardware
from moebius.planning.prediction import LayoutCandidate, Scenario
from moebius.planning.routing_skew import RoutingSkew
from moebius.planning.step_collectives import dispatch_launches, muon_exchanges
from moebius.planning.step_memory import predict_memory
from moebius.planning.workload import (
    Bank,
    Member,
    MuonWork,
    Workload,
    _Launches,
    describe,
    with_muon,
)
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES

H100, H200, B200 = HARDWARE["h100"], HARDWARE["h200"], HARDWARE["b200"]
BANK = Bank("feed_forward", "feed_forward", 8, 2, 16, 16, 500, 10, route_bytes=0)


@pytest.fixture(scope="module")
def moeut() -> Workload:
    return describe(RECIPES["moeut_244m"]().model, seq_len=1024)


# Files of benchmarks/results, all of one H200: a new measurement may turn these red -----------------

WITHIN = 0.3
ALONE = LayoutCandidate(1, 1, 1, "none", LOCAL)


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", ["244m", "44m"])
@pytest.mark.parametrize("side", ["moeut", "dense"])
def test_measured_steps(size: str, side: str) -> None:
    """In time, and in whether the GPU or the host binds: these were eager."""
    [case] = [case for case in results("step_gpu")["cases"] if case["size"] == size]
    work = describe(RECIPES[f"{side}_{size}"]().model, seq_len=case["seq_len"])
    scenario = Scenario(work, H200, case["batch"] * case["seq_len"], RoutingSkew())
    eager, captured = (
        predict(replace(scenario, captures=captures), ALONE).time for captures in (False, True)
    )
    assert eager.total == pytest.approx(case["seconds"][side], rel=WITHIN)
    assert captured.total == pytest.approx(eager.device)
    assert captured.total < eager.total


LAYERS = ("244M", "44M", "244M attention")


def measured_layer(name: str, contender: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a setting, and what was measured of a contender."""
    found = results("expert_layer_gpu")
    [setting] = [each for each in found["settings"] if each["name"] == name]
    [entry] = [
        each
        for each in found["entries"]
        if (each["setting"], each["dtype"], each["name"]) == (name, "bfloat16", contender)
    ]
    return setting, entry


@pytest.mark.parametrize("name", LAYERS)
def test_measured_routed_layers(name: str) -> None:
    setting, entry = measured_layer(name, "ours: triton")
    width, hidden, heads = setting["d_model"], setting["d_expert"], setting["heads"]
    bank = Bank("", "", setting["num_experts"] // heads, setting["top_k"], width, width, 0, hidden)
    banks = [replace(bank, weights_per_expert=2 * width * hidden)]
    if heads > 1:
        bank = replace(bank, weights_per_expert=width * hidden, heads=heads)
        banks = [replace(bank, d_out=hidden), replace(bank, d_in=hidden, kept_columns=0)]
    work = replace(TINY, precision="bfloat16")
    scenario = Scenario(work, H200, setting["tokens"], RoutingSkew())
    planned = 3e3 * sum(expert_s(scenario, bank, 1) for bank in banks)
    assert planned == pytest.approx(entry["cells"][0]["fastest_ms"], rel=WITHIN)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("contender", ["dense, equal MACs", "dense baseline"])
def test_measured_dense_layers(name: str, contender: str) -> None:
    """The baselines of 4,110 and 2,053 columns too, whose rows are no multiple of 16 bytes."""
    setting, entry = measured_layer(name, contender)
    width, tokens = setting["d_model"], setting["tokens"]
    equal = setting["heads"] * setting["top_k"] * setting["d_expert"]
    columns = setting["d_dense"] if contender == "dense baseline" else equal
    kept = entry["saved_bytes"] / tokens
    with torch.device("meta"), _Launches() as seen:
        rows, up = (torch.empty(s, dtype=torch.bfloat16) for s in ((1, width), (width, columns)))
        assert ((rows @ up) @ up.mT.contiguous()).shape == rows.shape
    odd_flops = tuple(seen.flops[1:])
    work = replace(TINY, dense_flops=sum(seen.flops), odd_flops=odd_flops, saved_bytes=kept)
    scenario = Scenario(work, H200, tokens, RoutingSkew())
    planned = 3e3 * (dense_s(scenario) + elementwise_s(scenario))
    assert planned == pytest.approx(entry["cells"][0]["fastest_ms"], rel=WITHIN)


def test_measured_ceilings() -> None:
    found = results("gpu_ceilings")["ceilings"]
    assert H200.memory_bandwidth == pytest.approx(1e12 * found["copy_tb_per_s"], rel=WITHIN)
    reached = H200.matmul_efficiency * H200.peak_bf16
    assert reached == pytest.approx(1e12 * found["product_tflop_per_s"], rel=WITHIN)


# Published runs in bfloat16 with forced balance: the table of docs/cluster.md ---------------------


def published(
    layers: int, d_model: int, d_expert: int, attention: float, scores: float, **of: float
) -> Workload:
    """A sequence model with 8 gated experts per token, no repeats, and 34·D kept bytes per layer
    (arXiv 2205.05198).
    """
    experts, vocab = (128, 151_936) if d_model == 2048 else (256, 129_280)
    weights = 3 * d_model * d_expert
    bank = replace(
        BANK, num_experts=experts, top_k=8, d_in=d_model, d_out=d_model, kept_columns=2 * d_expert
    )
    bank = replace(bank, weights_per_expert=weights)
    root = 2 * vocab * d_model / of.get("stages", 1)
    dense = attention + of.get("shared", 0)
    flops = 2 * (layers * dense + root / 2) + layers * scores
    members = (Member(dense, (bank,), copies=layers),)
    return Workload(members, root, flops, 34 * d_model * layers, d_model, vocab, "bfloat16")


QWEN3_30B = published(
    48, 2048, 768, attention=2 * 2048 * 4096 + 2 * 2048 * 512, scores=2 * 4096 * 4096
)
# A quarter of the model: 58 expert layers over 4 stages are 14.5.
DEEPSEEK_V3_STAGE = published(
    15, 7168, 2048, attention=187e6, scores=2 * 4096 * 20_480, shared=3 * 7168 * 2048, stages=4
)
# Model, GPUs, tokens per rank, layout with recomputation, tokens/s per GPU: measured and planned.
PUBLISHED = [
    (QWEN3_30B, H100, 16_384, (1, 8, 8, "fsdp", "dedup", "full"), 12_040, 14_198),
    (DEEPSEEK_V3_STAGE, H100, 4096, (1, 64, 64, "fsdp", "hierarchical", "selective"), 1002, 1002),
    (DEEPSEEK_V3_STAGE, H100, 4096, (1, 64, 64, "fsdp", "dedup", "selective"), 1002, 924),
    (QWEN3_30B, B200, 16_384, (1, 8, 8, "fsdp", "dedup", "selective"), 14_796, 14_976),
    (QWEN3_30B, B200, 16_384, (16, 8, 8, "fsdp", "dedup", "selective"), 13_856, 13_902),
    (DEEPSEEK_V3_STAGE, B200, 4096, (1, 64, 64, "fsdp", "dedup", "selective"), 859, 835),
    (DEEPSEEK_V3_STAGE, B200, 4096, (1, 64, 64, "fsdp", "hierarchical", "selective"), 859, 934),
]


@pytest.mark.parametrize(("work", "machine", "tokens", "layout", "measured", "planned"), PUBLISHED)
def test_published_runs(
    work: Workload, machine: Hardware, tokens: int, layout: tuple, measured: int, planned: int
) -> None:
    candidate = LayoutCandidate(*layout)
    stages, weights = (4, 671e9) if work is DEEPSEEK_V3_STAGE else (1, 30.5e9)
    counted = stages * (work.dense_parameters + work.expert_parameters())
    assert counted == pytest.approx(weights, rel=0.05)
    found = predict(Scenario(work, machine, tokens, RoutingSkew()), candidate)
    rate = found.tokens_per_s / candidate.world_size / stages
    assert rate == pytest.approx(planned, abs=0.5)
    assert rate == pytest.approx(measured, rel=0.20)


# Arithmetic by hand -------------------------------------------------------------------------------

TINY = Workload(
    (Member(1000.0, (BANK,), copies=2, repeats=3),),
    root_parameters=2000.0,
    dense_flops=6e4,
    saved_bytes=1e3,
    d_model=16,
    vocab_size=100,
    precision="bfloat16",
)
TEN = Scenario(TINY, H100, 10, RoutingSkew())


def test_memory_of_whole_weights() -> None:
    """A weight takes 20 bytes before sharding: a bfloat16 copy and its gradient, master, gradient,
    bucket, and two moments.
    """
    memory = predict_memory(TEN, LayoutCandidate(2, 4, 4, "none", "alltoall"))
    held = 2000 + 2 * 1000 + 2 * 8 * 500 / 4
    assert (memory.weights, memory.master, memory.moments) == (2 * held, 4 * held, 8 * held)
    assert memory.gradients == (4 + 2 + 4) * held
    assert (memory.activations, memory.logits) == (10 * 1e3, 10 * 100 * 10)
    rows = 2 * 16 * 2  # both routes' rows; then hidden rows and indices of 6 uses, and 3 buffers
    assert memory.routed == 10 * (6 * (rows + 2 * (10 * 2 + 36)) + 3 * rows)


@pytest.mark.parametrize(("copies", "repeats", "gathers"), [(2, 3, 1), (2, 30, 1), (4, 1, 2)])
def test_sharded_weights(copies: int, repeats: int, gathers: int) -> None:
    """16 bytes a weight over the shards, plus what is gathered: a layer that repeats once, all of
    the group at a time; others for each pass, the root and two of them at a time.
    """
    (member,) = TINY.members
    work = replace(TINY, members=(replace(member, copies=copies, repeats=repeats),))
    found = predict(replace(TEN, workload=work), LayoutCandidate(1, 4, 2, "fsdp", "alltoall"))
    held = (2000 + copies * (1000 + 8 * 500)) / 4
    assert (found.memory.master, found.memory.moments) == (4 * held, 8 * held)
    assert found.memory.weights == 2 * (2000 + 2 * (1000 + 8 * 500 / 2))
    assert found.memory.gradients == found.memory.weights + 4 * held
    calls = {call.name: call for call in found.collectives}
    assert calls["gather layer, experts"].calls == gathers * copies
    assert calls["gather layer, experts"].bytes_per_call == 2 * 8 * 500 / 2 / 2  # efsdp = 2
    assert calls["feed_forward dispatch"].calls == 2 * copies * repeats


def test_muon_has_one_moment_and_sends_updates() -> None:
    """Of 4000 dense weights, 3000 in 6 matrices. Experts that lie whole on a rank send nothing."""
    muon = MuonWork(6, 3000.0, 6e12, 8e12)
    scenario = replace(TEN, workload=replace(TINY, muon=muon))

    def planned(
        copies: int, shards: int, ep: int, sharding: str
    ) -> tuple[float, dict[str, float], float]:
        layout = LayoutCandidate(copies, shards, ep, sharding, "alltoall")
        found, without = (
            predict(replace(scenario, workload=work), layout) for work in (scenario.workload, TINY)
        )
        sent = {call.name: call.num_bytes for call in found.collectives if "Muon" in call.name}
        return found.memory.moments, sent, found.time.optimizer - without.time.optimizer

    peak, experts = 0.75 * H100.peak_bf16, 2 * 8 * 500
    moments, sent, seconds = planned(2, 4, 4, "none")
    assert moments == 8 * 1000 + 4 * (3000 + experts / 4)
    dense, banks = (f"Muon's {kind} updates" for kind in ("dense", "expert"))
    assert sent == {dense: 4 * 3000 * 7 / 8, banks: 4 * experts / 4 / 2}
    saved = 8 * (3000 + experts / 4) / H100.memory_bandwidth
    assert seconds == pytest.approx((6e12 / 6 + 8e12 / 8) / peak - saved)  # 6 matrices on 8 ranks
    moments, sent, seconds = planned(1, 4, 2, "fsdp")
    assert moments == (8 * 1000 + 4 * (3000 + experts)) / 4
    assert sent == {dense: 2 * 4 * 3000 / 4 * 3 / 4}
    assert planned(1, 16, 1, "fsdp")[1][banks] == 2 * 4 * experts / 16 * 15 / 16  # 8 experts


def sent_by_muon(config: Config, run_dir: Path) -> float:
    with assembled(config, run_dir) as run:
        return bytes_sent(run)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("layout", "experts"),
    [((4, 1, 1), 8), ((2, 2, 2), 8), ((1, 4, 2), 8), ((2, 2, 1), 8), ((1, 4, 1), 3)],
    ids=str,
)
def test_muon_sends_what_the_planner_says(
    layout: tuple[int, int, int], experts: int, tmp_path: Path
) -> None:
    """On real ranks. FSDP over four ranks cuts the matrices of three experts."""
    sharding = "fsdp" if layout[1] > layout[2] else "none"
    names = ("dp_replicate", "dp_shard", "ep")
    config = make_config(
        model=MODEL.changed({"feed_forward.num_experts": experts}),
        mesh={"sharding": sharding, **dict(zip(names, layout, strict=True))},
        optim={"kind": "muon"},
    )
    work = describe(config.model, seq_len=16)
    work = with_muon(work, config.model, steps=5, routers=False)
    calls = muon_exchanges(replace(TEN, workload=work), LayoutCandidate(*layout, sharding, "dedup"))
    sent = run_ranks(sent_by_muon, 4, config, tmp_path)[0]
    assert sent == pytest.approx(sum(call.num_bytes for call in calls))


# A MoEUT ------------------------------------------------------------------------------------------


def test_a_step_takes_no_less_than_its_launches(moeut: Workload) -> None:
    """With few tokens the device waits for the host, which launches every operation of every pass,
    and in every sparse layer what its dispatcher launches.
    """
    few, many = (Scenario(moeut, H200, tokens, RoutingSkew()) for tokens in (256, 2**20))
    uses = 3 * 18  # feed-forward, V and O of 18 depth steps
    for recompute, passes, exchanges in (("none", 3, 3), ("selective", 4, 3), ("full", 4, 4)):
        layout = LayoutCandidate(1, 8, 8, "fsdp", "dedup", recompute)
        launches = passes * moeut.launches + exchanges * uses * dispatch_launches("dedup")
        assert host_s(few, layout) == pytest.approx(H200.launch_s * launches)
        time = predict(few, layout).time
        assert time.total - time.straggler == pytest.approx(host_s(few, layout))
        assert predict(many, layout).time.host == 0


def launched_by_each() -> dict[str, int]:
    """Counts the operations of a sparse layer's forward pass, by dispatcher."""
    found = {}
    with world() as (process, group, nodes):
        chosen = torch.rand(16, EXPERTS).argsort(-1)[:, :2]
        layer = own_layer(process, LocalDispatcher())
        for name in (LOCAL, *by_collectives()):
            here = chosen % (EXPERTS // process.world_size) if name == LOCAL else chosen
            given = case("tokens", here, process.rank)
            if name != LOCAL:
                layer.dispatcher = dispatcher_of(name, group, nodes)
                run_layer(layer, given)
            with _Launches() as launches:
                layer(given.x, given.routes)
            found[name] = launches.count
    return found


def test_the_planner_knows_what_dispatchers_launch() -> None:
    """Within a factor of two on four real ranks; update the planner when a dispatcher changes."""
    counted = run_ranks(launched_by_each, 4)[0]
    for name in by_collectives():
        more = counted[name] - counted[LOCAL]
        assert more / 2 < dispatch_launches(name) < more * 2, (name, more)


# Monotonicity -------------------------------------------------------------------------------------

choices = st.tuples(
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.sampled_from(["none", "fsdp"]),
    st.sampled_from(["allgather", "alltoall", "dedup", "hierarchical"]),
    st.sampled_from(["none", "selective", "full"]),
).map(lambda drawn: LayoutCandidate(drawn[0], drawn[1] * drawn[2], *drawn[2:]))
UNPRICED = ("name", "sources", "ranks_per_node", "memory_bytes", "usable_memory", "peak_fp32")
FIGURES = [each.name for each in fields(Hardware) if each.name not in UNPRICED]
LARGER_IS_FASTER = ("bandwidth", "efficiency", "peak_bf16", "overlap")


@given(
    candidate=choices,
    figure=st.sampled_from(FIGURES),
    factor=st.floats(1, 50),
    tokens=st.integers(64, 65_536),
    more=st.integers(1, 65_536),
)
@settings(max_examples=120, deadline=None)
def test_better_machines_and_fewer_tokens_take_no_longer(
    moeut: Workload, candidate: LayoutCandidate, figure: str, factor: float, tokens: int, more: int
) -> None:
    limit = 1.0 if figure.endswith(("overlap", "efficiency")) else float("inf")
    changed = replace(H200, **{figure: min(limit, getattr(H200, figure) * factor)})
    better, worse = (changed, H200) if figure.endswith(LARGER_IS_FASTER) else (H200, changed)
    base, slow, large = (
        predict(Scenario(moeut, machine, count, RoutingSkew()), candidate)
        for machine, count in ((better, tokens), (worse, tokens), (better, tokens + more))
    )
    assert base.time.total <= min(slow.time.total, large.time.total) * (1 + 1e-9)
    assert base.memory.total < large.memory.total
    assert all(
        value >= -1e-12 for part in (base.time, base.memory) for value in vars(part).values()
    )
    assert (candidate.ep == 1) == (base.time.exchange == 0)
