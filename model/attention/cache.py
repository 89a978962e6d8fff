"""What attention keeps of the positions that it has seen: one entry per depth step.

Legend: B sequences, H heads, C channels of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Holds the keys and values of one depth step, each (B, H, past, C).

    Keys are rotated where positions rotate, so that they keep their own.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        """Returns how many positions have been seen so far."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new positions' keys and values, and returns those of all positions."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values
