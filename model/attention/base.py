"""What every attention has: one signature, heads, and routers where it has experts.

Legend: B sequences, S positions, D model width, H heads, C channels of a head.
"""

import torch
from torch import Tensor, nn

from ..config.attention_config import AttentionConfig
from ..documents import Documents
from ..halting import Unhalted
from ..layers import Linear, RotaryTable
from ..routers.router import Router
from ..routing import Routing
from .cache import LayerCache


class Attention(nn.Module):
    """Attends causally; a subclass builds its weights and implements `forward`."""

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
        *,
        router_input_BSD: Tensor | None = None,
        rotary: RotaryTable | None,
        cache: LayerCache | None = None,
        unhalted: Unhalted | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends from every position to itself and those before it.

        Args:
            value_input_BSD: what values are made of; the same tensor as `n_BSD` but in peri-norm.
            n_BSD: what queries and keys read.
            router_input_BSD: what routers read: the same rows, in the norm's own precision where
                `n_BSD` is in the products'; None: `n_BSD`.
            rotary: cosine and sine of the new positions, of width 0 where nothing rotates; None
                for an attention that has positions of its own.
            cache: keys and values of the positions before, extended in place.
            unhalted: which tokens still compute; None: all of them.
            documents: which positions see which, and which rows are padding; None: every position
                sees all before it, and none is. Not together with a cache.

        Returns:
            (B, S, D), and the routing of every router, by its kind.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it attends")

    def _heads(self, x_BSW: Tensor) -> Tensor:
        """Splits (B, S, H·C) into heads: (B, H, S, C)."""
        return x_BSW.unflatten(-1, (self.num_heads, self.d_head)).transpose(1, 2)
