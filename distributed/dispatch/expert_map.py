"""The placement of experts: a table from experts to slots, and from slots to ranks.

Slots are numbered rank by rank. Without a table, expert e is in slot e. Dispatchers know experts only
by their slots, so any placement, uneven or with replicas of hot experts, changes only this table.

An expert with several slots is served by the replica on the source's own rank, else by its replicas
in turn over the source ranks. Every rank therefore sees one slot per expert (`seen_from`), which
depends only on the table.

Legend: E experts, S slots, P ranks, N routes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..layout import expert_blocks


@dataclass(frozen=True)
class SlotTables:
    """An expert map as tensors on a device."""

    rank_S: Tensor
    local_S: Tensor  # the slot's index on its rank
    slot_E: Tensor | None


@dataclass(frozen=True)
class ExpertAddresses:
    """Rank and slot of every expert, as int32 tensors on a device."""

    rank_E: Tensor
    slot_E: Tensor  # the slot's index on that rank


@dataclass(frozen=True)
class ExpertRange:
    """Consecutive experts in consecutive slots of one rank."""

    expert: int
    slot: int  # index on the rank
    length: int
    is_first: bool  # the expert's first slot, which is counted and saved; replicas are not


@dataclass(frozen=True)
class ExpertMap:
    """A table from experts to slots, and from slots to ranks.

    Rank p has `slots_P[p]` slots. Expert e is in slot `slot_E[e]`, or in slot e if that is None.
    `copies` lists further slots of experts as (expert, slot). All other slots are empty.
    """

    slots_P: tuple[int, ...]
    slot_E: tuple[int, ...] | None = None
    copies: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        named = [*(self.slot_E or ()), *(slot for _, slot in self.copies)]
        if not set(named) <= set(range(self.num_slots)):
            raise ValueError(
                f"experts are in slots {named}, but the ranks have {self.slots_P} = {self.num_slots} slots"
            )
        if self.copies and self.slot_E is None:
            raise ValueError(
                f"there are copies {self.copies} of experts, but no free slot: every slot has its own expert"
            )
        if len(set(named)) < len(named):
            raise ValueError(
                f"slots {sorted({slot for slot in named if named.count(slot) > 1})} have two "
                "experts"
            )
        for expert, slots in enumerate(self.slots_E if self.copies else ()):
            if len({self.rank_S[slot] for slot in slots}) < len(slots):
                raise ValueError(
                    f"expert {expert} is twice on one rank: in slots {slots} of {self.slots_P}"
                )

    @property
    def num_slots(self) -> int:
        """Returns the number of slots on all ranks."""
        return sum(self.slots_P)

    @property
    def num_experts(self) -> int:
        """Returns the number of experts."""
        return self.num_slots if self.slot_E is None else len(self.slot_E)

    @property
    def filled_once(self) -> bool:
        """Returns whether every slot has an expert and every expert one slot."""
        return self.slot_E is None or sorted(self.slot_E) == list(range(self.num_slots))

    @property
    def is_even(self) -> bool:
        """Returns whether every rank holds an equal contiguous block of the experts."""
        return self.slot_E is None and len(set(self.slots_P)) == 1

    @cached_property
    def rank_S(self) -> tuple[int, ...]:
        """Returns the rank of every slot."""
        return tuple(rank for rank, count in enumerate(self.slots_P) for _ in range(count))

    @cached_property
    def slots_E(self) -> tuple[tuple[int, ...], ...]:
        """Returns the slots of every expert, the saved one first."""
        slots = [[slot] for slot in (range(self.num_slots) if self.slot_E is None else self.slot_E)]
        for expert, slot in self.copies:
            slots[expert].append(slot)
        return tuple(tuple(own) for own in slots)

    @cached_property
    def expert_S(self) -> tuple[int | None, ...]:
        """Returns the expert in every slot; None if the slot is empty."""
        experts: list[int | None] = [None] * self.num_slots
        for expert, slots in enumerate(self.slots_E):
            for slot in slots:
                experts[slot] = expert
        return tuple(experts)

    def own_slots(self, rank: int) -> range:
        """Returns the slots of a rank."""
        end = list(accumulate(self.slots_P))[rank]
        return range(end - self.slots_P[rank], end)

    def seen_from(self, rank: int) -> "ExpertMap":
        """Returns the map with the one slot per expert that serves a rank's routes."""
        return _seen_from(self, rank) if self.copies else self

    def ranges_of(self, rank: int) -> list[ExpertRange]:
        """Returns the experts of a rank in slot order."""
        ranges: list[ExpertRange] = []
        for local, slot in enumerate(self.own_slots(rank)):
            expert = self.expert_S[slot]
            if expert is None:
                continue
            is_first, last = self.slots_E[expert][0] == slot, ranges[-1] if ranges else None
            if last and (last.expert + last.length, last.slot + last.length, last.is_first) == (
                expert,
                local,
                is_first,
            ):
                ranges[-1] = ExpertRange(last.expert, last.slot, last.length + 1, is_first)
            else:
                ranges.append(ExpertRange(expert, local, 1, is_first))
        return ranges

    def tables(self, device: torch.device) -> SlotTables:
        """Returns the map as tensors on a device; cached."""
        return _tables(self, device)

    def slots_of(self, expert_N: Tensor) -> Tensor:
        """Looks up the slot of every route's expert."""
        slot_E = self.tables(expert_N.device).slot_E
        return expert_N if slot_E is None else slot_E[expert_N]

    def as_dict(self) -> dict[str, Any]:
        """Returns the map as plain values for a checkpoint's meta."""
        return {"slots": self.slots_P, "slot_of_expert": self.slot_E, "copies": self.copies}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ExpertMap":
        """Restores a map from the plain values of `as_dict`, read from JSON.

        Raises:
            ValueError: the values contradict each other.
        """
        slot_E = values["slot_of_expert"]
        return cls(
            tuple(values["slots"]),
            None if slot_E is None else tuple(slot_E),
            tuple((expert, slot) for expert, slot in values["copies"]),
        )


