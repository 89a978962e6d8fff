"""Mixture of Tokens: without choosing, every expert reads one mixture of a group's tokens (arXiv
2310.15961).

A group holds the same position of M consecutive sequences. A token reads other sequences up to its
own position but never later, so a language model stays causal, while no sequence is independent of
its group context. For tokens x_m of a group,

    L = x Cᵀ                        logits of every token and expert, no bias
    W[m, e] = softmax_m(L[m, e]/τ)  over the tokens, for every expert separately
    y_m = Σ_e W[m, e] · expert_e(Σ_i W[i, e] · x_i)

The same W merges and emits. Every token learns from every expert, and the load is equal and known
in advance. With E = M·m experts of width F/m, a token costs as much as a dense layer of width F.
Mixing adds 6·D·E FLOPs per token: at D = 512, 2 % of the experts' for m = 1 and 37 % for m = 16. W
takes T·E numbers per layer.

A group of one is refused. A softmax over one token is 1 for every expert, so the token would get
the plain sum of all E outputs (for 32 experts at the start, up to 32·√32 = 181 times those of a
group of 32; measured 155).

Padding (model/documents.py) is mixed like any token. Omitting it would shrink the group, down to a
group of one, and make outputs depend on how full the other rows are.

Legend: B sequences, S positions, T = B·S rows, D their width, G groups of M members, E experts.
"""

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, PositiveFloat, PositiveInt
from torch import Tensor

from ..initialise import Initializer, parameter
from ..layers import router_logits
from ..routing import Mixture, Routing
from .router import Promises, Router, RouterConfig


def _is_group(sequences_per_group: int) -> int:
    if sequences_per_group == 1:
        raise ValueError(
            "sequences_per_group=1: a softmax over a group of one token is 1 for every expert, so the "
            "token would get the plain sum of all experts' outputs, tens of times too large; use 2 or "
            "more (the published models: 8 to 128)"
        )
    return sequences_per_group


MixedSequences = Annotated[PositiveInt, AfterValidator(_is_group)]


class TokenMixingConfig(RouterConfig):
    """Describes Mixture of Tokens as published."""

    kind: Literal["mixture_of_tokens"] = "mixture_of_tokens"
    sequences_per_group: MixedSequences = 32
    """Tokens M that are mixed, each from another sequence."""

    temperature: PositiveFloat = 1.0
    """Temperature τ of the mixing weights."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(causal=True, batch_invariant=False, dropless=True, balanced=True)

    @property
    def group_sequences(self) -> int:
        """Returns how many sequences are routed together."""
        return self.sequences_per_group

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns the mixtures per row: every expert computes one for a group of M rows."""
        return num_experts / self.sequences_per_group

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row: logits, merging and emitting."""
        return 6 * d_row * num_experts


class TokenMixingRouter(Router):
    """Mixes the tokens of a group for every expert (Mixture of Tokens, arXiv 2310.15961)."""

    Config = TokenMixingConfig
    config: TokenMixingConfig

    def __init__(
        self, config: TokenMixingConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Mixes T sequence-major rows.

        Raises:
            ValueError: the rows do not form whole groups.
        """
        logits_TE = router_logits(x_TD, self.weight)
        members = self.config.sequences_per_group
        rows_GM = rows_by_position(x_TD.shape[0], batch_size, members, device=x_TD.device)
        weights_GME = (logits_TE[rows_GM] / self.config.temperature).softmax(1)
        mixture = Mixture(rows_GM, weights_GME, weights_GME, self.num_experts)
        return Routing(mixture, logits_TE[:, None])


def rows_by_position(
    num_rows: int, batch_size: int, members: int, *, device: torch.device
) -> Tensor:
    """Groups rows by position: group (s, j) has position s of sequences j·M … j·M + M − 1; (G, M).

    Raises:
        ValueError: the sequences do not form whole groups.
    """
    if batch_size % members:
        raise ValueError(
            f"{batch_size} sequences are not whole groups of {members}: train with micro-batches "
            f"that are multiples of {members}, and evaluate a single sequence with a group context "
            f"of {members - 1} (evaluation/group_context.py)"
        )
    # Rows are sequence-major, so contiguous cuts would group neighbours of one sequence.
    rows_jMS = torch.arange(num_rows, device=device).view(batch_size // members, members, -1)
    return rows_jMS.permute(2, 0, 1).reshape(-1, members)
