"""The simulated cluster against slow loops: traffic, loads, and detection of faulty dispatchers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dispatch_cases import Case, joined, run_layer
from torch import Tensor

from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.expert_map import ExpertMap, contiguous_map
from moebius.distributed.layout import Layout
from moebius.model.experts import ExpertMLPs
from moebius.model.initialise import Initializer, normal
from moebius.model.moe import Dispatched, Dispatcher, SparseLayer
from moebius.model.routing import Routes, slot_routes, token_routes
from moebius.planning.simulation import dispatch as module
from moebius.planning.simulation.dispatch import (
    Cluster,
    Simulation,
    across_nodes,
    between,
    experts_on_rank,
    hottest,
    simulate,
)
from moebius.planning.simulation.threads import RankFailed, run_threads
from moebius.train.record.route_tap import CallId, RoutedCall

WIDTH, HIDDEN, TOP_K = 12, 8, 3


def bank_of(num_experts: int, seed: int = 5) -> ExpertMLPs:
    init: Initializer = normal(0.5)
    made = ExpertMLPs(
        num_experts,
        WIDTH,
        HIDDEN,
        backend="segments",
        up_init=init,
        down_init=init,
        bias_inits=(init, init),
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


def routed(
    tokens: list[int], num_experts: int, *, seed: int = 0, favourite: bool = False
) -> list[RoutedCall]:
    """Returns one call with a rank for every number of tokens; expected outputs come from one rank."""
    generator = torch.Generator().manual_seed(seed)
    rows, routes, bank = [], [], SparseLayer(bank_of(num_experts))
    for count in tokens:
        scores = torch.rand(count, num_experts, generator=generator)
        if favourite:
            scores[:, 1] = 2
        experts = scores.argsort(-1, descending=True)[:, :TOP_K]
        rows.append(torch.randn(count, WIDTH, generator=generator))
        routes.append(
            token_routes(
                experts, torch.rand(experts.shape, generator=generator), num_experts=num_experts
            )
        )
    return call_of(rows, routes, bank)


def call_of(rows: list[Tensor], routes: list[Routes], layer: SparseLayer) -> list[RoutedCall]:
    """Returns every rank's call, with the outputs of one rank that has all experts."""
    found = []
    for rows_UD, own in zip(rows, routes, strict=True):
        with torch.no_grad():
            outputs_TO = layer(rows_UD, own)
        call_id = CallId(1, 1, "layer")
        found.append(RoutedCall(call_id, own, len(rows_UD), WIDTH, WIDTH, rows_UD, outputs_TO))
    return found


def rows_of(call: RoutedCall) -> Tensor:
    assert call.rows_UD is not None
    return call.rows_UD


def outputs_of(call: RoutedCall) -> Tensor:
    assert call.outputs_TO is not None
    return call.outputs_TO


def num_experts(call: list[RoutedCall]) -> int:
    return call[0].routes.num_experts


def run(call: list[RoutedCall], cluster: Cluster, seed: int = 5) -> Simulation:
    return simulate(iter([call]), lambda _layer: bank_of(num_experts(call), seed), cluster)


TOKENS = [5, 0, 9, 1, 16, 2, 7, 3]
LAYOUTS = [
    Layout(dp_replicate=1, ep=8),
    Layout(dp_replicate=2, ep=4),
    Layout(dp_replicate=1, ep=4, dp_shard=8),
]


