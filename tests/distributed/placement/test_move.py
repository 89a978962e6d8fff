"""Moving experts: weights and moments arrive intact, and copies share outputs and gradient sums."""

import random

import pytest
import torch
from dispatch_cases import (
    EXPERTS,
    KINDS,
    dispatcher_of,
    placed_layer,
    run_layer,
    scene_case,
    world,
)
from meshes import meshed, model_on
from row_order import assert_reordered, reordered
from small_model import ODD
from torch import Tensor, nn
from world import run_ranks

from moebius.distributed.dispatch.choose import counters_of
from moebius.distributed.dispatch.expert_map import ExpertMap, contiguous_map
from moebius.distributed.gradients import GradientReducer
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.local_shard import local_shard_of
from moebius.distributed.mesh import build_mesh
from moebius.distributed.placement.balance_load import packed
from moebius.distributed.placement.move import banks_of, expert_maps_of, expert_shard, move_experts
from moebius.distributed.placement.replicas import CopyReducer
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.state import allocate_moments

MODEL = ODD.changed({"feed_forward.expert_bias": True})


def targets(model: nn.Module, number: int) -> dict[str, ExpertMap]:
    """Another expert map for every bank, with 0, 1 or 2 slots more per rank than its share."""
    generator, found = random.Random(number), {}
    for name, expert_map in expert_maps_of(model).items():
        count = expert_map.num_experts
        even = contiguous_map(count, len(expert_map.slots_P)).slots_P
        slots = [min(own + number % 3, count) for own in even]
        found[name] = packed([generator.randint(0, 99) for _ in range(count)], slots)
    return found


def there_and_back(ep: int) -> list[str]:
    """Moves five times and back again; what is wrong after each move."""
    wrong = []
    with meshed(ep=ep) as (_, mesh):
        model = model_on(mesh, MODEL, seed=5)
        whole = Transformer(MODEL)
        initialise(whole, 5)
        optimizer = torch.optim.AdamW(model.parameters())
        allocate_moments(model, optimizer, 0)
        for parameter in model.parameters():  # moments that tell which weight they belong to
            optimizer.state[parameter]["exp_avg"].copy_(parameter.detach() + 1)
            optimizer.state[parameter]["exp_avg_sq"].copy_(parameter.detach() * 2)
        objects, at_start = {id(p) for p in model.parameters()}, expert_maps_of(model)
        moved = 0
        for number in [1, 2, 3, 3, 4, None]:
            expert_map = at_start if number is None else targets(model, number)
            before = expert_maps_of(model)
            took = move_experts(model, optimizer, mesh, expert_map)
            moved += took.experts
            if expert_maps_of(model) != expert_map or (before == expert_map and took.experts):
                wrong.append(f"{number}: expert maps")
            for name, layer in banks_of(model).items():
                for inner, parameter in layer.experts.named_parameters():
                    full = whole.get_parameter(f"{name}.experts.{inner}").detach()
                    state, shard = optimizer.state[parameter], local_shard_of(parameter)
                    ok = shard == expert_shard(
                        tuple(full.shape), expert_map[name], mesh.coordinates.ep
                    )
                    ok &= len(parameter) == expert_map[name].slots_P[mesh.coordinates.ep]
                    for slice_ in shard.slices:
                        value = slice_.copy_from(full)
                        ok &= torch.equal(slice_.view(parameter.detach()), value)
                        ok &= torch.equal(slice_.view(state["exp_avg"]), value + 1)
                        ok &= torch.equal(slice_.view(state["exp_avg_sq"]), value * 2)
                    if not ok:
                        wrong.append(f"{number}: {name}.{inner}")
        assert moved > 10
        assert {id(p) for p in model.parameters()} == objects == {id(p) for p in optimizer.state}
        assert all(len(expert_map.copies) == 0 for expert_map in expert_maps_of(model).values())
        for names, words in (
            (
                {"group.7.attention.value": contiguous_map(15, ep)},
                "no bank 'group.7.attention.value'",
            ),
            ({"group.0.attention.value": contiguous_map(8, ep)}, "15 experts on"),
        ):
            with pytest.raises(ValueError, match=words):
                move_experts(model, optimizer, mesh, names)
    return wrong


