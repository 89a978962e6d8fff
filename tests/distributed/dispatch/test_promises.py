"""Promises of every dispatcher: identity, bounded memory, and exchanges that all ranks enter."""

import ctypes
import gc
import os
import platform
import time
from typing import Any

import pytest
import torch
from dispatch_cases import (
    EXPERTS,
    SCENES,
    TOP_K,
    WIDTH,
    Scene,
    choose,
    dispatcher_of,
    echo,
    own_layer,
    run_layer,
    run_pass,
    scene_case,
    world,
)
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.table import DISPATCHERS, needs_outbox
from moebius.model.routing import Routes, token_routes

NAMES = tuple(DISPATCHERS)


def identity(scene_name: str) -> dict[str, bool]:
    """Whether experts that answer their row give (Σ w) · x bit for bit."""
    with world() as (process, group, nodes):
        generator = torch.Generator().manual_seed(process.rank)
        scene = SCENES[scene_name]
        experts = choose(scene, scene.tokens[process.rank], generator)
        # exact in any order of sums
        x = torch.randint(-1000, 1000, (len(experts), WIDTH), generator=generator) / 8
        weights = torch.randint(-4, 5, experts.shape, generator=generator) / 4
        routes = token_routes(experts, weights, num_experts=EXPERTS)
        expected = weights.sum(1, keepdim=True) * x
        return {
            name: run_pass(dispatcher_of(name, group, nodes), x, routes, echo).equal(expected)
            for name in NAMES
        }


def test_identity_experts_return_every_row_times_the_sum_of_its_weights() -> None:
    for scene in ("uneven", "all to one expert", "a rank without tokens"):
        for found in run_ranks(identity, 4, scene):
            assert len(found) == len(NAMES)
            assert set(found.values()) == {True}, (scene, found)


# Rank 1 sends its token to rank 3: ranks 0 and 2 send and receive nothing, as no rank does if the
# token's three experts are spread over three ranks.
TWO_SAY_NOTHING = Scene((0, 1, 0, 0), choice="last rank")


def collectives() -> dict[tuple, int]:
    """How many collectives the group has begun on this rank after a pass forward and backward."""
    found = {}
    with world() as (process, group, nodes):
        for name in NAMES:
            if needs_outbox(name):
                continue
            layer = own_layer(process, dispatcher_of(name, group, nodes))
            nobody, somebody = SCENES["no token at all"], SCENES["a rank without tokens"]
            for scene in (TWO_SAY_NOTHING, nobody, somebody):
                run_layer(layer, scene_case(scene, "token", process.rank))
                found[name, scene] = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def test_no_rank_stays_away_from_an_exchange_in_which_it_has_nothing_to_say() -> None:
    """Gloo would not notice, since it sends no empty message; NCCL would hang."""
    first, *others = run_ranks(collectives, 4)
    assert len(set(first.values())) == len(first)  # it does count
    assert others == [first] * 3


def rows_held() -> dict[str, tuple[int, int, int]]:
    """Rows that are here in a pass, how many must be, and routes."""
    out = {}
    with world() as (process, group, nodes):
        share = EXPERTS // process.world_size
        for name in SCENES:
            cases = [scene_case(name, "token", rank) for rank in range(process.world_size)]
            mine = [
                given.routes.expert_N.view(-1, TOP_K) // share == process.rank for given in cases
            ]
            given, distinct = cases[process.rank], [here.any(1) for here in mine]
            for kind, must in (("dedup", distinct), ("symmetric", distinct), ("alltoall", mine)):
                dispatcher = dispatcher_of(kind, group, nodes)
                held_once: list[int] = []

                def counted(x_UD: Tensor, routes: Routes, held=held_once) -> Tensor:
                    held.append(len(x_UD))
                    return echo(x_UD, routes)

                run_pass(dispatcher, given.x, given.routes, counted)
                counters: Any = dispatcher
                [held] = held_once
                wanted = sum(int(here.sum()) for here in must)
                out[f"{kind} {name}"] = (
                    held,
                    wanted,
                    counters.setup.counters.routes_served - sum(int(h.sum()) for h in mine),
                )
    return out


def test_a_rank_holds_the_rows_for_its_experts_and_no_more() -> None:
    for found in run_ranks(rows_held, 4):
        assert len(found) == 3 * len(SCENES)
        for name, (held, wanted, routes_too_many) in found.items():
            assert (held, routes_too_many) == (wanted, 0), name


TOKENS, PASSES = 2048, 60


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def alive() -> tuple[int, int]:
    """Live Python tensors and allocated bytes of this process, after Gloo's threads have released theirs."""
    time.sleep(0.1)
    tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Allocated
    found = mallinfo()
    return tensors, found.uordblks + found.hblkhd


def left_behind(name: str) -> tuple[int, float]:
    """Tensors and MiB that passes leave behind without garbage collection. Rows are narrow, so that
    routes dominate.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"  # torch's record of collectives is full at once
    with world() as (process, group, nodes):
        generator = torch.Generator().manual_seed(process.rank)
        experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(3).indices
        weights = torch.rand(TOKENS, 3, generator=generator).requires_grad_()
        x = torch.randn(TOKENS, 4, generator=generator, requires_grad=True)
        dispatcher, before = dispatcher_of(name, group, nodes), (0, 0)
        for passes in (5, PASSES):  # first tables are made, and room for what a pass wants
            gc.collect()
            gc.disable()
            before = alive()
            for _ in range(passes):
                routes = token_routes(experts, weights, num_experts=EXPERTS)
                torch.autograd.grad(run_pass(dispatcher, x, routes, echo).sum(), [x, weights])
        tensors, num_bytes = alive()
        return tensors - before[0], (num_bytes - before[1]) / 2**20


@pytest.mark.sample(2)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_leaves_nothing_behind(name: str) -> None:
    """The smallest list of a pass's routes has 24 KiB: keeping one per pass would take 1.4 MiB."""
    for tensors, mebibytes in run_ranks(left_behind, 2, name):
        assert tensors == 0
        assert mebibytes < 0.5
