"""Moving experts: weights and moments arrive intact, and copies share outputs and gradient sums."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from dispatch_cases import dispatcher_of, placed_layer, world
from dispatch_scenes import EXPERTS, SCENES, forward_backward, parts
from torch import Tensor, nn
from world import run_ranks

from moebius.distributed.dispatch.choose import counters_of
from moebius.distributed.dispatch.expert_map import ExpertMap, contiguous_map
from moebius.distributed.gradients import GradientReducer
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.local_shard import local_shard_of
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.placement.balance_load import packed
from moebius.distributed.placement.move import banks_of, expert_maps_of, expert_shard, move_experts
from moebius.distributed.placement.replicas import CopyReducer
from moebius.distributed.process.process import start_process
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.train.state import allocate_moments

MODEL = ModelConfig(
    vocab_size=31,
    d_model=12,
    num_layers=2,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=6, num_experts=3, top_k=1),
    feed_forward=ExpertsConfig(
        num_experts=7, router=SigmoidConfig(top_k=2), d_expert=8, expert_bias=True
    ),
)


@contextmanager
def meshed(ep: int) -> Iterator[Mesh]:
    with start_process("cpu", timeout_s=30) as process:
        yield build_mesh(plan_layout(MeshConfig(ep=ep), process.world_size), process)


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
    with meshed(ep) as mesh:
        model = build_model(
            MODEL, mesh, dispatcher="auto", backend="auto", seed=5, device=torch.device("cpu")
        )
        whole = Transformer(MODEL)
        initialise(whole, 5)
        optimizer = torch.optim.AdamW(model.parameters())
        allocate_moments(model, optimizer)
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
                {"group.7.attention.value": contiguous_map(6, ep)},
                "no bank 'group.7.attention.value'",
            ),
            ({"group.0.attention.value": contiguous_map(8, ep)}, "6 experts on"),
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


def answers(name: str, cases: list[tuple[ExpertMap, str]]) -> list[dict[str, Tensor]]:
    """Results of this rank, gradients of the slots after the reduction."""
    found = []
    with world() as (process, group, nodes):
        mesh = build_mesh(plan_layout(MeshConfig(ep=4), 4), process)
        for expert_map, scene in cases:
            layer = placed_layer(expert_map, process.rank)
            layer.dispatcher = dispatcher_of(name, group, nodes, expert_map=expert_map)
            result = forward_backward(layer, *parts(SCENES[scene], torch.float32)[process.rank])
            parameters = dict(layer.experts.named_parameters())
            reducer = GradientReducer([], list(parameters.values()), mesh)
            CopyReducer(reducer, [(expert_map, parameters.values())], mesh).reduce()
            served = counters_of(nn.ModuleDict({"bank": layer}))["bank"].routes_served
            result |= {key: parameter.grad for key, parameter in parameters.items()}
            found.append(result | {"served": torch.tensor(served)})
    return found


def alone(scene: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Every rank's results with all experts on one rank, and the sums of the experts' gradients."""
    at_start = contiguous_map(EXPERTS, 1)
    results = [
        forward_backward(placed_layer(at_start, 0), *given)
        for given in parts(SCENES[scene], torch.float32)
    ]
    return results, {
        name: torch.stack([own[name] for own in results]).sum(0) for name in ("w_up", "w_down")
    }


def served_by(expert_map: ExpertMap, scene: str) -> list[int]:
    """Routes for every rank: to the own copy of an expert, else to the copies in turn."""
    served = [0] * 4
    for source, (_, experts, _, _) in enumerate(parts(SCENES[scene], torch.float32)):
        for expert in experts.flatten().tolist():
            served[expert_map.rank_S[expert_map.seen_from(source).slots_E[expert][0]]] += 1
    return served


@pytest.mark.parametrize("name", ["alltoall", "dedup", "allgather", "hierarchical", "symmetric"])
def test_copies_answer_as_the_one_expert_would(name: str) -> None:
    cases = [
        (expert_map, scene)
        for expert_map in (COPIED, LONE)
        for scene in ("uneven", "all to one expert", "only one rank has tokens")
    ]
    by_rank = run_ranks(answers, 4, name, cases)
    for number, (expert_map, scene) in enumerate(cases):
        (expected, sums), found = alone(scene), [results[number] for results in by_rank]
        assert [own["served"].item() for own in found] == served_by(expert_map, scene)
        for own, wanted in zip(found, expected, strict=True):
            for key in ("y", "x", "gates"):
                exact = name == "alltoall"
                same = (
                    torch.equal(own[key], wanted[key])
                    if exact
                    else torch.allclose(own[key], wanted[key], atol=1e-5)
                )
                assert same, (scene, key)
        for key, total in sums.items():
            slots = torch.cat([own[key] for own in found])
            for expert, copies in enumerate(expert_map.slots_E):
                assert torch.allclose(
                    slots[copies[0]], total[expert], atol=1e-4 * total.abs().max().item()
                )
                assert all(torch.equal(slots[copies[0]], slots[other]) for other in copies[1:])
