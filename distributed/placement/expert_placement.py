"""Moves experts during training: counts their routes, and rebalances them every n steps.

All ranks decide alike from the loads of the last n = `mesh.rebalance_every` steps. `mesh.replicas`
= r gives every rank r extra slots of each bank, for copies of the hottest experts. A move changes
where sums are computed, not the results. The expert maps and the counts since the last move are
saved with checkpoints, so a resumed run moves what an uninterrupted one would. On another EP degree
a resumed run starts with contiguous blocks.

Cost: one addition per step and kind of router; every n steps one all-reduce of a number per expert,
the packing (balance_load.py) and the move (move.py).

Legend: E experts of a bank, G group members, L depth steps.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.transformer import Transformer
from ..dispatch.expert_map import ExpertMap
from ..layout import MeshConfig
from ..mesh import Mesh
from .balance_load import load_imbalance, rebalanced
from .move import MoveResult, expert_maps_of, move_experts
from .replicas import make_reducer

# The banks of a layer behind each kind of router.
_BANKS = {
    "feed_forward": ("feed_forward.sparse",),
    "value": ("attention.value",),
    "output": ("attention.output",),
    "attention": ("attention.query", "attention.output"),
}


@dataclass(frozen=True)
class RebalanceResult:
    """Reports one rebalancing.

    The imbalance is the hottest rank's counted load over the mean of all ranks, in the bank where
    that is largest.
    """

    hottest_before: float
    hottest_after: float
    moved_experts: int
    moved_bytes: int
    seconds: float


class ExpertPlacement:
    """Decides which rank stores which expert, from the load since the last decision.

    `reducer` sums the experts' gradients where they currently are.
    """

    def __init__(
        self, config: MeshConfig, model: Transformer, optimizer: torch.optim.Optimizer, mesh: Mesh
    ) -> None:
        self._config, self._model, self._optimizer, self._mesh = config, model, optimizer, mesh
        self._routed = sorted((member, kind) for member, kind, _ in model.routers())
        self.active = config.rebalance_every > 0 and mesh.layout.ep > 1
        self._loads = self._no_loads() if self.active else {}
        self.reducer = make_reducer(model, mesh)

    def count(self, loads: Mapping[str, Tensor]) -> None:
        """Counts one step's routes of this rank.

        `loads` are (L, E) by kind of router, over the depth steps that have it.
        """
        if not self.active:
            return
        schedule = [step.member for step in self._model.config.load_steps]
        for kind, load_LE in loads.items():
            members = [member for member in schedule if (member, kind) in self._routed]
            index_L = torch.tensor(members, device=load_LE.device)
            self._loads[kind].index_add_(0, index_L, load_LE)

    def decide(self, step: int) -> RebalanceResult | None:
        """Rebalances the experts after every n-th step, a collective call; otherwise returns
        None.
        """
        if not self.active or step % self._config.rebalance_every:
            return None
        started_s = time.perf_counter()
        before = expert_maps_of(self._model)
        loads = self._all_loads()
        after = {
            name: rebalanced(before[name], load_E, replicas=self._config.replicas)
            for name, load_E in loads.items()
        }
        moved = self._move(after)
        self._loads = self._no_loads()
        return RebalanceResult(
            hottest_before=_worst_imbalance(before, loads),
            hottest_after=_worst_imbalance(after, loads),
            moved_experts=moved.experts,
            moved_bytes=moved.num_bytes,
            seconds=time.perf_counter() - started_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the placement and the counts for a checkpoint's meta.

        A collective call if experts move.
        """
        if not self.active:
            return {}
        loads = self._all_loads()
        return {
            name: {"homes": expert_map.as_dict(), "load": loads[name]}
            for name, expert_map in expert_maps_of(self._model).items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Moves the experts to their saved places, before their values are read.

        A collective call if experts move.

        Raises:
            ValueError: the checkpoint is of another model; on all ranks.
        """
        if not self.active:
            return
        self._loads = self._no_loads()
        if not saved:
            return
        self._check_saved(saved)
        expert_maps = {name: ExpertMap.from_dict(bank["homes"]) for name, bank in saved.items()}
        if all(len(own.slots_P) == self._mesh.layout.ep for own in expert_maps.values()):
            self._move(expert_maps)
        if self._mesh.rank == 0:  # the sum over all ranks; only their total matters
            for member, kind in self._routed:
                load_E = saved[_bank_names(member, kind)[0]]["load"]
                self._loads[kind][member] = torch.tensor(load_E)

    def _move(self, expert_maps: Mapping[str, ExpertMap]) -> MoveResult:
        """Moves the experts and rebuilds the reducer for them; a collective call."""
        moved = move_experts(self._model, self._optimizer, self._mesh, expert_maps)
        self.reducer = make_reducer(self._model, self._mesh)
        return moved

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another model, before any rank moves or keeps anything."""
        ours = {
            name: expert_map.num_experts for name, expert_map in expert_maps_of(self._model).items()
        }
        theirs = {name: len(bank["load"]) for name, bank in saved.items()}
        if unlike := sorted(
            name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)
        ):
            listed = ", ".join(
                f"{name}: {theirs.get(name, 0)} saved, {ours.get(name, 0)} here"
                for name in unlike[:3]
            )
            raise ValueError(
                "the checkpoint's experts differ from this model's "
                f"({listed}{', …' if unlike[3:] else ''}): it is of another model; continue it with "
                "the configuration that it was saved with"
            )

    def _all_loads(self) -> dict[str, list[int]]:
        """Sums the routes of every bank's experts since the last decision over all ranks.

        A collective call.
        """
        flat = torch.cat([loads_GE.flatten() for loads_GE in self._loads.values()])
        dist.all_reduce(flat, group=self._mesh.world_group)
        parts = flat.cpu().split([loads_GE.numel() for loads_GE in self._loads.values()])
        summed = {
            kind: part.view_as(self._loads[kind])
            for kind, part in zip(self._loads, parts, strict=True)
        }
        return {
            name: summed[kind][member].tolist()
            for member, kind in self._routed
            for name in _bank_names(member, kind)
        }

    def _no_loads(self) -> dict[str, Tensor]:
        """Returns zero counts, (G, E) for every kind of router."""
        expert_maps, device = expert_maps_of(self._model), next(self._model.parameters()).device
        return {
            kind: torch.zeros(
                len(self._model.group),
                expert_maps[_bank_names(member, kind)[0]].num_experts,
                dtype=torch.int64,
                device=device,
            )
            for member, kind in self._routed
        }


def _worst_imbalance(expert_maps: Mapping[str, ExpertMap], loads: Mapping[str, list[int]]) -> float:
    """Returns the load imbalance of the worst bank."""
    return max(load_imbalance(expert_maps[name], load_E) for name, load_E in loads.items())


def _bank_names(member: int, kind: str) -> list[str]:
    return [f"group.{member}.{suffix}" for suffix in _BANKS[kind]]
