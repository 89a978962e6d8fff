"""Ranks whose sequences have other depths make the same exchanges, and nobody waits for ever."""

import random

import pytest
import torch
from family import VOCABULARY, make_uneven, tiny_config, tiny_model
from world import run_ranks

from moebius.distributed.layout import MeshConfig, local_experts, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model, expert_names
from moebius.distributed.process.process import start_process
from moebius.model.loops.depth import PassDepth

SEQUENCES, POSITIONS, MOST = 2, 5, 6
CHANGES = {"feed_forward.num_experts": 8}


def depths_of_draw(draw: int, world_size: int) -> list[tuple[int, ...]]:
    """By rank. Every third draw has a rank whose sequences are done after one loop."""
    numbers = random.Random(draw)
    by_rank = [tuple(numbers.randint(1, MOST) for _ in range(SEQUENCES)) for _ in range(world_size)]
    if draw % 3 == 0:
        by_rank[numbers.randrange(world_size)] = (1,) * SEQUENCES
    return by_rank


def wrong_draws(recipe: str, dispatcher: str, draws: range) -> list[int]:
    """The draws in which this rank's loss is not what one process computes.

    With `alltoall`, which adds in the same order, to the bit.
    """
    with start_process("cpu", timeout_s=60) as process:
        mesh = build_mesh(
            plan_layout(MeshConfig(ep=process.world_size), process.world_size), process
        )
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
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                own = start[key]
                if key in sharded:
                    block = local_experts(mesh.layout, mesh.rank, len(own))
                    own = own[block.start : block.stop]
                parameter.copy_(own)
        loops, wrong = model.config.loops, []
        for draw in draws:
            by_rank = depths_of_draw(draw, process.world_size)
            every = [depth for depths in by_rank for depth in depths]
            first = max(map(loops.first_with_gradient, every))
            kept = max(depth - loops.first_with_gradient(depth) for depth in every)
            depth = PassDepth(first + kept, first, by_rank[mesh.rank], loops.gradient_loops)
            generator = torch.Generator().manual_seed(100 * draw + mesh.rank)
            rows = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)
            losses = []
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
