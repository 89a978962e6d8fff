"""Counts which experts serve single vocabulary items: slices of the count matrix over token ids.

c[r, e, v] counts how often expert e served item v, the input token, at repeat r. For a few items
the full counts are kept: (R, E) each.

Legend: K items, R repeats, E experts, V vocabulary, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .banks import Bank, Choices

RANKS = (1, 10, 100, 1000)
"""By default the items of these places in the order of frequency are asked."""


@dataclass(frozen=True)
class Item:
    """Names a vocabulary item."""

    token_id: int
    text: str


def usual_items(counts_V: np.ndarray) -> list[int]:
    """Returns the ids at the default frequency ranks among items that occur."""
    order = np.argsort(-counts_V, kind="stable")[: np.count_nonzero(counts_V)]
    return [int(order[rank - 1]) for rank in RANKS if rank <= len(order)]


class SliceCounter:
    """Counts the choices of one bank for a few items."""

    def __init__(self, bank: Bank, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self.counts_KRE = np.zeros(
            (len(token_ids), bank.num_repeats, bank.num_experts), dtype=np.int64
        )

    def add(self, repeat: int, choices: Choices, token_ids_T: Tensor) -> None:
        """Adds one pass at one depth step; the ids are those of the counted tokens."""
        item_N = token_ids_T[choices.token_N]
        for place, token_id in enumerate(self.token_ids):
            experts = choices.expert_N[item_N == token_id]
            counts_E = torch.bincount(experts, minlength=choices.num_experts)
            self.counts_KRE[place, repeat] += counts_E.cpu().numpy()

    def preference_RE(self, place: int) -> np.ndarray:
        """Returns an item's counts, normalized over depth steps for each expert."""
        counts_RE = self.counts_KRE[place]
        with np.errstate(invalid="ignore"):
            return counts_RE / counts_RE.sum(0)
