"""Ranks whose sequences have other depths make the same exchanges, and nobody waits for ever."""

import random

import pytest
import torch
from family import VOCABULARY, make_uneven, tiny_config, tiny_model
from torch import Tensor
from world import run_ranks

from moebius.distributed.layout import MeshConfig, local_experts, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model, expert_names
from moebius.distributed.process.process import Process, start_process
from moebius.model.loops.depth import PassDepth
from moebius.model.loops.exits import ExitRule
from moebius.model.transformer import Transformer

SEQUENCES, POSITIONS, MOST = 2, 5, 6
CHANGES = {"feed_forward.num_experts": 8}


def depths_of_draw(draw: int, world_size: int) -> list[tuple[int, ...]]:
    """By rank. Every third draw has a rank whose sequences are done after one loop."""
    numbers = random.Random(draw)
    by_rank = [tuple(numbers.randint(1, MOST) for _ in range(SEQUENCES)) for _ in range(world_size)]
    if draw % 3 == 0:
        by_rank[numbers.randrange(world_size)] = (1,) * SEQUENCES
    return by_rank


@torch.no_grad()
def sharded_and_whole(
    process: Process, recipe: str, dispatcher: str
) -> tuple[Transformer, Transformer]:
    """The same weights with this rank's experts, and with all."""
    mesh = build_mesh(plan_layout(MeshConfig(ep=process.world_size), process.world_size), process)
    whole = make_uneven(tiny_model(recipe, CHANGES))
    model = build_model(
        tiny_config(recipe, CHANGES),
        mesh,
        dispatcher=dispatcher,
        backend="auto",
        seed=0,
        device=torch.device("cpu"),
    )
    sharded, start = expert_names(model), whole.state_dict()
    for key, parameter in model.named_parameters():
        own = start[key]
        if key in sharded:
            block = local_experts(mesh.layout, mesh.rank, len(own))
            own = own[block.start : block.stop]
        parameter.copy_(own)
    return model, whole


def rows_of(draw: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * draw + rank)
    return torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)


def wrong_draws(recipe: str, dispatcher: str, draws: range) -> list[int]:
    """The draws in which this rank's loss is not what one process computes.

    With `alltoall`, which adds in the same order, to the bit.
    """
    with start_process("cpu", timeout_s=60) as process:
        model, whole = sharded_and_whole(process, recipe, dispatcher)
        loops, wrong = model.config.loops, []
        for draw in draws:
            by_rank = depths_of_draw(draw, process.world_size)
            every = [depth for depths in by_rank for depth in depths]
            first = max(map(loops.depth.first_with_gradient, every))
            kept = max(depth - loops.depth.first_with_gradient(depth) for depth in every)
            depth = PassDepth(
                first + kept, first, by_rank[process.rank], loops.depth.gradient_loops
            )
            rows, losses = rows_of(draw, process.rank), []
            for each in (model, whole):
                each.training_depth = depth
                torch.manual_seed(draw)
                loss = each(rows[:, :-1], targets_BS=rows[:, 1:]).cross_entropy
                loss.backward()
                losses.append(loss.detach())
            tolerance = 0 if dispatcher == "alltoall" else 1e-5
            if not torch.allclose(*losses, rtol=tolerance, atol=0):
                wrong.append(draw)
        return wrong


@torch.no_grad()
def exits_of_rank(recipe: str, thresholds: tuple[float, ...]) -> tuple[list[float], bool]:
    """This rank's loops under its own rule, and whether one process has the same logits."""
    with start_process("cpu", timeout_s=60) as process:
        rows, outputs = rows_of(0, process.rank), []
        for model in sharded_and_whole(process, recipe, "alltoall"):
            model.eval().exit_rule = ExitRule("state", thresholds[process.rank])
            outputs.append(model(rows))
        found, expected = outputs
        same = torch.equal(found.logits_BSV, expected.logits_BSV)
        return found.auxiliary["loops"].tolist(), same


def test_ranks_whose_sequences_have_all_left_take_part_to_the_end():
    repeats = tiny_config("huginn_moe", CHANGES).num_repeats
    found = run_ranks(exits_of_rank, 4, "huginn_moe", (1e9, 1e-9, 1e9, 0.7))
    assert [same for _, same in found] == [True] * 4
    assert [loops for loops, _ in found[:3]] == [[1, 1], [repeats] * 2, [1, 1]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["parcae_moe", "moeut_sandwich"])
def test_two_ranks_agree_with_one_process(recipe):
    assert run_ranks(wrong_draws, 2, recipe, "alltoall", range(12)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "symmetric"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_draw_ends(world_size, dispatcher):
    draws = range(20)  # once made with 125, a thousand in all
    found = run_ranks(wrong_draws, world_size, "parcae_moe", dispatcher, draws, timeout_s=240)
    assert found == [[]] * world_size