def destinations(call: list[RoutedCall], layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """Yields (source rank, row, target row, serving rank) of every route."""
    share = num_experts(call) // layout.ep
    for rank, own in enumerate(call):
        first, routes = rank // layout.ep * layout.ep, own.routes
        for source, expert, target in zip(
            *map(Tensor.tolist, (routes.source_N, routes.expert_N, routes.target_N)), strict=True
        ):
            yield rank, source, target, first + expert // share


def expected_rows(call: list[RoutedCall], layout: Layout, dispatcher: str) -> np.ndarray:
    """Returns rows [from, to], both ways."""
    there, back = np.zeros((8, 8), int), np.zeros((8, 8), int)
    routes = list(destinations(call, layout))
    if dispatcher == "alltoall":
        for rank, _, _, server in routes:
            there[rank, server] += 1
            back[server, rank] += 1
    elif dispatcher == "dedup":
        for rank, _, server in {(rank, source, server) for rank, source, _, server in routes}:
            there[rank, server] += 1
        for rank, _, server in {(rank, target, server) for rank, _, target, server in routes}:
            back[server, rank] += 1
    else:  # allgather: the fullest rank's rows, to all ranks of the group
        for rank in range(8):
            group = range(rank // layout.ep * layout.ep, rank // layout.ep * layout.ep + layout.ep)
            there[rank, group] = back[rank, group] = max(TOKENS[other] for other in group)
    return there + back


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup", "allgather"])
def test_the_rows_of_every_pair_are_those_of_a_slow_loop(dispatcher: str, layout: Layout) -> None:
    call = routed(TOKENS, 16)
    found = run(call, Cluster(layout, dispatcher, ranks_per_node=4))
    [record] = found.calls
    assert found.violations == []
    assert (found.rows_PP == expected_rows(call, layout, dispatcher)).all()
    assert (found.one_per_route_PP == expected_rows(call, layout, "alltoall")).all()
    assert record.rows == between(found.rows_PP)
    assert record.rows_one_per_route == between(found.one_per_route_PP)
    share = 16 // layout.ep
    loads = np.zeros(16, int)
    served = np.zeros(8, int)
    for rank, own in enumerate(call):
        for expert in own.routes.expert_N.tolist():
            loads[expert] += 1
            served[rank // layout.ep * layout.ep + expert // share] += 1
    assert (record.load_E == loads).all()
    assert (record.load_P == served).all()
    assert record.hottest_rank == served.max() / served.mean()


def test_bytes_are_all_that_ranks_hand_over() -> None:
    """A route sends 48 bytes of a row each way and 4 of its gate weight; a count per expert takes
    8.
    """
    call, layout = routed(TOKENS, 16), LAYOUTS[0]
    found = run(call, Cluster(layout, "alltoall", ranks_per_node=4))
    there = np.zeros((8, 8), int)
    for rank, _, _, server in destinations(call, layout):
        there[rank, server] += 1
    assert (found.bytes_PP == 48 * (there + there.T) + 4 * there + 8 * 2).all()
    intra, inter = across_nodes(found.bytes_PP, 4)
    assert intra == sum(
        found.bytes_PP[a, b] for a in range(8) for b in range(8) if a // 4 == b // 4 and a != b
    )
    assert inter == sum(
        found.bytes_PP[a, b] for a in range(8) for b in range(8) if a // 4 != b // 4
    )
    assert (found.calls[0].bytes_intra_node, found.calls[0].bytes_inter_node) == (intra, inter)


def test_two_legs_send_a_row_once_to_a_node() -> None:
    """Between nodes, each (row, foreign node) pair sends one row each way."""
    call, layout = routed(TOKENS, 16), LAYOUTS[0]
    found = run(call, Cluster(layout, "hierarchical", ranks_per_node=4))
    assert found.violations == []
    pairs = {
        (rank, row, server // 4)
        for rank, row, _, server in destinations(call, layout)
        if server // 4 != rank // 4
    }
    assert across_nodes(found.rows_PP, 4)[1] == 2 * len(pairs)
    assert across_nodes(found.rows_PP, 4)[1] < across_nodes(found.one_per_route_PP, 4)[1]


def test_uneven_banks_placed_experts_and_copies() -> None:
    """10 experts on 4 ranks; then in any slots, with an empty one and a copy of the favorite
    elsewhere.
    """
    call = routed([6, 1, 0, 8], 10, favourite=True)
    layout = Layout(dp_replicate=1, ep=4)
    plain = run(call, Cluster(layout, "dedup"))
    assert plain.violations == []
    assert contiguous_map(10, 4).slots_P == (3, 3, 2, 2)
    expert_map = ExpertMap((3, 3, 3, 3), (3, 0, 6, 9, 1, 4, 7, 10, 2, 5), copies=((1, 8),))
    placed = run(call, Cluster(layout, "alltoall", expert_maps={"layer": expert_map}))
    assert placed.violations == []
    assert (placed.calls[0].load_E == plain.calls[0].load_E).all()
    # Every token chooses expert 1: 6 tokens of rank 0, 1 of rank 1, 8 of rank 3.
    assert plain.calls[0].load_E[1] == 15
    served_P = placed.calls[0].load_P
    assert served_P.sum() == 3 * 15
    cold = {
        rank: sum(plain.calls[0].load_E[expert] for expert in own)
        for rank, own in {0: (4, 8), 2: (2, 6)}.items()
    }
    assert served_P[0] - cold[0] + served_P[2] - cold[2] == 15  # shared by the two copies
    # Rank 0 serves its own 6, and those of a rank without a copy.
    assert served_P[0] - cold[0] in (6, 6 + 1, 6 + 8)


def test_routes_with_known_counts() -> None:
    bank = SparseLayer(bank_of(8))
    routes = [slot_routes(16, num_experts=8, device=torch.device("cpu")) for _ in range(4)]
    rows = [
        torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
    ]
    found = run(call_of(rows, routes, bank), Cluster(Layout(dp_replicate=1, ep=4), "dedup"))
    assert found.violations == []
    assert (found.rows_PP == 2 * 4).all()


def test_a_rank_of_its_own() -> None:
    found = run(routed([4, 3], 4), Cluster(Layout(dp_replicate=2, ep=1), "auto"))
    assert found.dispatcher == "local"
    assert found.violations == []
    assert between(found.bytes_PP) == 0
    assert hottest(np.zeros(3)) == 1.0


# Faults are seen ----------------------------------------------------------------------------------


@dataclass
class Saboteur:
    """A faulty dispatcher: `harm` changes the routes before they are sent."""

    inner: Dispatcher
    harm: Any

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        return self.inner.dispatch(x_UD, self.harm(routes))


def lost(routes: Routes) -> Routes:
    return routes.kept(torch.arange(len(routes.expert_N)) > 0)


def doubled(routes: Routes) -> Routes:
    first = torch.cat(
        (
            torch.arange(len(routes.expert_N)),
            torch.zeros(min(1, len(routes.expert_N)), dtype=torch.int64),
        )
    )
    return replace(
        routes,
        source_N=routes.source_N[first],
        expert_N=routes.expert_N[first],
        weight_N=routes.weight_N[first],
        target_N=routes.target_N[first],
        per_source=0,
        per_target=0,
    )


def misled(routes: Routes) -> Routes:
    expert = routes.expert_N.clone()
    expert[:1] = (expert[:1] + 1) % routes.num_experts
    return replace(routes, expert_N=expert)


def mixed_up(routes: Routes) -> Routes:
    """Swaps the sources of two routes of different tokens."""
    source = routes.source_N.clone()
    if len(source) > TOP_K:
        source[0], source[TOP_K] = source[TOP_K].clone(), source[0].clone()
    return replace(routes, source_N=source, per_source=0)


@pytest.mark.parametrize(("harm", "entries"), [(lost, 1), (doubled, 1), (misled, 2)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup"])
def test_conservation_finds_routes_that_went_astray(
    dispatcher, harm, entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "make_dispatcher", lambda *a, **k: Saboteur(make_dispatcher(*a, **k), harm)
    )
    found = run(routed([3, 0, 4, 2], 8), Cluster(Layout(dp_replicate=1, ep=4), dispatcher))
    assert found.calls[0].misrouted == 3 * entries  # three ranks have routes
    assert any(
        f"{3 * entries} routes were lost, doubled, or at the wrong expert" in fault
        for fault in found.violations
    )


def test_conservation_finds_rows_that_were_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "make_dispatcher", lambda *a, **k: Saboteur(make_dispatcher(*a, **k), mixed_up)
    )
    call = routed([3, 0, 4, 2], 8)
    found = run(call, Cluster(Layout(dp_replicate=1, ep=4), "dedup"))
    swapped = [own.routes.expert_N for own in call if len(own.routes.expert_N) > TOP_K]
    assert (
        found.calls[0].misrouted
        == 4 * sum(bool(experts[0] != experts[TOP_K]) for experts in swapped)
        > 0
    )


def test_answers_are_compared_with_one_rank() -> None:
    """With other weights, routes arrive but outputs differ."""
    found = run(routed([3, 0, 4, 2], 8), Cluster(Layout(dp_replicate=1, ep=4), "dedup"), seed=6)
    [fault] = found.violations
    assert "outputs differ from one rank's by" in fault
    assert found.calls[0].misrouted == 0


def test_answers_that_are_no_numbers_on_one_rank_either_are_no_fault() -> None:
    """NaN or infinite biases give such outputs everywhere; the other outputs must still agree."""
    bank, call = bank_of(8), routed([3, 0, 4, 2], 8)
    with torch.no_grad():
        assert bank.b_down is not None
        bank.b_down[1, 0], bank.b_down[5, 1] = float("nan"), float("inf")
    call = call_of([rows_of(own) for own in call], [own.routes for own in call], SparseLayer(bank))
    outputs = torch.cat([outputs_of(own) for own in call])
    assert outputs.isnan().any()
    assert outputs.isinf().any()
    for dispatcher in ("alltoall", "dedup"):
        cluster = Cluster(Layout(dp_replicate=1, ep=4), dispatcher)
        for wrong, violations in ((0.0, 0), (float("nan"), 1), (float("inf"), 1), (1.0, 1)):
            expected = outputs_of(call[0]).clone()
            expected[0, 2] += wrong
            changed = [replace(call[0], outputs_TO=expected), *call[1:]]
            found = simulate(iter([changed]), lambda _layer: bank, cluster)
            assert len(found.violations) == violations, (dispatcher, wrong, found.violations)


def test_what_does_not_fit_is_said_once() -> None:
    call = routed([1, 1, 1, 1], 8)
    with pytest.raises(ValueError, match="the experts are on several ranks"):
        run(call, Cluster(Layout(dp_replicate=1, ep=4), "local"))
    with pytest.raises(ValueError, match="equally many ranks of an EP group on each node"):
        run(call, Cluster(Layout(dp_replicate=1, ep=4), "hierarchical", ranks_per_node=3))
    broken = [replace(own, rows_UD=rows_of(own)[:0]) for own in call]
    with pytest.raises(RankFailed):
        run(broken, Cluster(Layout(dp_replicate=1, ep=4), "dedup", timeout_s=20))


# A whole layer on many ranks ----------------------------------------------------------------------


def whole_layer(num_ranks: int, tokens: list[int]) -> None:
    """Forward and backward with uneven tokens and one expert per rank equal one rank with all
    tokens, bit for bit.
    """
    cases = [
        Case(rows_of(own), own.routes, torch.linspace(-1, 1, WIDTH).expand(own.num_rows, -1))
        for own in routed(tokens, num_ranks, seed=3)
    ]
    expert_map = contiguous_map(num_ranks, num_ranks)
    bank = bank_of(num_ranks)

    def run_rank(rank: int) -> dict[str, Tensor]:
        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        own = experts_on_rank(bank, expert_map, rank)
        for parameter in own.parameters():
            parameter.requires_grad_()
        layer = SparseLayer(own)  # pyright: ignore[reportArgumentType]
        layer.dispatcher = make_dispatcher("alltoall", group)
        return run_layer(layer, cases[rank])

    found = run_threads(run_rank, num_ranks, timeout_s=200)
    expected = run_layer(SparseLayer(bank_of(num_ranks)), joined(cases))
    assert expected.keys() == {"y", "x", "gates", "w_up", "w_down", "b_up", "b_down"}
    for name, value in expected.items():
        assert torch.equal(torch.cat([result[name] for result in found]), value), name


def uneven_tokens(num_ranks: int) -> list[int]:
    return np.random.default_rng(1).permutation(np.arange(num_ranks) % 7).tolist()


def test_a_layer_on_64_ranks_is_the_layer_on_one() -> None:
    whole_layer(64, uneven_tokens(64))


@pytest.mark.slow
def test_a_layer_on_256_ranks_is_the_layer_on_one() -> None:
    whole_layer(256, uneven_tokens(256))
