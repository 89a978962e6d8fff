"""Copies of a rank's state in memory, from which it goes on when another rank has died.

Every `job.snapshot_every` steps, at a step boundary, each rank copies its weights, moments and
counts, and where nobody else has its experts (sharing.py) it sends these to its buddy. Two snapshots
are kept: while one is being made, on one rank earlier than on another, all ranks still have the
one before. No rank can be a whole interval ahead, for every step has collectives of all.

Cost: memory of two copies of the rank's weights and moments (24 bytes per parameter in float32,
and as much again for a ward's experts); per snapshot one copy, and over the network the experts
where they have a buddy. docs/cluster.md has measured figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...data_pipeline.read.loader import Loader
from ...distributed.local_shard import LocalShard
from ...distributed.placement.move import expert_maps_of
from ...distributed.process.json_messages import all_gather_json
from ..run import Run, state_meta
from ..spikes.record import from_values
from ..state import TrainingProgress, set_updates, state_tensors
from .sharing import RestorePlan, Sharing, plan_restore


@dataclass
class _Snapshot:
    """The state at one step; the memory is used again."""

    step: int | None = None  # None: not whole
    own: dict[str, Tensor] = field(default_factory=dict)
    ward: dict[str, Tensor] = field(default_factory=dict)  # the experts of another rank
    meta: dict[str, Any] = field(default_factory=dict)


class Snapshots:
    """The two newest snapshots of one rank."""

    def __init__(self, sharing: Sharing, *, every: int) -> None:
        self._sharing, self._every = sharing, every
        self._slots = [_Snapshot(), _Snapshot()]

    def take_if_due(self, run: Run, loader: Loader) -> None:
        """Takes a snapshot every so many steps; a collective call after these."""
        if run.progress.step % self._every == 0:
            self.take(run, loader)

    def take(self, run: Run, loader: Loader) -> None:
        """Copies the state in place of the older snapshot; a collective call."""
        slot = min(self._slots, key=lambda each: -1 if each.step is None else each.step)
        slot.step = None
        tensors, shards = state_tensors(run.model, run.optimizer)
        slot.own = {name: _copied(tensor, slot.own.get(name)) for name, tensor in tensors.items()}
        if self._sharing.needs_buddies:
            slot.ward = self._exchange(run, slot, shards)
        slot.meta = {**state_meta(run, loader), "skipped_in_a_row": run.skipped_in_a_row}
        slot.step = run.progress.step
        # the older one: other ranks may have no newer one yet
        loader.keep_from(
            min(each.meta["progress"]["samples"] for each in self._slots if each.step is not None)
        )

    def plan(self, run: Run, lost: tuple[int, ...]) -> RestorePlan | None:
        """Returns the way back that all ranks agree on; a collective call."""
        own = [slot.step for slot in self._slots if slot.step is not None]
        steps = all_gather_json(own, run.mesh.world_group)
        return plan_restore(dict(enumerate(steps)), lost, self._sharing)

    def restore(self, run: Run, plan: RestorePlan, lost: tuple[int, ...]) -> dict[str, Any]:
        """Takes back the state as planned; returns its position in the data. A collective call."""
        slot = next((each for each in self._slots if each.step == plan.step), _Snapshot())
        told = slot.meta if run.process.rank == plan.whole_from else None
        meta = all_gather_json(told, run.mesh.world_group)[plan.whole_from]
        run.expert_placement.lay_out(meta["experts"])
        tensors, shards = state_tensors(run.model, run.optimizer)
        if run.process.rank not in lost:
            for name, tensor in tensors.items():
                tensor.detach().copy_(slot.own[name])
        for rank in sorted(lost):
            self._hand_over(run, rank, plan, slot, tensors, shards)
        run.progress = TrainingProgress(**meta["progress"])
        run.rollbacks = from_values(meta["rollbacks"])
        if run.spikes is not None:
            run.spikes.restore(meta["spikes"])
        run.skipped_in_a_row = meta["skipped_in_a_row"]
        set_updates(run.model, run.optimizer, run.progress.updates)
        self.forget_all_but(plan.step)
        return meta["data"]

    def forget_all_but(self, step: int | None) -> None:
        """Forgets the snapshots of other steps."""
        for slot in self._slots:
            if slot.step != step:
                slot.step = None

    def _exchange(
        self, run: Run, slot: _Snapshot, shards: Mapping[str, LocalShard]
    ) -> dict[str, Tensor]:
        """Sends this rank's experts to its buddy; returns those of its ward."""
        rank, group = run.process.rank, run.mesh.world_group
        ward, buddy = self._sharing.ward_of(rank), self._sharing.buddy_of(rank)
        slots = {
            name: expert_map.slots_P[ward % self._sharing.ep]
            for name, expert_map in expert_maps_of(run.model).items()
        }
        received, pending = {}, []
        for name in _expert_tensors(shards):
            own, layer = slot.own[name], next(each for each in slots if f".{each}.experts." in name)
            received[name] = _room(slot.ward.get(name), (slots[layer], *own.shape[1:]), own.dtype)
            pending.append(dist.irecv(received[name], ward, group=group))
            pending.append(dist.isend(own, buddy, group=group))
        for work in pending:
            if work is not None:
                work.wait()
        return received

    def _hand_over(
        self,
        run: Run,
        lost: int,
        plan: RestorePlan,
        slot: _Snapshot,
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, LocalShard],
    ) -> None:
        """Gives a rank without memory its state: two ranks send, and it receives."""
        rank, group = run.process.rank, run.mesh.world_group
        experts = _expert_tensors(shards)
        whole = sorted(set(tensors) - set(experts))
        holder = plan.experts_from[lost]
        held = slot.ward if self._sharing.needs_buddies else slot.own
        for names, source, kept in ((whole, plan.whole_from, slot.own), (experts, holder, held)):
            for name in names:
                if rank == source:
                    dist.send(kept[name], lost, group=group)
                elif rank == lost:
                    arrived = torch.empty_like(tensors[name], device="cpu")
                    dist.recv(arrived, source, group=group)
                    tensors[name].detach().copy_(arrived)


def _expert_tensors(shards: Mapping[str, LocalShard]) -> list[str]:
    """Returns the names of what ranks of an EP group do not store alike."""
    return sorted(name for name, shard in shards.items() if shard.ranks_per_copy > 1)


@torch.no_grad()
def _copied(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Returns a copy in main memory, in the place of an earlier one where that fits."""
    copy = _room(before, tuple(tensor.shape), tensor.dtype)
    return copy.copy_(tensor)


def _room(before: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if before is not None and (tuple(before.shape), before.dtype) == (shape, dtype):
        return before
    return torch.empty(shape, dtype=dtype)
