"""DeepSeek's gate: a bias balances the selection, and a row may use only some groups of experts.

    s = sigmoid(x W)                          V2: softmax
    selected by s + b                         from the best `kept_groups` of `num_groups` groups of neighbouring experts
    gate weight = route_scale · s / Σ s       over the selected, without the bias b. V2: not renormalised
    b ← b + γ·sign(mean n − n_e)              after each step, n the choices of the whole global batch (arXiv 2408.15664, alg. 1)

DeepSeek-V3 (arXiv 2412.19437, eq. 12 to 20) has 256 experts in 8 groups, keeps 4 groups, chooses 8
experts, uses γ = 0.001 (0 for the last 3 % of the tokens), a sequence-wise loss of 1e-4 and no
capacity. V2 (arXiv 2405.04434, eq. 20 to 22): softmax, group_score="max", no renormalisation, no
bias. The bias is a float32 buffer without gradient or weight decay, saved with the weights. It
comes from earlier steps, so it reveals nothing about a row's future.

Legend: T rows, D their width, E experts, K experts chosen, G groups of experts, B sequences.
"""

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from ..balance import count_chosen, document_sums
from ..execution.recompute import save_decision
from ..initialise import Initializer, parameter
from ..layers import router_logits
from ..routing import Routing
from .router import Choice, ChoiceConfig, ChoiceRouter, Promises, TopKConfig


class DeepSeekConfig(TopKConfig, ChoiceConfig):
    """Describes DeepSeek's gate: V3 by default.

    V2 has scores="softmax", group_score="max", renormalise=false, bias_rate=0.
    """

    kind: Literal["deepseek"] = "deepseek"
    top_k: PositiveInt = 8
    """Experts per token."""

    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    """How logits become scores."""

    num_groups: PositiveInt = 1
    """Number of groups of experts."""

    kept_groups: PositiveInt = 1
    """Number of groups that a token may choose experts from."""

    group_score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two best biased scores, or its best one."""

    renormalise: bool = True
    """Makes the K gate weights sum to 1."""

    route_scale: PositiveFloat = 1.0
    """Factor of the gate weights."""

    bias_rate: NonNegativeFloat = 0.001
    """Step size γ of the bias; 0: it stays as it is, which is 0 in a new model."""

    bias_until_step: NonNegativeInt | None = None
    """First step in which the bias stays fixed; none: never."""

    balance: NonNegativeFloat = 1e-4
    """Weight of the balancing loss."""

    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    """Rows that the balancing loss averages over."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if self.top_k == 1 and self.renormalise:
            raise ValueError(
                "top_k=1 with renormalise=true makes every gate weight the same, and the router "
                "learns nothing from the experts; set renormalise=false, or top_k to 2 or more"
            )
        if self.kept_groups > self.num_groups:
            raise ValueError(
                f"kept_groups={self.kept_groups} is more than num_groups={self.num_groups}"
            )
        return self

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        groups, kept = self.num_groups, self.kept_groups
        if num_experts % groups:
            raise ValueError(
                f"router.num_groups={groups} does not divide num_experts={num_experts}"
            )
        members = num_experts // groups
        if self.top_k > kept * members:
            raise ValueError(
                f"router.top_k={self.top_k} is more than the {kept * members} experts of "
                f"kept_groups={kept} groups of {members}"
            )
        if groups > 1 and self.group_score == "top2" and members < 2:
            raise ValueError(
                'router.group_score="top2" needs groups of at least two experts, and '
                f"num_groups={groups} of num_experts={num_experts} have one; use fewer groups or "
                'group_score="max"'
            )


class DeepSeekRouter(ChoiceRouter):
    """Scores with sigmoid or softmax, and selects with a learned bias and a limit on groups."""

    Config = DeepSeekConfig
    config: DeepSeekConfig
    carried: ClassVar[tuple[str, ...]] = ("load",)
    selection_bias: Tensor  # (E,) float32

    def __init__(
        self, config: DeepSeekConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)
        self.register_buffer("selection_bias", torch.zeros(num_experts))

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses the K largest biased scores within the kept groups, weighted without the bias."""
        config = self.config
        logits_TE = router_logits(x_TD, self.weight)
        # In logarithms renormalising is a softmax, which has no 0/0 if all scores underflow.
        log_scores_TE = (
            F.logsigmoid(logits_TE) if config.scores == "sigmoid" else logits_TE.log_softmax(-1)
        )
        biased_TE = log_scores_TE.detach().exp() + self.selection_bias.to(logits_TE.dtype)
        experts_TK = save_decision(
            lambda: self._within_groups(biased_TE).topk(config.top_k, dim=-1).indices
        )
        chosen_TK = log_scores_TE.gather(1, experts_TK)
        weights_TK = chosen_TK.softmax(-1) if config.renormalise else chosen_TK.exp()
        return Choice(
            experts_TK, config.route_scale * weights_TK, logits_TE, log_scores_TE.softmax(-1)
        )

    def _within_groups(self, biased_TE: Tensor) -> Tensor:
        """Returns the scores with −∞ for experts outside the row's best groups."""
        config = self.config
        if config.kept_groups == config.num_groups:
            return biased_TE
        grouped_TGA = biased_TE.unflatten(1, (config.num_groups, -1))
        score_TG = grouped_TGA.topk(2 if config.group_score == "top2" else 1, dim=-1).values.sum(-1)
        kept_TG = score_TG.topk(config.kept_groups, dim=-1).indices
        closed_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
        return grouped_TGA.masked_fill(closed_TG[..., None], float("-inf")).flatten(1)

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        """Adds `preferred`: the K largest unbiased scores, which the loss counts (V3, eq. 18).

        The bias learns from `load`.
        """
        preferred_TK = routing.logits_THA.squeeze(1).topk(self.config.top_k, dim=-1).indices
        counted_BE = count_chosen(preferred_TK, routing, batch_size, self.num_experts)
        sums = super().statistics(routing, batch_size) | {"preferred": counted_BE}
        if "document_load" in sums:
            sums |= document_sums(routing, chosen_TK=preferred_TK)
        return sums

    def counted(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Counts the experts that rows prefer without the bias."""
        return sums | {"load": sums["preferred"]}

    @torch.no_grad()
    def after_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """Moves the bias one step towards the experts with less than their share."""
        until = self.config.bias_until_step
        if until is None or step < until:
            load_E = totals["load"]
            self.selection_bias += self.config.bias_rate * (load_E.mean() - load_E).sign().to(
                self.selection_bias.dtype
            )
