"""What every dispatcher promises whatever is asked of it: identity, memory, and no trace of the
pass before.
"""

import os
import resource
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import outbox_for
from dispatch_scenes import (
    EXPERTS,
    SCENES,
    WIDTH,
    Scene,
    bank,
    choose,
    forward_backward,
    merge_for,
    parts,
    run_pass,
)
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.base import build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.table import DISPATCHERS, needs_outbox
from moebius.distributed.process.process import Process, start_process
from moebius.model.moe import Dispatcher, SparseLayer
from moebius.model.routing import Routes, token_routes

PER_NODE = 2  # pretended
NAMES = tuple(DISPATCHERS)


def dispatchers(process: Process, names: Sequence[str] = NAMES) -> dict[str, Dispatcher]:
    group = dist.group.WORLD
    assert group is not None
    nodes = build_node_groups(group, PER_NODE if process.world_size == 4 else 1, timeout_s=20)
    return {
        name: make_dispatcher(
            name,
            group,
            nodes=nodes if name == "hierarchical" else None,
            outbox=outbox_for(name, group),
        )
        for name in names
    }


def echo(x: Tensor, routes: Routes) -> Tensor:
    """Experts that answer the row that they are asked about."""
    gated = x[routes.source_N] * routes.weight_N[:, None]
    return x.new_zeros(routes.num_targets, x.shape[1]).index_add(0, routes.target_N, gated)


def identity(scene_name: str) -> dict[str, bool]:
    """Whether experts that answer their row give (Σ w) · x bit for bit."""
    with start_process("cpu", timeout_s=20) as process:
        generator = torch.Generator().manual_seed(process.rank)
        scene = SCENES[scene_name]
        experts = choose(scene, scene.tokens[process.rank], 4, generator)
        x = (
            torch.randint(-1000, 1000, (len(experts), WIDTH), generator=generator) / 8
        )  # exact in any order of sums
        weights = torch.randint(-4, 5, experts.shape, generator=generator) / 4
        routes = token_routes(experts, weights, num_experts=EXPERTS)
        found = {}
        for variant, dispatcher in dispatchers(process).items():
            y = run_pass(dispatcher, x, routes, echo)
            found[variant] = torch.equal(y, weights.sum(1, keepdim=True) * x)
        return found


def test_identity_experts_return_every_row_times_the_sum_of_its_weights() -> None:
    for scene in ("uneven", "all to one expert", "a rank without tokens"):
        for found in run_ranks(identity, 4, scene):
            assert len(found) == len(NAMES)
            assert set(found.values()) == {True}, (scene, found)


def one_after_the_other() -> dict[tuple, float]:
    """Every scene through the same dispatchers: the largest difference from one rank, relative to
    the largest value.
    """
    found = {}
    with start_process("cpu", timeout_s=20) as process:
        share = EXPERTS // process.world_size
        drawn = {name: parts(scene, torch.float32) for name, scene in SCENES.items()}
        on_one = {
            name: forward_backward(SparseLayer(bank(torch.float32)), *merge_for(ranks, 1)[0])  # pyright: ignore[reportArgumentType]
            for name, ranks in drawn.items()
        }
        for variant, dispatcher in dispatchers(process).items():
            for name in (*SCENES, *reversed(SCENES)):
                scene, expected = SCENES[name], on_one[name]
                layer = SparseLayer(bank(torch.float32, process.rank * share, share))  # pyright: ignore[reportArgumentType]
                layer.dispatcher = dispatcher
                result = forward_backward(layer, *drawn[name][process.rank])
                rows = slice(
                    sum(scene.tokens[: process.rank]), sum(scene.tokens[: process.rank + 1])
                )
                own = slice(process.rank * share, (process.rank + 1) * share)
                for key, value in result.items():
                    if not isinstance(value, Tensor) or not value.numel():
                        continue
                    whole = expected[key]
                    theirs = whole[own if key.startswith("w_") else rows]
                    difference = (value - theirs).abs().max() / (whole.abs().max() + 1e-30)
                    found[variant, name, key] = difference.item()
    return found


def test_a_dispatcher_remembers_nothing_of_the_pass_before() -> None:
    results = run_ranks(one_after_the_other, 4, timeout_s=120)
    weights = [name for name, _ in bank(torch.float32).named_parameters()]
    for rank, found in enumerate(results):
        for (
            name,
            scene,
        ) in (
            SCENES.items()
        ):  # a rank without tokens has experts still, and gradients of their weights
            expected = {*weights, *(("y", "x", "gates") if scene.tokens[rank] else ())}
            for variant in NAMES:
                assert {
                    key for made, of, key in found if (made, of) == (variant, name)
                } == expected, (
                    variant,
                    name,
                    rank,
                )
        assert {key: value for key, value in found.items() if value > 1e-6} == {}


