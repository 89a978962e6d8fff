"""Loop programs give the same losses and gradients on any number of ranks, and nobody waits for ever.

The ranks' sequences have other depths, where a program allows it.
"""

import random

import pytest
import torch
from family import LEAVING, PROGRAMS, VOCABULARY, own_depths, program, set_options
from meshes import meshed, model_on
from row_order import reordered_pass
from torch import Tensor
from world import run_ranks

from moebius.distributed.gradients import GradientReducer, parameters_to_reduce
from moebius.distributed.layout import local_experts
from moebius.distributed.mesh import Mesh
from moebius.distributed.parallelize import expert_names
from moebius.model.loops.exits import ExitRule
from moebius.model.transformer import Transformer

SEQUENCES, POSITIONS, MOST = 2, 5, 6


def depths_of_draw(draw: int, world_size: int) -> list[tuple[int, ...]]:
    """By rank. Every third draw has a rank whose sequences are done after one loop."""
    numbers = random.Random(draw)
    by_rank = [tuple(numbers.randint(1, MOST) for _ in range(SEQUENCES)) for _ in range(world_size)]
    if draw % 3 == 0:
        by_rank[numbers.randrange(world_size)] = (1,) * SEQUENCES
    return by_rank


def own_experts(mesh: Mesh, whole: Tensor, *, is_sharded: bool) -> Tensor:
    """This rank's block of an expert tensor, or another tensor as it is."""
    if not is_sharded:
        return whole
    block = local_experts(mesh.layout, mesh.rank, len(whole))
    return whole[block.start : block.stop]


@torch.no_grad()
def sharded(mesh: Mesh, whole: Transformer, dispatcher: str) -> Transformer:
    """The same weights with this rank's experts."""
    stored = whole.embedding.dtype
    model = model_on(mesh, whole.config, dispatcher=dispatcher, stored=stored)
    banks, start = expert_names(model), whole.state_dict()
    for key, parameter in model.named_parameters():
        parameter.copy_(own_experts(mesh, start[key], is_sharded=key in banks))
    return model


def rows_of(draw: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * draw + rank)
    return torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=generator)


def loss_of(model: Transformer, draw: int, rank: int) -> Tensor:
    """A step's loss with its gradients."""
    model.zero_grad()
    rows = rows_of(draw, rank)
    torch.manual_seed(draw)
    output = model(rows[:, :-1], targets_BS=rows[:, 1:])
    loss = output.cross_entropy + output.regularisation_B.sum()
    loss.backward()
    return loss.detach()


def far_gradients(mesh: Mesh, model: Transformer, whole: Transformer) -> list[str]:
    """Names of parameters whose gradient over all ranks is not that of whole models.

    Sums over ranks have another order, so they differ by rounding.
    """
    GradientReducer(*parameters_to_reduce(model), mesh).reduce()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole.parameters()]
    total = torch.cat([grad.flatten() for grad in grads])
    torch.distributed.all_reduce(total)
    banks, far = expert_names(model), []
    parts = total.split([grad.numel() for grad in grads])
    for (name, parameter), part in zip(model.named_parameters(), parts, strict=True):
        expected = part.view(-1, *parameter.shape[1:])
        expected = own_experts(mesh, expected, is_sharded=name in banks)
        assert parameter.grad is not None
        if (parameter.grad - expected).norm() > 1e-12 * part.norm():
            far.append(name)
    return far


def faults(ep: int, names: tuple[str, ...], dispatcher: str, draws: range) -> list[str]:
    """Losses and gradients that are not what one process computes of the same rows."""
    found, tolerance = [], 1e-12
    with meshed(ep=ep) as (process, mesh):
        for name in names:
            whole = program(name)
            model = sharded(mesh, whole, dispatcher)
            for draw in draws if name in LEAVING else draws[:1]:
                if name in LEAVING:
                    by_rank = depths_of_draw(draw, process.world_size)
                    every = tuple(depth for depths in by_rank for depth in depths)
                    depth = own_depths(model, *by_rank[process.rank], others=every)
                    set_options(model, depth=depth)
                    set_options(whole, depth=depth)
                loss, expected = (loss_of(each, draw, process.rank) for each in (model, whole))
                if not torch.allclose(loss, expected, rtol=tolerance, atol=0):
                    found.append(f"{name}, draw {draw}: loss")
                far = far_gradients(mesh, model, whole)
                found += [f"{name}, draw {draw}: {parameter}" for parameter in far]
    return found


@torch.no_grad()
def exits_of_rank(name: str, thresholds: tuple[float, ...]) -> tuple[list[float], bool]:
    """This rank's loops under its own rule, and whether one process has the same logits."""
    with meshed(ep=len(thresholds)) as (process, mesh):
        rows, outputs, whole = rows_of(0, process.rank), [], program(name)
        for model in (sharded(mesh, whole, "alltoall"), whole):
            set_options(model.eval(), exit_rule=ExitRule("state", thresholds[process.rank]))
            outputs.append(model(rows))
        found, expected = outputs
        close = {"rtol": 0, "atol": reordered_pass(whole) * expected.logits_BSV.abs().max().item()}
        same = torch.allclose(found.logits_BSV, expected.logits_BSV, **close)
        return found.auxiliary["loops"].tolist(), same


def test_ranks_whose_sequences_have_all_left_take_part_to_the_end():
    found = run_ranks(exits_of_rank, 4, "linear from the embedding", (1e9, 1e-9, 1e9, 0.7))
    assert [same for _, same in found] == [True] * 4
    assert [loops for loops, _ in found[:3]] == [[1, 1], [4, 4], [1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "ep"),
    [
        *[(2, 1), (2, 2), (4, 4)],
        pytest.param(8, 8, marks=pytest.mark.nightly),
    ],
)
def test_ranks_agree_with_one_process(world_size, ep):
    found = run_ranks(faults, world_size, ep, tuple(PROGRAMS), "alltoall", range(2), timeout_s=240)
    assert found == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dispatcher"), [(2, "symmetric"), (4, "alltoall"), (8, "symmetric")]
)
def test_every_draw_ends(world_size, dispatcher):
    words = (world_size, ("decay, one gradient",), dispatcher, range(125))
    assert run_ranks(faults, world_size, *words, timeout_s=900) == [[]] * world_size
