"""Soft MoE: every expert has slots, and every slot reads a mixture of its sequence's tokens (arXiv
2308.00951).

With X the m tokens of one sequence and Φ the slots' parameters, both normalised to length 1, and α
one learned number,

    L = α · X̂ Φ̂                    logits of every token and slot
    D = softmax of L over tokens    a slot reads Dᵀ X
    C = softmax of L over slots     a token gets C Y

It is continuous, balanced by construction, and separate for each sequence. But a slot reads all
positions, so a language model would see its own future: it is here as the non-causal relative of
Mixture of Tokens, which is this layer with one slot per expert, groups across sequences, no
normalisation and D in place of C. Mixing costs 6·D·E·P FLOPs per token.

Legend: B sequences, M tokens of one, D their width, E experts, P slots, equally many for
each expert.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from ..initialise import Initializer, normal, ones, parameter
from ..layers import own_dtype, wide_dtype
from ..routing import Mixture, Routing
from .router import Promises, Router, RouterConfig


class SlotMixingConfig(RouterConfig):
    """Describes Soft MoE's slots per expert.

    Published with as many slots as tokens: slots_per_expert = round(tokens / E).
    """

    kind: Literal["soft_moe"] = "soft_moe"
    slots_per_expert: PositiveInt | None = None
    """Slots of each expert; required, because each slot has its own weights."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(causal=False, batch_invariant=True, dropless=True, balanced=True)

    @property
    def reads_whole_sequences(self) -> bool:
        """Returns whether one position alone cannot be routed."""
        return True

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns the slots computed for a sequence, per row of it."""
        return num_experts * self.slots(num_experts) / sequence_rows

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row: logits, dispatching and combining."""
        return 6 * d_row * num_experts * self.slots(num_experts)

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        self.slots(num_experts)

    def slots(self, num_experts: int) -> int:
        """Returns the slots of an expert.

        Raises:
            ValueError: it is not configured; the model does not know the sequence length that
                implies it.
        """
        if self.slots_per_expert is None:
            raise ValueError(
                "router.slots_per_expert is not set: use the sequence length divided by "
                f"num_experts={num_experts}, rounded, for as many slots as tokens (for 128 "
                f"positions: {max(1, round(128 / num_experts))})"
            )
        return self.slots_per_expert


class SlotMixingRouter(Router):
    """Mixes a sequence into slots (Soft MoE, arXiv 2308.00951, §2), without noise on the logits."""

    Config = SlotMixingConfig
    config: SlotMixingConfig

    def __init__(
        self, config: SlotMixingConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        num_slots = num_experts * config.slots(num_experts)
        self.weight = parameter(num_slots, d_row, init=normal(d_row**-0.5))  # LeCun, as published
        self.scale = parameter(1, init=ones)

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Mixes every sequence as one group."""
        wide, dtype = wide_dtype(x_TD), own_dtype(x_TD, self.weight)
        x_TD, slots_PD = (
            F.normalize(rows.to(dtype), dim=-1, eps=1e-6) for rows in (x_TD, self.weight)
        )
        scale = self.scale.to(dtype)
        if x_TD.numel() < slots_PD.numel():  # scale the smaller operand
            x_TD = x_TD * scale
        else:
            slots_PD = slots_PD * scale
        logits_TP = (x_TD @ slots_PD.T).to(wide)
        logits_BMP = logits_TP.unflatten(0, (batch_size, -1))
        rows_BM = torch.arange(x_TD.shape[0], device=x_TD.device).view(batch_size, -1)
        mixture = Mixture(rows_BM, logits_BMP.softmax(1), logits_BMP.softmax(2), self.num_experts)
        return Routing(mixture, logits_TP[:, None])
