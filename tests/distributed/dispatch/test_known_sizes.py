"""With known sizes, `dedup` gives the same bits without exchanging or reading counts."""

from typing import get_args

import pytest
import torch
from dispatch_cases import EXPERTS, WIDTH, Case, dispatcher_of, own_layer, run_layer, world
from torch import Tensor
from torch_modes import Operations
from world import run_ranks

from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.model.execution.recompute import Recompute, run_recomputed
from moebius.model.moe import SparseLayer
from moebius.model.routing import Routes, head_to_token_routes, token_to_head_routes

HEADS = 4


def heads_case(into_heads: bool, tokens: int, rank: int, *, promised: bool, top_k: int = 1) -> Case:
    """Every head chooses among its own experts; `promised`: all ranks have equally many rows."""
    generator, per_head = torch.Generator().manual_seed(rank), EXPERTS // HEADS
    scores = torch.rand(tokens, HEADS, per_head, generator=generator)
    first_H1 = torch.arange(0, EXPERTS, per_head)[:, None]
    experts_THK = scores.topk(top_k).indices + first_H1
    make = token_to_head_routes if into_heads else head_to_token_routes
    weights = torch.rand(experts_THK.shape, generator=generator)
    routes: Routes = make(experts_THK, weights, num_experts=EXPERTS, equal_blocks=promised)
    num_sources = tokens if into_heads else tokens * HEADS
    x = torch.randn(num_sources, WIDTH, generator=generator)
    return Case(x, routes, torch.randn(routes.num_targets, WIDTH, generator=generator))


def exchanges_of_counts(top_k: int) -> dict[tuple, tuple[list[str], int, int]]:
    """What differs where sizes are known; and exchanges of counts without and with that."""
    found = {}
    with world() as (process, group, nodes):
        swapped = list(range(EXPERTS))
        swapped[0], swapped[-1] = swapped[-1], swapped[0]
        even = [EXPERTS // process.world_size] * process.world_size
        moved = ExpertMap(tuple(even), tuple(swapped))
        for into_heads in (True, False):
            for tokens, expert_map, check_every in (
                (13, None, 0),
                (0, None, 0),
                (13, moved, 0),
                (13, None, 1),
            ):
                results, counted = [], []
                for promised in (False, True):
                    given = heads_case(
                        into_heads, tokens, process.rank, promised=promised, top_k=top_k
                    )
                    options = {"expert_map": expert_map, "check_every": check_every}
                    dispatcher = dispatcher_of("dedup", group, nodes, **options)
                    layer = own_layer(process, dispatcher)
                    with Operations() as operations:
                        results.append(run_layer(layer, given))
                    counted.append(operations.counts_exchanged)
                unequal = [
                    name
                    for name, value in results[0].items()
                    if not torch.equal(value, results[1][name])
                ]
                key = (into_heads, tokens, expert_map is not None, check_every)
                found[key] = (unequal, *counted)
    return found


@pytest.mark.parametrize(("ranks", "top_k"), [(2, 2), (4, 1)])
def test_heads_of_equal_ranks_need_no_counts(ranks: int, top_k: int) -> None:
    for found in run_ranks(exchanges_of_counts, ranks, top_k, timeout_s=60):
        assert len(found) == 8
        for (_, _, is_moved, is_checked), (unequal, before, after) in found.items():
            assert unequal == []
            assert before > 0
            assert after == (before if is_moved or is_checked else 0)


def exchanges_when_recomputed() -> list[tuple[list[str], int, int]]:
    """What differs where a step is recomputed; and exchanges of counts without and with a promise."""
    found = []
    with world() as (process, group, nodes):
        layer = own_layer(process, dispatcher_of("dedup", group, nodes))
        plain = run_layer(layer, heads_case(True, 13, process.rank, promised=False))
        for mode in get_args(Recompute):
            counted, unequal = [], []
            for promised in (False, True):
                given = heads_case(True, 13, process.rank, promised=promised)
                layer.zero_grad(set_to_none=True)
                x = given.x.clone().requires_grad_()
                with Operations() as operations:
                    y = layer_twice(mode, layer, x, given.routes)
                    y.backward(given.grad)
                result = {"y": y.detach(), "x": x.grad, "w_up": layer.experts.w_up.grad}
                unequal += [n for n, value in result.items() if not torch.equal(value, plain[n])]
                counted.append(operations.counts_exchanged)
            found.append((unequal, *counted))
    return found


def layer_twice(mode: Recompute, layer: SparseLayer, x: Tensor, routes: Routes) -> Tensor:
    if mode == "none":
        return layer(x, routes)
    y, _ = run_recomputed(mode, layer, lambda x: (layer(x, routes), None), x)
    return y


def test_recomputing_remembers_the_promise() -> None:
    for found in run_ranks(exchanges_when_recomputed, 2, timeout_s=60):
        assert [unequal for unequal, _, _ in found] == [[]] * 3
        assert all(before > 0 for _, before, _ in found)
        assert [after for _, _, after in found] == [0] * 3


def test_routes_that_were_cut_promise_nothing() -> None:
    routes = heads_case(True, 5, 0, promised=True).routes
    assert routes.equal_blocks == HEADS
    assert routes.kept(routes.source_N != 2).equal_blocks == 0
