"""What every attention has: one signature, heads, and routers where it has experts.

Legend: B sequences, S positions, D model width, H heads, C channels of a head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config.attention_config import AttentionConfig
from ..documents import DocumentRows, Documents
from ..halting import Unhalted
from ..layers import Linear, RotaryTable
from ..routers.router import Router
from ..routing import Routing


@dataclass
class LayerCache:
    """Holds what attention keeps of the positions of one depth step: keys and values, (B, H, past, C).

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


@dataclass(frozen=True)
class DepthContext:
    """Holds what a depth step reads beside its rows."""

    # cosine and sine of the new positions, of width 0 where nothing rotates; None for an attention
    # that has positions of its own
    rotary: RotaryTable | None = None
    cache: LayerCache | None = None  # of this depth step, extended in place
    unhalted: Unhalted | None = None  # which tokens still compute; None: all of them
    # which positions see which, and which rows are padding; None: every position sees all before it,
    # and none is. Not together with a cache
    documents: Documents | None = None

    @property
    def visible_B1SS(self) -> Tensor | None:
        """Returns which position (third) sees which (fourth); None: each sees all before it."""
        return None if self.documents is None else self.documents.visible_B1SS

    @property
    def rows(self) -> DocumentRows | None:
        """Returns which rows are padding, if any; under halting they have halted from the start."""
        if self.documents is None or self.unhalted is not None:
            return None
        return self.documents.rows


class Attention(nn.Module):
    """Attends causally; a subclass builds its weights and implements `forward`."""

    Config: ClassVar[type[AttentionConfig]]  # of one of the user's own
    key: Linear

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.num_heads, self.d_head = config.num_heads, config.d_head

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the products."""
        return self.key.weight.dtype

    def routers(self) -> dict[str, Router]:
        """Returns the routers inside, by the kind under which their routings are reported."""
        return {}

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends from every position to itself and those before it.

        Args:
            value_input_BSD: what values are made of; the same tensor as `n_BSD` but in peri-norm.
            n_BSD: what queries and keys read.
            context: positions, cache, halting and documents.
            router_input_BSD: what routers read: the same rows, in the norm's own precision where
                `n_BSD` is in the products'; None: `n_BSD`.

        Returns:
            (B, S, D), and the routing of every router, by its kind.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it attends")

    def _heads(self, x_BSW: Tensor) -> Tensor:
        """Splits (B, S, H·C) into heads: (B, H, S, C)."""
        return x_BSW.unflatten(-1, (self.num_heads, self.d_head)).transpose(1, 2)
