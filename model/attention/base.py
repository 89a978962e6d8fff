"""The interface of every attention: one signature, heads, and routers if it has experts.

Legend: B sequences, S positions, D model width, H heads, C channels of a head.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config.attention_config import AttentionConfig
from ..config.model_config import DepthStep
from ..documents import DocumentRows, Documents
from ..execution.draws import Draws
from ..execution.recompute import Recompute
from ..layers import Linear, RotaryTable
from ..loops.halting import Unhalted
from ..routers.router import Router
from ..routing import Routing


@dataclass
class LayerCache:
    """Caches one depth step's keys and values, (B, H, past, C).

    Keys are stored after rotation. Latent attention caches its rotated key and its latent, of one head.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        """Returns how many positions are cached."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new positions' keys and values, and returns those of all positions."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values

    def forget_from(self, length: int) -> None:
        """Drops the positions from `length` on."""
        if self.keys is not None and self.values is not None and self.length > length:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


def past_length(cache: list[LayerCache] | None) -> int:
    """Returns how many positions a model's cache holds; None: none."""
    return 0 if cache is None else cache[0].length


@dataclass(frozen=True)
class DepthContext:
    """Holds a depth step's inputs other than its rows."""

    # Cosine and sine of the new positions, of width 0 if nothing rotates; None: attention has its own.
    rotary: RotaryTable | None = None
    cache: LayerCache | None = None  # of this depth step, extended in place
    unhalted: Unhalted | None = None  # which tokens still compute; None: all of them
    # Visibility and padding; None: each position sees all before it, no padding. Excludes a cache.
    documents: Documents | None = None
    residual_scale: float = 1.0  # of what the layer adds to the residual stream
    draws: Draws | None = None  # of the random numbers; None: in evaluation
    marks_choices: bool = False  # whether the feed-forward's report has `choices`
    recompute: Recompute = "none"  # what the backward pass keeps; a cache is never recomputed
    equal_rows: bool = (
        False  # all ranks of an EP group give equally many rows, none of them padding
    )
    # Where in the pass the layer is; its loop is the pass's, and sequences of fewer loops may skip some.
    step: DepthStep | None = None

    def of_sequences(self, live: Tensor) -> "DepthContext":
        """Returns what some of the sequences read."""
        if self.documents is None:
            return self
        rotary = self.rotary
        if rotary is not None and rotary[0].ndim == 4:  # a row of the table per sequence
            rotary = (rotary[0][live], rotary[1][live])
        return replace(self, rotary=rotary, documents=self.documents.of_sequences(live))

    @property
    def visible_B1SS(self) -> Tensor | None:
        """Returns which position (third) sees which (fourth); None: each sees all before it."""
        return None if self.documents is None else self.documents.visible_B1SS

    @property
    def rows(self) -> DocumentRows | None:
        """Returns which rows are padding, if any; under halting, padding starts halted instead."""
        if self.documents is None or self.unhalted is not None:
            return None
        return self.documents.rows


class Attention(nn.Module):
    """Attends causally; a subclass builds its weights and implements `forward`."""

    Config: ClassVar[type[AttentionConfig]]  # set by a user's own attention
    key: Linear

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.num_heads, self.d_head = config.num_heads, config.d_head

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the products."""
        return self.key.weight.dtype

    def routers(self) -> dict[str, Router]:
        """Returns the routers by kind, which names their routings in reports."""
        return {}

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends from every position to itself and earlier ones.

        Args:
            value_input_BSD: input of values; differs from `n_BSD` only in peri-norm.
            n_BSD: input of queries and keys.
            context: positions, cache, halting and documents.
            router_input_BSD: input of routers: the same rows in the norm's own precision; None:
                `n_BSD`.

        Returns:
            (B, S, D), and every router's routing by kind.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward")

    def _heads(self, x_BSW: Tensor) -> Tensor:
        """Splits (B, S, H·C) into heads: (B, H, S, C)."""
        return x_BSW.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
