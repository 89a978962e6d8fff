"""Counts how many different experts a vocabulary item meets at a depth step.

n[r, v] counts the experts that served item v (the input token at a position) at repeat r, over all
positions. It keeps one bit per repeat, item and expert: 7 MB for 18 depth steps, 8,000 items and
387 experts, for any number of tokens.

Legend: T tokens, R repeats, E experts, V vocabulary items.
"""

import numpy as np
import torch
from torch import Tensor

from .banks import Bank, Choices


class ItemCounter:
    """Records which experts have served which item."""

    def __init__(self, bank: Bank, vocab_size: int) -> None:
        self._experts = bank.num_experts
        width = -(-bank.num_experts // 8)
        self._bits_RVX = np.zeros((bank.num_repeats, vocab_size, width), dtype=np.uint8)

    def add(self, repeat: int, choices: Choices, token_ids_T: Tensor) -> None:
        """Adds one pass at one depth step; the ids are those of the counted tokens."""
        met_N = token_ids_T[choices.token_N] * self._experts + choices.expert_N
        met = torch.unique(met_N).cpu().numpy()
        items, experts = met // self._experts, met % self._experts
        bits_VX = self._bits_RVX[repeat]
        for bit in range(8):  # of one bit every byte occurs once, so that none is lost
            has_bit = experts % 8 == bit
            bits_VX[items[has_bit], experts[has_bit] // 8] |= np.uint8(1 << bit)

    @property
    def unique_RV(self) -> np.ndarray:
        """Returns n: the number of experts that an item has met at a repeat."""
        return np.bitwise_count(self._bits_RVX).sum(2, dtype=np.int64)

    @property
    def anywhere_V(self) -> np.ndarray:
        """Returns the number of experts that an item has met at any repeat."""
        anywhere_VX = np.bitwise_or.reduce(self._bits_RVX, axis=0)
        return np.bitwise_count(anywhere_VX).sum(1, dtype=np.int64)
