"""Measures how much every depth step changes the residual stream.

For every token: the length of the update ‖x_out − x_in‖₂, the length of the input, their ratio, and
|cos(x_in, x_out)|. Halted tokens do not count at the steps they skip.

Legend: T tokens, L depth steps, D model width.
"""

import numpy as np
import torch
from torch import Tensor

import moebius

COLUMNS = ("update_norm", "input_norm", "ratio", "abs_cosine")
_SMALLEST = 1e-30  # a residual of zeros has no direction; its ratio and cosine are 0


class UpdateCounter:
    """Averages every depth step's effect over tokens."""

    def __init__(self, num_depths: int) -> None:
        self._sums_LC = np.zeros((num_depths, len(COLUMNS)))
        self.tokens_L = np.zeros(num_depths, dtype=np.int64)

    def add(self, seen: moebius.Trace) -> None:
        """Adds the depth steps of one pass."""
        counted_T = seen.rows.counted_BS.flatten()
        for index, active_BS in enumerate(seen.active_LBS):
            kept_T = counted_T & active_BS.flatten()
            x_TD, y_TD = (
                state_BSD.flatten(0, 1)[kept_T].double()
                for state_BSD in seen.hidden_LBSD[index : index + 2]
            )
            self._sums_LC[index] += _measured(x_TD, y_TD).sum(0).cpu().numpy()
            self.tokens_L[index] += len(x_TD)

    @property
    def means_LC(self) -> np.ndarray:
        """Returns the means, (L, 4); NaN where no token arrived."""
        with np.errstate(invalid="ignore"):
            return self._sums_LC / self.tokens_L[:, None]


def _measured(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    update_T, input_T = (y_TD - x_TD).norm(dim=1), x_TD.norm(dim=1)
    floor_T = input_T.clamp_min(_SMALLEST)
    cosine_T = (x_TD * y_TD).sum(1) / floor_T / y_TD.norm(dim=1).clamp_min(_SMALLEST)
    return torch.stack((update_T, input_T, update_T / floor_T, cosine_T.abs()), dim=1)
