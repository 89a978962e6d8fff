"""`moebius simulate`: traffic and loads against slow loops, and the faults that it must find."""

import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
import torch
import torch.distributed as dist
from bytes_run import prepare_bytes
from dispatch_cases import Case, joined, run_layer
from parts import make_config
from torch import Tensor
from world import run_ranks

from moebius.distributed.checkpoint.format import step_name
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.expert_map import ExpertMap, contiguous_map
from moebius.model.experts import ExpertMLPs
from moebius.model.initialise import normal
from moebius.model.moe import Dispatched, Dispatcher, SparseLayer
from moebius.model.routing import Routes, token_routes
from moebius.planning.simulation import dispatch as module
from moebius.planning.simulation import threads
from moebius.planning.simulation.calls import expert_maps_of
from moebius.planning.simulation.dispatch import Cluster, SimulatedCall, experts_on_rank, simulate
from moebius.planning.simulation.threads import RankFailed, run_threads
from moebius.planning.simulation.traffic_report import across_nodes
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.record.route_tap import CallId, RoutedCall

WIDTH, TOP_K = 12, 3
TOKENS = [5, 0, 9, 1, 16, 2, 7, 3]


def bank_of(num_experts: int) -> ExpertMLPs:
    inits = (normal(0.5), normal(0.5))
    made = ExpertMLPs(
        num_experts,
        WIDTH,
        8,
        backend="segments",
        up_init=inits[0],
        down_init=inits[1],
        bias_inits=inits,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


@torch.no_grad()
def call_of(rows: list[Tensor], routes: list[Routes], bank: ExpertMLPs) -> list[RoutedCall]:
    """Returns every rank's call, with the outputs of one rank that has all experts."""
    layer, call = SparseLayer(bank), CallId(1, 1, "layer")
    return [
        RoutedCall(call, own, len(rows_UD), WIDTH, WIDTH, rows_UD, layer(rows_UD, own))
        for rows_UD, own in zip(rows, routes, strict=True)
    ]


def routed(tokens: list[int], num_experts: int, *, favourite: bool = False) -> list[RoutedCall]:
    generator, rows, routes = torch.Generator().manual_seed(0), [], []
    for count in tokens:
        scores = torch.rand(count, num_experts, generator=generator)
        scores[:, 1] += 2 * favourite
        experts = scores.argsort(-1, descending=True)[:, :TOP_K]
        gates = torch.rand(experts.shape, generator=generator)
        rows.append(torch.randn(count, WIDTH, generator=generator))
        routes.append(token_routes(experts, gates, num_experts=num_experts))
    return call_of(rows, routes, bank_of(num_experts))


def run(call: list[RoutedCall], dispatcher: str, **of: Any) -> SimulatedCall:
    cluster = Cluster(len(call), dispatcher, of.pop("ranks_per_node", len(call)), **of)
    bank = bank_of(call[0].routes.num_experts)
    [found] = simulate([call], lambda _layer: bank, cluster)
    return found


def result(moebius: Callable[..., Any], *words: object) -> dict[str, Any]:
    answer = moebius("simulate", *words, "--json")
    assert answer.code == 0, answer.text
    return json.loads(answer.out)


# Traffic and loads --------------------------------------------------------------------------------


def destinations(call: list[RoutedCall]) -> list[tuple[int, int, int, int]]:
    """Lists (source rank, row, expert, serving rank) of every route."""
    share = call[0].routes.num_experts // len(call)
    return [
        (rank, row, expert, expert // share)
        for rank, own in enumerate(call)
        for row, expert in zip(
            own.routes.source_N.tolist(), own.routes.expert_N.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup", "allgather"])
def test_the_rows_of_every_pair_are_those_of_a_slow_loop(dispatcher: str) -> None:
    call = routed(TOKENS, 16)
    found, there = run(call, dispatcher), np.zeros((8, 8), int)
    routes = destinations(call)
    sent = routes if dispatcher == "alltoall" else {(a, row, 0, b) for a, row, _, b in routes}
    for rank, _, _, server in sent:
        there[rank, server] += 1
    if dispatcher == "allgather":
        there[:] = max(TOKENS)  # the fullest rank's rows, to all ranks
    assert found.violations == []
    assert (found.rows_PP == there + there.T).all()
    for loads, place in ((found.load_E, 2), (found.load_P, 3)):
        assert loads.tolist() == np.bincount([route[place] for route in routes]).tolist()
    if dispatcher == "alltoall":
        # 48 bytes of a row each way and 4 of its gate weight; a count per expert takes 8.
        assert (found.bytes_PP == 48 * (there + there.T) + 4 * there + 8 * 2).all()


def test_two_legs_send_a_row_once_to_a_node() -> None:
    call = routed(TOKENS, 16)
    found = run(call, "hierarchical", ranks_per_node=4)
    pairs = {(rank, row, server // 4) for rank, row, _, server in destinations(call)}
    foreign = sum(rank // 4 != node for rank, _, node in pairs)
    assert found.violations == []
    assert across_nodes(found.rows_PP, 4)[1] == 2 * foreign


def test_uneven_banks_and_placed_experts_with_copies() -> None:
    """10 experts on 4 ranks; then in any slots, with an empty one and a copy of the favorite
    elsewhere. Every token chooses expert 1: 6 tokens of rank 0, 1 of rank 1, 8 of rank 3.
    """
    call = routed([6, 1, 0, 8], 10, favourite=True)
    plain = run(call, "dedup")
    expert_map = ExpertMap((3, 3, 3, 3), (3, 0, 6, 9, 1, 4, 7, 10, 2, 5), copies=((1, 8),))
    placed = run(call, "alltoall", expert_maps={"layer": expert_map})
    assert plain.violations == placed.violations == []
    assert (placed.load_E == plain.load_E).all()
    served = [
        placed.load_P[rank] - plain.load_E[others].sum()
        for rank, others in ((0, [4, 8]), (2, [2, 6]))
    ]
    assert sum(served) == plain.load_E[1] == 15  # shared by the two copies
    assert served[0] in (6, 6 + 1, 6 + 8)  # its own, and those of a rank without a copy


def test_a_layer_on_many_ranks_is_the_layer_on_one() -> None:
    """Forward and backward with uneven tokens and one expert per rank, bit for bit."""
    num_ranks = 64
    tokens = np.random.default_rng(1).permutation(np.arange(num_ranks) % 7).tolist()
    gradient = torch.linspace(-1, 1, WIDTH)
    cases = [
        Case(own.rows_UD, own.routes, gradient.expand(own.num_rows, -1))  # pyright: ignore[reportArgumentType]
        for own in routed(tokens, num_ranks)
    ]
    bank, expert_map = bank_of(num_ranks), contiguous_map(num_ranks, num_ranks)

    def run_rank(rank: int) -> dict[str, Tensor]:
        own = experts_on_rank(bank, expert_map, rank, torch.float32).requires_grad_()
        layer = SparseLayer(own)  # pyright: ignore[reportArgumentType]
        group = dist.group.WORLD
        assert group is not None
        layer.dispatcher = make_dispatcher("alltoall", group)
        return run_layer(layer, cases[rank])

    found = run_threads(run_rank, num_ranks, timeout_s=200)
    expected = run_layer(SparseLayer(bank), joined(cases))
    assert expected.keys() == {"y", "x", "gates", "w_up", "w_down", "b_up", "b_down"}
    for name, value in expected.items():
        assert torch.equal(torch.cat([each[name] for each in found]), value), name


# Faults -------------------------------------------------------------------------------------------


@dataclass
class Saboteur:
    """A faulty dispatcher: `harm` changes the routes before they are sent."""

    inner: Dispatcher
    harm: Callable[[Routes], Routes]

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        return self.inner.dispatch(x_UD, self.harm(routes) if len(routes.expert_N) else routes)


def lost(routes: Routes) -> Routes:
    return routes.kept(torch.arange(len(routes.expert_N)) > 0)


def doubled(routes: Routes) -> Routes:
    twice = torch.cat((torch.arange(len(routes.expert_N)), torch.zeros(1, dtype=torch.int64)))
    parts = {name: getattr(routes, name)[twice] for name in ("source_N", "expert_N", "target_N")}
    return replace(routes, **parts, weight_N=routes.weight_N[twice], per_source=0, per_target=0)


def misled(routes: Routes) -> Routes:
    expert_N = routes.expert_N.clone()
    expert_N[0] = (expert_N[0] + 1) % routes.num_experts
    return replace(routes, expert_N=expert_N)


def mixed_up(routes: Routes) -> Routes:
    """Swaps the sources of two routes of different tokens to different experts."""
    source_N = routes.source_N.clone()
    other = int((routes.expert_N[TOP_K:] != routes.expert_N[0]).nonzero()[0]) + TOP_K
    source_N[[0, other]] = source_N[[other, 0]]
    return replace(routes, source_N=source_N, per_source=0)


@pytest.mark.parametrize(("harm", "entries"), [(lost, 1), (doubled, 1), (misled, 2), (mixed_up, 4)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup"])
def test_routes_that_went_astray_are_found(
    dispatcher: str, harm: Any, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "make_dispatcher", lambda *a, **k: Saboteur(make_dispatcher(*a, **k), harm)
    )
    found = run(routed([3, 0, 4, 2], 8), dispatcher)
    assert found.misrouted == 3 * entries  # three ranks have routes
    assert "routes were lost, doubled, or at the wrong expert" in found.violations[0]


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf"), 1.0])
def test_outputs_are_compared_with_one_rank(wrong: float) -> None:
    """NaN and infinite biases give such outputs everywhere and are no fault."""
    bank, call = bank_of(8), routed([3, 0, 4, 2], 8)
    assert bank.b_down is not None
    bank.b_down.data[1, 0], bank.b_down.data[5, 1] = float("nan"), float("inf")
    first, *others = call_of([own.rows_UD for own in call], [own.routes for own in call], bank)  # pyright: ignore[reportArgumentType]
    assert first.outputs_TO is not None
    first.outputs_TO[0, 2] += wrong
    [found] = simulate([[first, *others]], lambda _layer: bank, Cluster(4, "dedup", 4))
    assert found.misrouted == 0
    assert ["outputs differ from one rank's" in fault for fault in found.violations] == (
        [True] if wrong else []
    )


# Ranks on threads ---------------------------------------------------------------------------------


def test_one_failure_ends_the_world_and_the_next_one_is_sound() -> None:
    hook, before = sys.excepthook, threading.active_count()

    def run_rank(rank: int) -> None:
        if rank == 3:
            raise RuntimeError("a dispatcher's fault")
        dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankFailed, match=r"rank 3 of 8: RuntimeError: a dispatcher's fault"):
        run_threads(run_rank, 8)
    with pytest.raises(
        RankFailed, match=r"no progress for 0\.5 s: simulated ranks 0-1, 3 are still"
    ):
        run_threads(lambda rank: rank == 2 or dist.all_reduce(torch.zeros(1)), 4, timeout_s=0.5)
    assert (sys.excepthook, threading.active_count()) == (hook, before)
    assert not dist.is_initialized()
    assert run_threads(lambda rank: rank, 8) == list(range(8))


def test_a_torch_without_the_private_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    threads._threaded_group.cache_clear()
    module = "torch.testing._internal.distributed.multi_threaded_pg"
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(module, raising=False)
    with pytest.raises(ValueError, match=r"torch 2.* has no .*install a torch"):
        run_threads(lambda rank: rank, 2)


# The command --------------------------------------------------------------------------------------

SMALL = ("smoke", "model.d_model=16", "model.feed_forward.d_expert=8", "model.vocab_size=300")
SMALL = (*SMALL, "prepare.vocab_size=300", "--tokens-per-rank", "8")
MODEL = small_model.MODEL.changed(
    {"d_model": 16, "attention.d_head": 8, "feed_forward.d_expert": 8}
)
ROUTERS = (
    *("moeut", "switch", "gshard", "deepseek", "sut", "x_moe", "mh_moe", "expert_choice"),
    *("mixture_of_tokens", "soft_moe"),
)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", ROUTERS)
def test_every_kind_of_router_reaches_its_experts(name: str, moebius: Any) -> None:
    tokens = "32" if name in ("expert_choice", "mixture_of_tokens") else "8"
    found = result(moebius, name, "--ep", "2", "--tokens-per-rank", tokens)
    assert found["violations"] == []
    assert found["dispatchers"][0]["bytes_inter_node"] == 0
    assert found["dispatchers"][0]["bytes_intra_node"] > 0


@pytest.mark.slow
def test_dispatchers_precisions_steps_and_seeds(
    moebius: Any, request: pytest.FixtureRequest
) -> None:
    names = ["alltoall", "dedup", "allgather", "hierarchical"]
    words = (*SMALL, "--ep", "8", "--ranks-per-node", "4", "--dispatcher", *names, "--steps", "2")
    found, again, other, half = (
        result(moebius, *words, *changes)
        for changes in ((), (), ("train.seed=1",), ("train.precision=bfloat16",))
    )
    assert found == again != other
    flat, dedup, _, two = found["dispatchers"]
    assert all(call["difference"] == 0 for call in flat["calls"])
    assert any(call["difference"] > 0 for call in dedup["calls"])
    assert two["bytes_inter_node"] < dedup["bytes_inter_node"] < flat["bytes_inter_node"]
    assert half["dispatchers"][0]["bytes_inter_node"] < 0.85 * flat["bytes_inter_node"]
    first, second = ([c["load_E"] for c in flat["calls"] if c["step"] == step] for step in (1, 2))
    assert first != second
    assert [call["load_E"] for call in dedup["calls"]] == first + second
    request.getfixturevalue("terminal")
    printed = moebius("simulate", *words).out
    assert "1 × 8 tokens at random per rank and step, 2 steps, float32" in printed
    assert "✓ each of" in printed
    assert "…" not in printed  # nothing is cut at 80 columns


def train_on_ranks(config: Config, run_dir: Path) -> str:
    return train(config, run_dir)


@pytest.mark.slow
def test_a_run_is_simulated_as_it_is(tmp_path: Path, moebius: Any) -> None:
    """Two ranks, whose experts move after every second step, with copies."""
    shards = prepare_bytes(tmp_path)
    config = make_config(
        shards,
        model=MODEL,
        data__seq_len=24,
        train={"global_batch": 4, "micro_batch": 2, "eval_rows": 4},
        mesh={"ep": 2, "dp_replicate": 1, "rebalance_every": 2, "replicas": 1},
        checkpoint={"every": 1, "keep_last": 4},
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config.save(run_dir / "config.json")
    assert run_ranks(train_on_ranks, 2, config, run_dir) == ["finished"] * 2
    placed = result(moebius, run_dir, "--tokens-per-rank", "24")
    assert placed["title"] == "run, step 4"
    assert "1 × 24 tokens of the validation text" in placed["tokens"]
    layer = "group.0.feed_forward.sparse"
    moved = (
        expert_maps_of(run_dir / "checkpoints" / step_name(4))[layer]
        .seen_from(0)
        .slots_of(torch.arange(8))
    )
    assert moved.tolist() != list(range(8))
    [call, *_] = [each for each in placed["dispatchers"][0]["calls"] if each["layer"] == layer]
    assert call["load_P"] != [sum(call["load_E"][:4]), sum(call["load_E"][4:])]
    # Groups of another size use contiguous blocks.
    assert result(moebius, run_dir, "--tokens-per-rank", "24", "--ep", "4")["violations"] == []
    change = "model.feed_forward.num_experts=4"
    assert f"remove {change}" in moebius("simulate", run_dir, change).text
    assert "has no checkpoint" in moebius("simulate", tmp_path).text


def test_a_violation_is_shown_and_ends_with_1(moebius: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TOLERANCE", {torch.float32: 0.0})
    answer = moebius("simulate", *SMALL, "--ep", "4", "--dispatcher", "dedup")
    assert answer.code == 1
    assert "✗ dedup: step 1, depth step" in answer.out
    assert "✓" not in answer.out


def disagree(*_: Any) -> None:
    received = [1, 1 + (dist.get_rank() == 0)]
    dist.all_to_all_single(torch.empty(sum(received), 3), torch.ones(2, 3), received, [1, 1])


@pytest.mark.parametrize(
    ("fail", "printed"),
    [
        (disagree, "ExchangeMismatch: rank 1 of the group sends 1 rows to rank 0, which expects 2"),
        (lambda *_: torch.empty(2**50), r"RuntimeError: .*tried to allocate 4503599627370496 .*"),
        (lambda *_: np.empty(2**50), r"MemoryError: Unable to allocate 8\.00 PiB .*"),
    ],
    ids=["mismatch", "memory of torch", "memory of numpy"],
)
def test_an_error_that_a_user_understands_is_one_line(
    fail: Any, printed: str, moebius: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_arrived", fail)
    answer = moebius("simulate", *SMALL, "--ep", "2")
    [line] = answer.err.strip().splitlines()
    assert answer.code == 1
    assert re.fullmatch(rf"error: simulated rank \d of 2: {printed}", line)


def test_a_mistake_of_ours_comes_with_its_traceback(moebius: Any, monkeypatch: Any) -> None:
    def fail_here(*_: Any) -> None:
        raise KeyError("rows do not fit")

    monkeypatch.setattr(module, "_arrived", fail_here)
    with pytest.raises(RankFailed, match=r"simulated rank \d of 2: KeyError: ") as failed:
        moebius("simulate", *SMALL, "--ep", "2")
    assert isinstance(failed.value.__cause__, KeyError)