@pytest.mark.parametrize("ep", [2, 4])
def test_weights_and_moments_go_together_wherever_they_go(ep: int) -> None:
    assert run_ranks(there_and_back, 4, ep) == [[]] * 4


# Copies that answer.

COPIED = packed([40, 3, 20, 1, 5, 30, 2, 9], (3, 4, 2, 3))  # four slots more than experts
LONE = ExpertMap(
    (2, 5, 0, 4), (10, 0, 2, 3, 4, 7, 8, 9), ((0, 6), (6, 1), (5, 5))
)  # a rank without experts
UNEVEN = ExpertMap((1, 4, 0, 3), (4, 0, 2, 7, 6, 1, 3, 5))
Placed = tuple[ExpertMap, str, str]  # where experts are, scene, kind of routes


def answers(name: str, cases: list[Placed]) -> list[dict[str, Tensor]]:
    """Results of this rank, gradients of the slots after the reduction."""
    found = []
    with world() as (process, group, nodes):
        mesh = build_mesh(plan_layout(MeshConfig(ep=4), 4), process)
        for expert_map, scene, kind in cases:
            layer = placed_layer(expert_map, process.rank)
            layer.dispatcher = dispatcher_of(name, group, nodes, expert_map=expert_map)
            result = run_layer(layer, scene_case(scene, kind, process.rank))
            parameters = dict(layer.experts.named_parameters())
            reducer = GradientReducer([], list(parameters.values()), mesh)
            CopyReducer(reducer, [(expert_map, parameters.values())], mesh).reduce()
            served = counters_of(nn.ModuleDict({"bank": layer}))["bank"].routes_served
            result |= {key: parameter.grad for key, parameter in parameters.items()}
            found.append(result | {"served": torch.tensor(served)})
    return found


def alone(scene: str, kind: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Every rank's results with all experts on one rank, and the sums of the experts' gradients."""
    layer = placed_layer(contiguous_map(EXPERTS, 1), 0)
    results = [run_layer(layer, scene_case(scene, kind, rank)) for rank in range(4)]
    return results, {
        name: torch.stack([own[name] for own in results]).sum(0) for name in ("w_up", "w_down")
    }


def served_by(expert_map: ExpertMap, scene: str, kind: str) -> list[int]:
    """Routes for every rank: to the own copy of an expert, else to the copies in turn."""
    served = [0] * 4
    for source in range(4):
        for expert in scene_case(scene, kind, source).routes.expert_N.tolist():
            served[expert_map.rank_S[expert_map.seen_from(source).slots_E[expert][0]]] += 1
    return served


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["alltoall", "dedup", "allgather", "hierarchical", "symmetric"])
def test_copies_answer_as_the_one_expert_would(name: str) -> None:
    """Wherever it is, for routes of all kinds."""
    cases = [
        (expert_map, scene, "token")
        for expert_map in (COPIED, LONE)
        for scene in ("uneven", "all to one expert", "only one rank has tokens")
    ]
    cases += [(UNEVEN, "uneven", kind) for kind in KINDS]
    by_rank = run_ranks(answers, 4, name, cases)
    bound = reordered(64, 3, torch.float32)  # a copy has some of the expert's rows
    for number, (expert_map, scene, kind) in enumerate(cases):
        (expected, sums), found = alone(scene, kind), [results[number] for results in by_rank]
        assert [own["served"].item() for own in found] == served_by(expert_map, scene, kind)
        for own, wanted in zip(found, expected, strict=True):
            for key in ("y", "x", "gates"):
                assert_reordered(own[key], wanted[key], bound)
        for key, total in sums.items():
            slots = torch.cat([own[key] for own in found])
            for expert, copies in enumerate(expert_map.slots_E):
                assert torch.allclose(
                    slots[copies[0]], total[expert], atol=1e-4 * total.abs().max().item()
                )
                assert all(torch.equal(slots[copies[0]], slots[other]) for other in copies[1:])
