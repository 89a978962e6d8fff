"""Sigmoid gates: each expert is scored alone, so experts do not compete for one unit of
probability.

Legend: T rows, D their width, H heads, A experts of a head, K experts chosen.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from ...kernels.fused.router import Routed, by_triton
from ...kernels.gradients import once_per_pass
from ..balance import BALANCE
from ..execution.draws import draw_uniform
from ..execution.recompute import save_topk
from ..initialise import Initializer, parameter
from ..layers import router_logits
from .router import Choice, ChoiceConfig, ChoiceRouter, Promises, TopKConfig


class SigmoidConfig(TopKConfig, ChoiceConfig):
    """Describes σ-MoE's and MoEUT's router: sigmoid gates, top-k, an entropy term per sequence."""

    kind: Literal["sigmoid"] = "sigmoid"
    top_k: PositiveInt = 4
    """Experts per token."""

    balance_form: Annotated[str, BALANCE] = "entropy"
    """Form of the balancing loss; the paper uses "entropy"."""

    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    """Rows that the balancing loss averages over."""

    expert_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an expert cannot be chosen, in training."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)


class SigmoidRouter(ChoiceRouter):
    """Gates with sigmoids, top-k, without renormalisation (σ-MoE, arXiv 2310.10837, §5).

    SwitchHead uses it with one independent choice per head (arXiv 2312.07987, §2); the feed-forward
    has one head. Experts are numbered head · A + choice. The router's gradient comes through the
    gate weights and, from the balancing term, through the logits.
    """

    Config = SigmoidConfig
    config: SigmoidConfig

    def __init__(
        self,
        config: SigmoidConfig,
        d_row: int,
        num_experts: int,
        *,
        init: Initializer,
        num_heads: int = 1,
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.num_heads = num_heads
        self.weight = parameter(num_experts, d_row, init=init)

    def choose_per_head(self, x_TD: Tensor) -> Routed:
        """Chooses experts (T, H, K) int64, with gates (T, H, K) and logits (T, H, A), float32.

        Float32 keeps a choice from flipping with the compute dtype. The choice is made on logits,
        which do not saturate. One kernel does it where available (kernels/fused/router.py), except
        in training with `expert_dropout`.
        """
        if not self._drops:
            found = self.route_in_one(x_TD, self.weight, gate="sigmoid", heads=self.num_heads)
            if found is not None:
                return found
        per_head = self.num_experts // self.num_heads
        logits_THA = router_logits(x_TD, self.weight).unflatten(1, (self.num_heads, per_head))
        values_THK, chosen_THK = save_topk(self._eligible(logits_THA), self.config.top_k)
        if self.num_heads > 1:
            first_H = torch.arange(0, self.num_experts, per_head, device=x_TD.device)
            chosen_THK = chosen_THK + first_H[:, None]
        return Routed(logits_THA, chosen_THK, torch.sigmoid(values_THK))

    def choose_beside(self, other: "SigmoidRouter", x_TD: Tensor) -> list[Routed] | None:
        """Returns both routers' choices from one kernel, which reads the rows once.

        None if there is no such kernel or the routers differ in more than their weights.
        """
        if not by_triton(x_TD) or self._drops or self._kind != other._kind:
            return None
        both = self.weight, other.weight
        weight_ED = once_per_pass("beside", lambda *weights: torch.cat(weights), *both)
        found = self.route_in_one(x_TD, weight_ED, gate="sigmoid", heads=self.num_heads, routers=2)
        return None if found is None else found.of_each(2)

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses experts for the feed-forward, which has one head."""
        return Choice.of(self.choose_per_head(x_TD))

    @property
    def _kind(self) -> tuple:
        """Returns what routers have in common that one kernel may serve."""
        own, weight = type(self) is SigmoidRouter or self, self.weight
        sizes = self.num_heads, weight.shape, weight.dtype
        return own, self.config, self.backend, self.training, *sizes

    @property
    def _drops(self) -> bool:
        return self.training and self.config.expert_dropout > 0

    def _eligible(self, logits_THA: Tensor) -> Tensor:
        """Drops experts from the choice only; the balancing term sees the raw logits.

        Source: arXiv 2310.10837, §5.1.
        """
        if not self._drops:
            return logits_THA
        dropped_THA = draw_uniform(logits_THA.shape, logits_THA.device) < self.config.expert_dropout
        return logits_THA.masked_fill(dropped_THA, float("-inf"))