@lru_cache(maxsize=256)
def contiguous_map(num_experts: int, num_ranks: int) -> ExpertMap:
    """Returns the map of nearly equal contiguous blocks (`expert_blocks`).

    Raises:
        ValueError: there are fewer experts than ranks.
    """
    return ExpertMap(tuple(len(block) for block in expert_blocks(num_experts, num_ranks)))


@lru_cache(maxsize=256)
def _tables(expert_map: ExpertMap, device: torch.device) -> SlotTables:
    local_S = [slot for count in expert_map.slots_P for slot in range(count)]
    slot_E = None if expert_map.slot_E is None else torch.tensor(expert_map.slot_E, device=device)
    return SlotTables(
        torch.tensor(expert_map.rank_S, device=device), torch.tensor(local_S, device=device), slot_E
    )


@lru_cache(maxsize=256)
def places(expert_map: ExpertMap, device: torch.device) -> ExpertAddresses:
    """Returns every expert's rank and its slot there; cached."""
    slot_E, tables = _slots(expert_map, device), expert_map.tables(device)
    return ExpertAddresses(tables.rank_S[slot_E].int(), tables.local_S[slot_E].int())


@lru_cache(maxsize=256)
def places_on_nodes(expert_map: ExpertMap, device: torch.device, node_size: int) -> ExpertAddresses:
    """Returns every expert's node and its slot among those of all ranks; cached."""
    rank_E = places(expert_map, device).rank_E
    return ExpertAddresses(rank_E // node_size, _slots(expert_map, device).int())


@lru_cache(maxsize=256)
def places_in_node(expert_map: ExpertMap, device: torch.device, node_size: int) -> ExpertAddresses:
    """Returns every slot's rank within its node and its index on that rank; cached."""
    tables = expert_map.tables(device)
    return ExpertAddresses((tables.rank_S % node_size).int(), tables.local_S.int())


def _slots(expert_map: ExpertMap, device: torch.device) -> Tensor:
    slot_E = expert_map.tables(device).slot_E
    return torch.arange(expert_map.num_slots, device=device) if slot_E is None else slot_E


@lru_cache(maxsize=256)
def _seen_from(expert_map: ExpertMap, rank: int) -> ExpertMap:
    return ExpertMap(
        expert_map.slots_P,
        tuple(_serving(expert_map, expert, rank) for expert in range(expert_map.num_experts)),
    )


def _serving(expert_map: ExpertMap, expert: int, source: int) -> int:
    """Returns the slot that serves a source rank: its own replica, else the replicas in turn."""
    slots = expert_map.slots_E[expert]
    holders = {expert_map.rank_S[slot]: slot for slot in slots}
    turn = source - sum(holder < source for holder in holders)  # earlier ranks without a replica
    return holders[source] if source in holders else slots[(turn + expert) % len(slots)]
