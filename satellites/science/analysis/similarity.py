"""Measures how similar a token's experts are at two depth steps, and which experts work together.

S_r is the set of experts that serve a token at repeat r of its bank. Means over all tokens with an
expert at both steps:

    jaccard   |S_r ∩ S_q| / |S_r ∪ S_q|
    shared    |S_r ∩ S_q| / |S_r|          with q = r − 1: the overlap of consecutive steps

Tokens without an expert at one of the steps (halted, dropped, or chosen by nobody) do not count.
Co-occurrence counts tokens that have both of two experts at the same depth step, summed over
repeats.

Cost per pass: two products, (T, R, E) with itself over E and (T, E) with itself over T, in blocks
of tokens; a few percent of the model's own forward pass.

Legend: T tokens, R repeats, E experts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .banks import Bank, Choices

_BLOCK = 1024  # tokens: a float32 copy of their choices is R·E·4 kB


class SimilarityCounter:
    """Accumulates set similarities and co-occurrences of one bank."""

    def __init__(self, bank: Bank) -> None:
        repeats, experts = bank.num_repeats, bank.num_experts
        self.pairs_RR = np.zeros((repeats, repeats), dtype=np.int64)  # tokens with experts at both
        self._jaccard_RR = np.zeros((repeats, repeats))
        self._shared_RR = np.zeros((repeats, repeats))
        self.together_EE = np.zeros((experts, experts), dtype=np.int64)

    def add(self, of_repeats: Sequence[Choices]) -> None:
        """Adds one pass: the choices of all repeats, in order."""
        chosen_RTE = torch.stack([choices.chosen_TE for choices in of_repeats])
        for block_RTE in chosen_RTE.split(_BLOCK, dim=1):
            self._add_block(block_RTE.float())

    def _add_block(self, chosen_RTE: Tensor) -> None:
        flat_XE = chosen_RTE.flatten(0, 1)  # float32 counts are exact up to 2^24
        self.together_EE += (flat_XE.T @ flat_XE).round().long().cpu().numpy()
        chosen_TRE = chosen_RTE.transpose(0, 1)
        both_TRR = (chosen_TRE @ chosen_TRE.transpose(1, 2)).double()
        size_TR = chosen_TRE.sum(2).double()
        either_TRR = size_TR[:, :, None] + size_TR[:, None, :] - both_TRR
        has_TR = size_TR > 0
        has_TRR = has_TR[:, :, None] & has_TR[:, None, :]
        jaccard_TRR = torch.where(has_TRR, both_TRR / either_TRR, 0.0)
        shared_TRR = torch.where(has_TRR, both_TRR / size_TR[:, :, None], 0.0)
        self._jaccard_RR += jaccard_TRR.sum(0).cpu().numpy()
        self._shared_RR += shared_TRR.sum(0).cpu().numpy()
        self.pairs_RR += has_TRR.sum(0).cpu().numpy()

    @property
    def jaccard_RR(self) -> np.ndarray:
        """Returns the mean Jaccard similarity; NaN if no token has experts at both."""
        return self._mean(self._jaccard_RR)

    @property
    def shared_RR(self) -> np.ndarray:
        """Returns the mean share of the experts at r that also serve the token at q."""
        return self._mean(self._shared_RR)

    @property
    def consecutive_R(self) -> np.ndarray:
        """Returns the share present one repeat before; NaN at the first repeat."""
        return np.concatenate(([np.nan], np.diagonal(self.shared_RR, offset=-1)))

    def _mean(self, sums_RR: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return sums_RR / self.pairs_RR
