"""Experts on their way: weights and moments arrive whole, copies answer as one, gradients of copies
are one sum.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import outbox_for
from dispatch_scenes import EXPERTS, SCENES, bank, forward_backward, parts
from torch import Tensor, nn
from world import run_ranks

from moebius.distributed.dispatch.base import build_node_groups
from moebius.distributed.dispatch.choose import counters_of, make_dispatcher
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
from moebius.model.moe import SparseLayer
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


def placed_layer(expert_map: ExpertMap, rank: int) -> SparseLayer:
    """This rank's slots of the bank."""
    experts = [expert_map.expert_S[slot] for slot in expert_map.own_slots(rank)]
    whole, own = bank(torch.float32), bank(torch.float32, 0, len(experts))
    with torch.no_grad():
        for parameter, full in zip(own.parameters(), whole.parameters(), strict=True):
            parameter.copy_(full[experts])
    return SparseLayer(own)  # pyright: ignore[reportArgumentType]


def answers(
    name: str, cases: list[tuple[ExpertMap, str]], order: list[int] | None = None
) -> list[dict[str, Tensor]]:
    """Results of this rank, gradients of the slots after the reduction; experts renumbered by
    `order`.
    """
    with meshed(4) as mesh:
        nodes = (
            build_node_groups(mesh.ep_group, 2, timeout_s=20) if name == "hierarchical" else None
        )
        outbox = outbox_for(name, mesh.ep_group)
        labels, found = torch.tensor(order or list(range(EXPERTS))), []
        for expert_map, scene in cases:
            layer, seen = (
                placed_layer(expert_map, mesh.rank),
                relabelled(expert_map, order) if order else expert_map,
            )
            layer.dispatcher = make_dispatcher(
                name, mesh.ep_group, expert_map=seen, nodes=nodes, outbox=outbox
            )
            x, experts, weights, grad = parts(SCENES[scene], torch.float32)[mesh.rank]
            result = forward_backward(layer, x, labels[experts], weights, grad)
            parameters = dict(layer.experts.named_parameters())
            CopyReducer(
                GradientReducer([], list(parameters.values()), mesh),
                [(seen, parameters.values())],
                mesh,
            ).reduce()
            served = torch.tensor(counters_of(nn.ModuleDict({"bank": layer}))["bank"].routes_served)
            found.append(
                result
                | {key: parameter.grad for key, parameter in parameters.items()}
                | {"served": served}
            )
        return found


def relabelled(expert_map: ExpertMap, order: list[int]) -> ExpertMap:
    """The same slots for experts with other numbers."""
    slots = [expert_map.slots_E[order.index(expert)] for expert in range(EXPERTS)]
    copies = tuple((expert, slot) for expert, own in enumerate(slots) for slot in own[1:])
    return ExpertMap(expert_map.slots_P, tuple(own[0] for own in slots), copies)


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


def test_names_of_experts_mean_nothing() -> None:
    """Experts renumbered, in routes and expert map alike: every bit stays."""
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    cases = [
        (contiguous_map(EXPERTS, 4), "uneven"),
        (ExpertMap((2, 2, 2, 2), (6, 1, 3, 0, 7, 5, 2, 4)), "uneven"),
    ]
    straight, renamed = (run_ranks(answers, 4, "alltoall", cases, each) for each in (None, order))
    for rank in range(4):
        for one, other in zip(straight[rank], renamed[rank], strict=True):
            assert one.keys() == other.keys()
            assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_names_of_ranks_mean_nothing() -> None:
    """The ranks' blocks of slots exchanged: outputs and the gradient of every expert keep every
    bit.
    """
    order, first = [2, 0, 3, 1], ExpertMap((3, 1, 2, 2), (6, 1, 3, 0, 7, 5, 2, 4))
    slots = [slot for rank in order for slot in first.own_slots(rank)]
    second = ExpertMap(
        tuple(first.slots_P[rank] for rank in order),
        tuple(slots.index(slot) for slot in first.slot_E or ()),
    )
    by_rank = run_ranks(answers, 4, "alltoall", [(first, "uneven"), (second, "uneven")])
    for one, other in by_rank:
        assert [key for key in ("y", "x", "gates") if not torch.equal(one[key], other[key])] == []
    for key in ("w_up", "w_down"):
        one, other = (torch.cat([results[number][key] for results in by_rank]) for number in (0, 1))
        assert torch.equal(one[list(first.slot_E or ())], other[list(second.slot_E or ())])


def test_every_rank_without_copies_reduces_as_before() -> None:
    assert run_ranks(nothing_shared, 2) == [True, True]


def nothing_shared() -> bool:
    with meshed(2) as mesh:
        parameter = nn.Parameter(torch.ones(2, 3))
        parameter.grad = torch.full((2, 3), float(mesh.rank))
        CopyReducer(
            GradientReducer([], [parameter], mesh), [(contiguous_map(4, 2), [parameter])], mesh
        ).reduce()
        return bool((parameter.grad == mesh.rank).all()) and dist.get_world_size() == 2
