"""Where every expert lives: a table from experts to slots, and from slots to ranks.

Slots are numbered rank after rank. Without a table expert e is in slot e and every rank holds equally many. Dispatchers know
experts by their slots only, so a bank may be placed in any way, unevenly too, and nothing but this table changes.

Legend: E experts, S slots, P ranks, N routes.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotTables:
    """What a homes' table says of every slot, on a device."""

    rank_S: Tensor
    local_S: Tensor  # its number on its rank
    slot_E: Tensor | None


@dataclass(frozen=True)
class Homes:
    """`slots_P[p]` slots on rank p; expert e is in slot `slot_E[e]`, or in slot e where that is None."""

    slots_P: tuple[int, ...]
    slot_E: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.slot_E is not None and not set(self.slot_E) <= set(range(self.num_slots)):
            raise ValueError(f"experts in slots {self.slot_E}, but the ranks hold {self.slots_P} = {self.num_slots}")

    @property
    def num_slots(self) -> int:
        return sum(self.slots_P)

    @property
    def filled_once(self) -> bool:
        """Every slot has exactly one expert: what a rank knows of the experts' counts, it knows of the slots'."""
        return self.slot_E is None or sorted(self.slot_E) == list(range(self.num_slots))

    def tables(self, device: torch.device) -> SlotTables:
        """On that device; made once."""
        return _tables(self, device)

    def slots_of(self, expert_N: Tensor) -> Tensor:
        """The slot of every route's expert."""
        slot_E = self.tables(expert_N.device).slot_E
        return expert_N if slot_E is None else slot_E[expert_N]


def even_homes(num_experts: int, num_ranks: int) -> Homes:
    """Equal contiguous blocks.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    if num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be shared equally by {num_ranks} ranks: choose an EP degree that divides "
            f"{num_experts}, or say with a table where each expert lives"
        )
    return Homes((num_experts // num_ranks,) * num_ranks)


@lru_cache(maxsize=256)
def _tables(homes: Homes, device: torch.device) -> SlotTables:
    rank_S = [rank for rank, count in enumerate(homes.slots_P) for _ in range(count)]
    local_S = [slot for count in homes.slots_P for slot in range(count)]
    slot_E = None if homes.slot_E is None else torch.tensor(homes.slot_E, device=device)
    return SlotTables(torch.tensor(rank_S, device=device), torch.tensor(local_S, device=device), slot_E)
