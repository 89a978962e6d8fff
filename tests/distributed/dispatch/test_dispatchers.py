"""Every dispatcher against one rank: all kinds of routes, adversarial scenes, rows sent, and order of
events.

One world runs many cases, because starting it costs more than they do.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import (
    EXPERTS,
    KINDS,
    PER_NODE,
    SCENES,
    TOP_K,
    WIDTH,
    Case,
    case,
    dispatcher_of,
    echo,
    local_results,
    outbox_for,
    own_layer,
    run_layer,
    run_pass,
    scene_case,
    shuffled,
    world,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import all_equal
from pairwise import every_pair, slow_but
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch import alltoall as dispatch_alltoall
from moebius.distributed.dispatch import dedup_hop, exchange
from moebius.distributed.dispatch.base import build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.exchange import (
    AllGather,
    AllToAll,
    Counters,
    ExchangeMismatch,
    Pending,
    ReduceScatter,
    hottest_factor,
)
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.dispatch.table import DISPATCHERS, needs_outbox
from moebius.kernels.functional import routed_mlp
from moebius.model.routing import Routes, token_routes

NAMES = tuple(DISPATCHERS)
Choice = tuple[str, str, str]  # scene, kind of routes, dispatcher


def all_cases(dtype: torch.dtype, choices: list[Choice]) -> dict[Choice, float]:
    """This rank's error of every choice against one rank; 1 if two runs differ, or `symmetric` and
    `dedup`.

    A dispatcher serves all choices: what it remembered of a pass would spoil the next.
    """
    found: dict[Choice, float] = {}
    with world() as (process, group, nodes):
        dispatchers: Any = {name: dispatcher_of(name, group, nodes) for name in NAMES}
        for (scene, kind), same_case in groupby(choices, key=lambda choice: choice[:2]):
            cases = [scene_case(scene, kind, rank, dtype) for rank in range(4)]
            expected, given = local_results(cases, dtype)[process.rank], cases[process.rank]
            results: dict[str, list[Tensor]] = {}
            for choice in same_case:
                dispatcher = dispatchers[choice[2]]
                layer, before = (
                    own_layer(process, dispatcher, dtype),
                    dispatcher.setup.counters.copy(),
                )
                result = run_layer(layer, given)
                found[choice] = worst(result, expected, process.rank, 4)
                counted = dispatcher.setup.counters.since(before)
                sent = torch.tensor([counted.rows_sent, counted.routes_served])
                results[choice[2]] = [*result.values(), sent]
                if scene == "uneven" and not all_equal(
                    result.values(), run_layer(layer, given).values()
                ):
                    found[choice] = 1.0
            memory = results.get("symmetric")
            if memory is not None and not all_equal(results["dedup"], memory):
                found[scene, kind, "symmetric"] = 1.0
    return found


EVERYTHING = list(product(SCENES, KINDS, NAMES))
EVERY_PAIR = every_pair(tuple(SCENES), KINDS, NAMES)
EVERY_PAIR = [
    each for each in EVERYTHING if each in EVERY_PAIR or each[2] in ("dedup", "symmetric")
]
UNEVEN = list(product(("uneven",), KINDS, NAMES))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "choices"),
    [
        pytest.param(torch.float32, 1e-6, EVERY_PAIR, id="fp32"),
        pytest.param(torch.float32, 1e-6, EVERYTHING, id="fp32-all", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 2e-2, UNEVEN, id="bf16", marks=pytest.mark.slow),
        pytest.param(torch.float64, 1e-14, UNEVEN, id="fp64", marks=pytest.mark.slow),
    ],
)
def test_every_dispatcher_equals_one_rank_on_every_kind_of_routes(
    dtype: torch.dtype, tolerance: float, choices: list[Choice]
) -> None:
    for found in run_ranks(all_cases, 4, dtype, choices, timeout_s=240):
        assert list(found) == choices
        assert {key: value for key, value in found.items() if value > tolerance} == {}


# What is sent.


def distinct(place_N: Tensor, row_N: Tensor) -> int:
    """Distinct (place of the expert, row) pairs, by a loop."""
    return len(set(zip(place_N.tolist(), row_N.tolist(), strict=True)))


def rows_on_the_way(kind: str) -> dict[str, tuple[Counters, list[int]]]:
    """What a dispatcher counted on this rank, and the rows that it sent in each exchange."""
    out = {}
    with world() as (process, group, nodes):
        given = scene_case("uneven", kind, process.rank)
        launched: list[int] = []
        start = AllToAll.start

        def recorded(self: AllToAll, rows: Tensor) -> Pending:
            if rows.dim() == 2 and rows.shape[1] == WIDTH:
                launched.append(sum(self.sent))
            return start(self, rows)

        AllToAll.start = recorded  # for the rest of this process's life, which is this call
        for name in ("dedup", "hierarchical"):
            dispatcher: Any = dispatcher_of(name, group, nodes)
            launched.clear()
            with torch.no_grad():
                own_layer(process, dispatcher)(given.x, given.routes)
            out[name] = (dispatcher.setup.counters, list(launched))
    return out


@pytest.mark.parametrize(
    "kind",
    slow_but(["token", "token to head", "head to token", "dropped"], "token", "dropped"),
)
def test_dedup_sends_every_row_once_to_every_rank_that_serves_it_and_not_once_more(
    kind: str,
) -> None:
    """Rows returned and forwarded inside a node belong to other ranks; only their totals compare."""
    share = EXPERTS // 4
    found = run_ranks(rows_on_the_way, 4, kind)
    in_all, expected = Counter[str](), Counter[str]()
    for rank, own in enumerate(found):
        routes = scene_case("uneven", kind, rank).routes
        ranks, nodes = routes.expert_N // share, routes.expert_N // (share * PER_NODE)
        served = distinct(ranks, routes.source_N)
        counted, (sent, answered) = own["dedup"]
        assert (counted.rows_sent, sent) == (served, served)
        assert counted.rows_one_per_route == len(routes.expert_N)
        counted, (between, inside, _, back) = own["hierarchical"]
        assert between == distinct(nodes, routes.source_N)
        away = nodes != rank // PER_NODE
        rows_away = sum(
            distinct(nodes[away], index[away]) for index in (routes.source_N, routes.target_N)
        )
        in_all.update(
            answers=answered, inside=inside, back=back, num_bytes=counted.bytes_inter_node
        )
        expected.update(
            answers=distinct(ranks, routes.target_N),
            inside=served,
            back=distinct(nodes, routes.target_N),
            num_bytes=4 * WIDTH * rows_away + 16 * int(away.sum()),
        )
    assert in_all == expected


# When it is sent.


def order_of_events(name: str) -> list[str]:
    """What this rank did in one pass forward and backward."""
    with world() as (process, group, nodes):
        given = scene_case("even", "token", process.rank)
        layer = own_layer(process, dispatcher_of(name, group, nodes))
        experts: Any = torch.nn.Module()
        experts.dtype = torch.float32
        layer.experts = experts
        log: list[str] = []
        experts.forward = lambda x, routes: log.append("experts") or echo(x, routes)
        run_layer(layer, given)  # tables are made once
        log.clear()
        wait, pending = Counters.wait, list[tuple[Pending, str]]()

        def recorded(start: Callable[..., Pending]) -> Callable[..., Pending]:
            def recorded_start(self: Any, rows: Tensor) -> Pending:
                out = start(self, rows)
                pending.append((out, label(rows)))
                log.append(f"launch {label(rows)}")
                return out

            return recorded_start

        def meanwhile(work: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **options: Any) -> Any:
                log.append("meanwhile")
                return work(*args, **options)

            return noted

        def recorded_wait(self: Counters, out: Pending) -> Tensor:
            names = [name for launched, name in pending if launched is out]
            assert names, f"{label(out.rows)} are waited for that no collective launched"
            log.append(f"wait {names[0]}")
            return wait(self, out)

        for collective in (AllToAll, AllGather, ReduceScatter):
            collective.start = recorded(collective.start)
        Counters.wait = recorded_wait  # pyright: ignore[reportAttributeAccessIssue]
        dedup_hop.DedupExchange.prepare = meanwhile(dedup_hop.DedupExchange.prepare)
        dispatch_alltoall.gather_rows = meanwhile(dispatch_alltoall.gather_rows)
        x, weights = given.x.requires_grad_(), given.routes.weight_N.clone().requires_grad_()
        y = layer(x, given.routes.with_weights(weights), lambda: log.append("beside"))
        log.append("backward")
        y.backward(given.grad)
        return log


def label(rows: Tensor) -> str:
    if not rows.is_floating_point():
        return "counts"
    return "rows" if rows.dim() == 2 and rows.shape[1] == WIDTH else "gates"


@pytest.mark.parametrize("name", [name for name in NAMES if not needs_outbox(name)])
def test_rows_travel_while_other_work_is_done(name: str) -> None:
    """How often the host reads is tested by tests/fake_cuda."""
    log, *others = run_ranks(order_of_events, 4, name)
    assert others == [log] * 3, "the ranks' collectives are not in the same order"
    forward = log[: log.index("backward")]
    assert forward.count("experts") == 1
    assert (
        forward.index("launch rows")
        < forward.index("beside")
        < forward.index("wait rows")
        < forward.index("experts")
    )
    if name != "allgather":  # which can do nothing before it knows how far to pad
        assert forward[: forward.index("launch rows")] == [
            "launch counts",
            "meanwhile",
            "wait counts",
        ]


# Nothing hangs, nothing is silently wrong.


def wrong_split(name: str) -> str:
    """Rank 2 believes that one row fewer comes from rank 1 (or, between nodes, from rank 0)."""
    with world() as (process, group, nodes):
        dispatcher: Any = dispatcher_of(name, group, nodes, check_every=1)
        communicator = dispatcher.inter if name == "hierarchical" else dispatcher.communicator
        launch = exchange.Communicator.all_to_all

        def lying(self: Any, rows: Tensor, sent: list[int], received: list[int]) -> Any:
            if process.rank == 2 and self is communicator and rows.is_floating_point():
                source = 0 if name == "hierarchical" else 1
                received = [count - (i == source) for i, count in enumerate(received)]
            return launch(self, rows, sent, received)

        exchange.Communicator.all_to_all = lying  # pyright: ignore[reportAttributeAccessIssue]
        given = scene_case("even", "token", process.rank)
        with pytest.raises(ExchangeMismatch) as caught:
            own_layer(process, dispatcher)(given.x, given.routes)
        return str(caught.value)


@pytest.mark.parametrize(("name", "source"), [("alltoall", 1), ("dedup", 1), ("hierarchical", 0)])
def test_ranks_that_disagree_about_a_split_all_say_so(name: str, source: int) -> None:
    messages = run_ranks(wrong_split, 4, name)
    assert len(set(messages)) == 1
    assert " rows to rank 2, which expects " in messages[0]
    words = (f"rank {source} sends ", "which expects ")
    sends, expects = (int(messages[0].partition(word)[2].split()[0]) for word in words)
    assert sends == expects + 1


def changed_row() -> list[str]:
    """On rank 0, rows change places, then a bit changes, after they came."""
    messages = []
    with world() as (process, group, nodes):
        given = scene_case("even", "token", process.rank)
        dispatcher = dispatcher_of("dedup", group, nodes, check_every=1)
        layer = own_layer(process, dispatcher)
        run_layer(layer, given)  # sound: nothing is raised
        start = AllToAll.start
        for fault in (lambda rows: rows.copy_(rows.flip(0)), lambda rows: rows[:1].mul_(1.5)):

            def spoiled(self: AllToAll, rows: Tensor, fault=fault) -> Pending:
                out = start(self, rows)
                if process.rank == 0 and rows.dim() == 2 and rows.shape[1] == WIDTH:
                    fault(out.wait())
                return out

            AllToAll.start = spoiled
            with pytest.raises(ExchangeMismatch) as caught:
                layer(given.x, given.routes)
            messages.append(str(caught.value))
            AllToAll.start = start
    return messages


def test_rows_that_change_under_way_are_noticed_on_all_ranks() -> None:
    results = run_ranks(changed_row, 4)
    assert all(messages == results[0] for messages in results)
    exchanged, altered = results[0]
    assert "rank 0 received" in exchanged
    assert "position 0 of those of rank 0" in exchanged
    assert "differs in its bits" in altered


def routes_out_of_range() -> list[str]:
    with world() as (process, group, nodes):
        messages = []
        for field, value in (("expert_N", EXPERTS), ("source_N", -1), ("target_N", 10**6)):
            given = scene_case("even", "token", process.rank)
            routes = given.routes
            if process.rank == 1:
                wrong = getattr(routes, field).clone()
                wrong[3] = value
                routes = replace(routes, **{field: wrong})
            with pytest.raises(ValueError, match="rank 1 has 1 routes whose") as caught:
                dispatcher_of("dedup", group, nodes, check_every=1).dispatch(given.x, routes)
            messages.append(str(caught.value))
        return messages


def test_a_route_out_of_range_on_one_rank_is_an_error_on_all() -> None:
    for messages in run_ranks(routes_out_of_range, 4):
        for message, name in zip(messages, ("expert", "source row", "target row"), strict=True):
            assert name in message


def not_a_number() -> dict[str, tuple[bool, bool]]:
    """Rank 0's first token has gate weights of NaN, as from NaN logits: it alone is lost,
    everywhere.
    """
    out = {}
    with world() as (process, group, nodes):
        cases = [scene_case("even", "token", rank) for rank in range(4)]
        cases[0].routes.weight_N[:TOP_K] = torch.nan
        expected, given = local_results(cases)[process.rank], cases[process.rank]
        for name in NAMES:
            result = run_layer(own_layer(process, dispatcher_of(name, group, nodes)), given)
            close = torch.allclose(result["y"], expected["y"], rtol=1e-5, atol=1e-5, equal_nan=True)
            lost = result["y"].isnan().any(1).nonzero().flatten().tolist()
            out[name] = (close, lost == ([0] if process.rank == 0 else []))
    return out


def test_nan_gate_weights_spoil_their_own_token_only() -> None:
    for found in run_ranks(not_a_number, 4):
        assert set(found.values()) == {(True, True)}


# Drawn routings.


@dataclass(frozen=True)
class Drawn:
    """Tokens of every rank, experts per rank, experts per token, how skewed, which seed."""

    tokens: tuple[int, ...]
    share: int
    top_k: int
    skew: float
    seed: int
    kind: str


@st.composite
def drawn_cases(draw: st.DrawFn) -> Drawn:
    share = draw(st.integers(1, 3))
    return Drawn(
        tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))),
        share=share,
        top_k=draw(st.integers(1, 3 * share)),  # K = E and E = ep among them
        skew=draw(st.sampled_from([0.0, 1.0, 8.0])),
        seed=draw(st.integers(0, 10**6)),
        kind=draw(st.sampled_from(["token", "dropped", "irregular"])),
    )


def drawn_case(drawn: Drawn, rank: int) -> Case:
    generator = torch.Generator().manual_seed(drawn.seed + rank)
    num_experts, tokens = 3 * drawn.share, drawn.tokens[rank]
    popularity = -drawn.skew * torch.arange(num_experts).float().add(1).log()  # Zipf
    noise = -torch.rand(tokens, num_experts, generator=generator).log().neg().log()
    experts = (popularity + noise).argsort(-1, descending=True)[:, : drawn.top_k]
    weights = torch.rand(experts.shape, generator=generator).double()
    routes = token_routes(experts, weights, num_experts=num_experts)
    if drawn.kind == "dropped":
        routes = routes.kept(torch.rand(len(routes.expert_N), generator=generator) < 0.5)
    if drawn.kind == "irregular" and tokens:
        routes = shuffled(replace(routes, per_source=0, per_target=0), generator)
    return Case(
        torch.randn(tokens, 4, generator=generator).double(), routes, torch.ones(tokens, 4).double()
    )


def drawn_on_ranks(batch: list[Drawn]) -> list[dict[str, float]]:
    """Each dispatcher's error in each case against a loop over routes; experts multiply by (expert + 1)."""
    out = []
    with world() as (process, group, node_groups):
        for drawn in batch:
            given, found = drawn_case(drawn, process.rank), {}
            expected = torch.zeros_like(given.grad)
            for n, expert in enumerate(given.routes.expert_N.tolist()):
                answer = given.routes.weight_N[n] * (expert + 1) * given.x[given.routes.source_N[n]]
                expected[given.routes.target_N[n]] += answer
            for name in NAMES:
                nodes = node_groups if name == "hierarchical" else None
                dispatcher: Any = make_dispatcher(
                    name,
                    group,
                    nodes=nodes,
                    check_every=1,
                    outbox=outbox_for(name, group),
                )
                experts = partial(scaled, first_expert=process.rank * drawn.share)
                y = run_pass(dispatcher, given.x, given.routes, experts)
                served = torch.tensor(
                    [dispatcher.setup.counters.routes_served, -len(given.routes.expert_N)]
                )
                dist.all_reduce(served)
                conserved = served.sum().item() == 0
                found[name] = (
                    (y - expected).abs().max().item()
                    if conserved and len(y)
                    else float(not conserved)
                )
            out.append(found)
    return out