# Rank 1 sends its token to rank 3: ranks 0 and 2 send and receive nothing, as no rank does if the
# token's three experts are spread over three ranks.
TWO_SAY_NOTHING = Scene((0, 1, 0, 0), choice="last rank")


def collectives() -> dict[tuple, int]:
    """How many collectives the group has begun on this rank after a pass forward and backward."""
    found = {}
    with start_process("cpu", timeout_s=20) as process:
        share, group = EXPERTS // process.world_size, dist.group.WORLD
        assert group is not None
        by_collectives = [name for name in NAMES if not needs_outbox(name)]
        for variant, dispatcher in dispatchers(process, by_collectives).items():
            layer = SparseLayer(bank(torch.float32, process.rank * share, share))  # pyright: ignore[reportArgumentType]
            layer.dispatcher = dispatcher
            for scene in (
                TWO_SAY_NOTHING,
                SCENES["no token at all"],
                SCENES["a rank without tokens"],
            ):
                forward_backward(layer, *parts(scene, torch.float32)[process.rank])
                found[variant, scene] = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def test_no_rank_stays_away_from_an_exchange_in_which_it_has_nothing_to_say() -> None:
    """Gloo would not notice, since it sends no empty message; NCCL would hang."""
    first, *others = run_ranks(collectives, 4)
    assert len(set(first.values())) == len(first)  # it does count
    assert others == [first] * 3


def rows_held() -> dict[str, tuple[int, int, int]]:
    """Rows that are here in a pass, how many must be, and routes."""
    out = {}
    with start_process("cpu", timeout_s=20) as process:
        for name, scene in SCENES.items():
            drawn = parts(scene, torch.float32)
            share = EXPERTS // process.world_size
            mine = [experts // share == process.rank for _, experts, _, _ in drawn]
            x, experts, weights, _ = drawn[process.rank]
            distinct = [here.any(1) for here in mine]
            for kind, must in (("dedup", distinct), ("symmetric", distinct), ("alltoall", mine)):
                [dispatcher] = dispatchers(process, [kind]).values()
                routes = token_routes(experts, weights, num_experts=EXPERTS)
                held_once: list[int] = []

                def counted(x_UD: Tensor, routes: Routes, held=held_once) -> Tensor:
                    held.append(len(x_UD))
                    return echo(x_UD, routes)

                run_pass(dispatcher, x, routes, counted)
                counters: Any = dispatcher
                [held] = held_once
                wanted = sum(int(here.sum()) for here in must)
                out[f"{kind} {name}"] = (
                    held,
                    wanted,
                    counters.stats().routes_served - sum(int(h.sum()) for h in mine),
                )
    return out


def test_a_rank_holds_the_rows_for_its_experts_and_no_more() -> None:
    for found in run_ranks(rows_held, 4):
        assert len(found) == 3 * len(SCENES)
        for name, (held, wanted, routes_too_many) in found.items():
            assert (held, routes_too_many) == (wanted, 0), name


WIDE, PASSES = 512, 200


def growth() -> dict[str, float]:
    """MiB that the process grew by in 200 passes forward and backward, after 40 to warm up."""
    out = {}
    with start_process("cpu", timeout_s=20) as process:
        generator = torch.Generator().manual_seed(process.rank)
        experts = torch.rand(64, EXPERTS, generator=generator).topk(3).indices
        x = torch.randn(64, WIDE, generator=generator, requires_grad=True)
        routes = token_routes(experts, torch.rand(64, 3, generator=generator), num_experts=EXPERTS)
        for name, dispatcher in dispatchers(process).items():
            for passes in (40, PASSES):
                before = resident_bytes()
                for _ in range(passes):
                    y = run_pass(dispatcher, x, routes, echo)
                    x.grad = None
                    y.sum().backward()
            out[name] = (resident_bytes() - before) / 2**20
    return out


def resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_memory_does_not_grow_over_200_passes() -> None:
    """One pass holds some 1 MiB of rows: kept, they would be 200."""
    assert os.path.exists("/proc/self/statm")
    for found in run_ranks(growth, 2, timeout_s=120):
        assert max(found.values()) < 20, found
