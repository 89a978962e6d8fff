"""Moves experts to other slots, with their moments, by all-to-all inside every EP group.

Parameters remain the same objects, so references to them stay valid; their data is replaced and
resized with the number of slots. Gradients are dropped, because experts move between two steps. A new
copy of an expert inherits the moments, so copies that receive equal gradients stay equal.

A bank's expert map is stored only in its dispatcher.

Cost: three times the bytes of the experts that change rank, sent once, and memory for one bank's
tensor at a time.

Legend: S slots, P ranks of an EP group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...model.moe import SparseLayer
from ..dispatch.base import ExpertParallelDispatcher
from ..dispatch.expert_map import ExpertMap, contiguous_map
from ..local_shard import LocalShard, Slice, local_shard_of, set_local_shard
from ..mesh import Mesh


@dataclass(frozen=True)
class MoveResult:
    """The cost of a move, in each EP group."""

    experts: int = 0  # slots filled from another rank
    num_bytes: int = 0  # sent between ranks

    def __add__(self, other: "MoveResult") -> "MoveResult":
        return MoveResult(self.experts + other.experts, self.num_bytes + other.num_bytes)


def banks_of(model: nn.Module) -> dict[str, SparseLayer]:
    """Returns a model's sparse layers, each with a bank of experts, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, SparseLayer)}


def expert_maps_of(model: nn.Module) -> dict[str, ExpertMap]:
    """Returns the current expert map of every bank by its layer's name."""
    return {name: _expert_map_of(layer) for name, layer in banks_of(model).items()}


def expert_shard(shape: tuple[int, ...], expert_map: ExpertMap, ep_rank: int) -> LocalShard:
    """Returns a rank's shard of a bank's parameter with that global shape."""
    inner, zeros = shape[1:], (0,) * len(shape[1:])
    slices = [
        Slice((piece.expert, *zeros), (piece.length, *inner), (piece.slot, *zeros), piece.is_first)
        for piece in expert_map.ranges_of(ep_rank)
    ]
    return LocalShard(tuple(shape), tuple(slices), len(expert_map.slots_P), has_experts=True)


@torch.no_grad()
def move_experts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    expert_maps: Mapping[str, ExpertMap],
) -> MoveResult:
    """Moves experts to match new maps, which must be equal on every rank. Collective.

    Args:
        model: the model whose banks change.
        optimizer: its moments move with the weights.
        mesh: provides the EP group.
        expert_maps: new maps by layer name; other banks stay unchanged.

    Raises:
        ValueError: a map does not fit its bank or the EP group; nothing is moved.
    """
    banks, before = banks_of(model), expert_maps_of(model)
    for name, new in expert_maps.items():
        _check(name, before.get(name), new)
    total = MoveResult()
    for name, new in expert_maps.items():
        layer = banks[name]
        if new == before[name] or not isinstance(layer.dispatcher, ExpertParallelDispatcher):
            continue
        plan = _MovePlan(before[name], new, mesh.ep_group)
        for parameter in layer.experts.parameters():
            total += _move(parameter, optimizer, plan)
        total += MoveResult(plan.num_received)
        layer.dispatcher = layer.dispatcher.with_expert_map(new)
    return total


def _move(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, plan: "_MovePlan"
) -> MoveResult:
    """Moves the experts of one parameter and their moments."""
    shape, global_shape = parameter.shape, local_shard_of(parameter).global_shape
    state = optimizer.state.get(parameter, {})
    moments = [
        key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape
    ]
    expert_bytes = parameter[:1].numel() * parameter.element_size() * (1 + len(moments))
    parameter.grad = None
    parameter.data = plan.exchange(parameter.data)
    for key in moments:
        state[key] = plan.exchange(state[key])
    set_local_shard(parameter, expert_shard(global_shape, plan.new, plan.rank))
    return MoveResult(0, expert_bytes * plan.num_received)


class _MovePlan:
    """The slots that a rank sends and receives, by partner.

    A slot is filled from the rank's own old copy of the expert, else from the one that served it.
    """

    def __init__(self, old: ExpertMap, new: ExpertMap, group: dist.ProcessGroup) -> None:
        self.new, self.group, self.rank = new, group, group.rank()
        seen = [old.seen_from(rank).slots_E for rank in range(group.size())]
        source_S = [
            None if expert is None else seen[rank][expert][0]
            for rank, expert in zip(new.rank_S, new.expert_S, strict=True)
        ]
        slots = [(slot, source) for slot, source in enumerate(source_S) if source is not None]
        self.num_received = sum(new.rank_S[slot] != old.rank_S[source] for slot, source in slots)
        own_old, own_new = old.own_slots(self.rank), new.own_slots(self.rank)
        sent = [
            (new.rank_S[slot], source - own_old.start)
            for slot, source in slots
            if source in own_old
        ]
        received = sorted(
            (old.rank_S[source], slot - own_new.start) for slot, source in slots if slot in own_new
        )
        self.sent_slots = [slot for _, slot in sent]
        self.received_slots = [slot for _, slot in received]
        self.sent = _count_by_rank(sent, group.size())
        self.received = _count_by_rank(received, group.size())

    def exchange(self, rows: Tensor) -> Tensor:
        """Moves rows, one per slot, from old to new slots; empty slots get zeros. Collective."""
        arrived = rows.new_empty(len(self.received_slots), *rows.shape[1:])
        dist.all_to_all_single(
            arrived, rows[self.sent_slots].contiguous(), self.received, self.sent, group=self.group
        )
        placed = rows.new_zeros(self.new.slots_P[self.rank], *rows.shape[1:])
        placed[self.received_slots] = arrived
        return placed


def _count_by_rank(pairs: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """Counts the pairs (rank, slot) of every rank."""
    return [sum(partner == rank for partner, _ in pairs) for rank in range(num_ranks)]


def _expert_map_of(layer: SparseLayer) -> ExpertMap:
    num_experts = local_shard_of(next(layer.experts.parameters())).global_shape[0]
    if not isinstance(layer.dispatcher, ExpertParallelDispatcher):
        return contiguous_map(num_experts, 1)
    setup = layer.dispatcher.setup
    return setup.expert_map or contiguous_map(num_experts, setup.group.size())


def _check(name: str, old: ExpertMap | None, new: ExpertMap) -> None:
    if old is None:
        raise ValueError(f"there is no bank {name!r} of experts in this model")
    if (old.num_experts, len(old.slots_P)) != (new.num_experts, len(new.slots_P)):
        raise ValueError(
            f"{name} has {old.num_experts} experts on {len(old.slots_P)} ranks, but the new map is "
            f"for {new.num_experts} on {len(new.slots_P)}"
        )
