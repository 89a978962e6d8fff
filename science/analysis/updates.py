"""How much every depth step changes the residual stream.

Of every token: the length of what is added, ‖x_out − x_in‖₂, the length of what comes in, the ratio
of the two, and |cos(x_in, x_out)|. A token that has halted is not counted at the steps it skips.

The tap computes these four numbers inside of its hook and keeps no residual stream.

Legend: T tokens, L depth steps, D model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebius.model.transformer import Layer, Transformer

COLUMNS = ("update_norm", "input_norm", "ratio", "abs_cosine")
_SMALLEST = 1e-30  # a residual of zeros has no direction; its ratio and cosine are 0


@dataclass(frozen=True)
class DepthUpdate:
    """Holds what one depth step did to every token."""

    depth: int  # from 1
    values_TC: Tensor  # float64, one column for each of COLUMNS
    active_T: Tensor  # bool: the token has not halted


@contextmanager
def tap_residual(model: Transformer) -> Iterator[list[DepthUpdate]]:
    """Measures every depth step while the context lasts; hooks that only look."""
    found: list[DepthUpdate] = []

    def record(_layer: Layer, inputs: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        x_TD, y_TD = inputs[0].flatten(0, 1).double(), output[0].flatten(0, 1).double()
        unhalted = given.get("unhalted")
        if unhalted is None:
            active_T = torch.ones(len(x_TD), dtype=torch.bool, device=x_TD.device)
        else:
            active_T = unhalted.weight_BS.flatten() > 0
        depth = len(found) % model.config.num_layers + 1
        found.append(DepthUpdate(depth, _measure(x_TD, y_TD), active_T))

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in model.group]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _measure(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    update_T, input_T = (y_TD - x_TD).norm(dim=1), x_TD.norm(dim=1)
    floor_T = input_T.clamp_min(_SMALLEST)
    cosine_T = (x_TD * y_TD).sum(1) / floor_T / y_TD.norm(dim=1).clamp_min(_SMALLEST)
    return torch.stack((update_T, input_T, update_T / floor_T, cosine_T.abs()), dim=1)


class UpdateCounter:
    """Averages over tokens what every depth step does."""

    def __init__(self, num_depths: int) -> None:
        self._sums_LC = np.zeros((num_depths, len(COLUMNS)))
        self.tokens_L = np.zeros(num_depths, dtype=np.int64)

    def add(self, updates: list[DepthUpdate], counted_T: Tensor) -> None:
        """Adds the depth steps of one pass."""
        for update in updates:
            kept_T = counted_T & update.active_T
            self._sums_LC[update.depth - 1] += update.values_TC[kept_T].sum(0).cpu().numpy()
            self.tokens_L[update.depth - 1] += int(kept_T.sum())

    @property
    def means_LC(self) -> np.ndarray:
        """Returns the means, (L, 4); not a number where no token came."""
        with np.errstate(invalid="ignore"):
            return self._sums_LC / self.tokens_L[:, None]