def scaled(x: Tensor, routes: Routes, first_expert: int) -> Tensor:
    return echo(x, routes.with_weights(routes.weight_N * (routes.expert_N + first_expert + 1)))


@settings(max_examples=2)
@given(st.lists(drawn_cases(), min_size=3, max_size=3))
def test_drawn_routings_lose_no_route_and_equal_a_loop(batch: list[Drawn]) -> None:
    for results in run_ranks(drawn_on_ranks, 3, batch):
        for drawn, found in zip(batch, results, strict=True):
            assert {name: value for name, value in found.items() if value > 1e-12} == {}, drawn


# Gradients.


def gradients_by_differences() -> dict[str, bool]:
    out = {}
    with world() as (process, group, nodes):
        generator = torch.Generator().manual_seed(process.rank)
        w_up = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
        w_down = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
        chosen = torch.tensor([[0, 3], [2, 1], [3, 2]])
        x = torch.randn(3, 3, dtype=torch.float64, generator=generator, requires_grad=True)
        weights = torch.rand(6, dtype=torch.float64, generator=generator, requires_grad=True)
        routes = token_routes(chosen, weights.view(3, 2), num_experts=4)

        def experts(x_UD: Tensor, routes: Routes) -> Tensor:
            return routed_mlp(x_UD, w_up, w_down, routes, activation="silu", backend="reference")

        for name in NAMES:
            dispatcher = make_dispatcher(
                name,
                group,
                nodes=nodes if name == "hierarchical" else None,
                outbox=outbox_for(name, group),
            )

            def layer(x: Tensor, weights: Tensor, dispatcher=dispatcher) -> Tensor:
                return run_pass(dispatcher, x, routes.with_weights(weights), experts)

            out[name] = torch.autograd.gradcheck(layer, (x, weights))
            [first] = torch.autograd.grad((layer(x, weights) ** 2).sum(), [x], create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                first.sum().backward()
    return out


def test_gradients_equal_differences_on_two_ranks() -> None:
    for found in run_ranks(gradients_by_differences, 2, timeout_s=120):
        assert found == dict.fromkeys(NAMES, True)


# What is counted.


def counted(wait_s: float) -> Counters:
    with world() as (process, group, nodes):
        dispatcher: Any = dispatcher_of("alltoall", group, nodes)
        layer = own_layer(process, dispatcher)
        given = scene_case("all to one expert", "token", process.rank)
        if process.rank:
            time.sleep(wait_s)
        layer(given.x, given.routes)
        return dispatcher.setup.counters


def test_counters_say_what_was_sent_and_who_waited() -> None:
    wait_s = 0.2
    results = run_ranks(counted, 4, wait_s)
    tokens = SCENES["all to one expert"].tokens
    for rank, stats in enumerate(results):
        sent = tokens[rank] * TOP_K
        assert (stats.passes, stats.rows_sent, stats.rows_one_per_route) == (1, sent, sent)
        assert stats.routes_served == (sum(tokens) * TOP_K if rank == 0 else 0)
        row_bytes = 4 * WIDTH
        out_bytes = sent * (row_bytes + 4)  # rows and gate weights, all to rank 0
        if rank == 0:
            assert stats.bytes_intra_node == tokens[1] * TOP_K * row_bytes  # answers
            assert stats.bytes_inter_node == (tokens[2] + tokens[3]) * TOP_K * row_bytes
        else:
            assert stats.bytes_intra_node == (out_bytes if rank == 1 else 0)
            assert stats.bytes_inter_node == (out_bytes if rank > 1 else 0)
    assert results[0].waited_s > wait_s / 2
    assert results[0].since(results[0]) == Counters()


def test_the_hottest_rank_is_compared_with_its_own_group() -> None:
    assert hottest_factor(torch.tensor([[8, 0, 0, 0], [300, 300, 300, 300]])) == 4.0
    assert hottest_factor(torch.tensor([[3, 1], [0, 0]])) == 1.5
    assert hottest_factor(torch.zeros(2, 2)) == 1.0


# What is refused.


def refused() -> list[str]:
    messages = []
    with world() as (_, group, _):
        for name in ("fastest", "local"):
            with pytest.raises(ValueError, match=r".") as caught:
                make_dispatcher(name, group)
            messages.append(str(caught.value))
        given = case("token", torch.zeros(2, 1, dtype=torch.int64), 0)
        for name, change in (("dedup", {"num_experts": 2}), ("alltoall", {"per_expert": 3})):
            with pytest.raises(ValueError, match=r".") as caught:
                make_dispatcher(name, group).dispatch(given.x, replace(given.routes, **change))
            messages.append(str(caught.value))
        with pytest.raises(ValueError, match=r".") as caught:
            build_node_groups(group, 2, timeout_s=5)
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    parts = (
        "'fastest' is not a dispatcher: choose auto, local, allgather",
        'mesh.dispatcher="local" with mesh.ep=3',
        "2 experts are too few for 3 ranks",
        "per_expert=3 does not fit 2 routes over 8 experts",
        "[2, 1]",
    )
    for messages in run_ranks(refused, 3):
        for message, part in zip(messages, parts, strict=True):
            assert part in message
    with pytest.raises(ValueError, match="experts are in slots"):
        ExpertMap((2, 2), (0, 4))
