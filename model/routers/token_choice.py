"""Token choice: softmax over the experts, and every row takes its best K. Switch, GShard, OLMoE and
Mixtral are settings of it.

    Switch    top_k=1, a capacity factor (arXiv 2101.03961, eq. 1 to 6)
    GShard    top_k=2, renormalise, second_expert="random", a capacity factor, slot_major (arXiv 2006.16668, algorithm 1)
    OLMoE     top_k=8, z_loss=0.001, dropless (arXiv 2409.02060, §2)
    Mixtral   top_k=2, renormalise, dropless (arXiv 2401.04088, §2.1)

The balancing loss counts all choices; GShard and Switch as published count first choices only. An
expert's output changes only the logits of rows that chose it: a share K/E of all logits.

Legend: T rows, D their width, E experts, K experts chosen.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from ...kernels.fused.router import Gate
from ..execution.draws import draw_uniform
from ..execution.recompute import save_topk
from ..initialise import Initializer, parameter
from ..layers import own_dtype, router_logits
from .capacity import CapacityConfig, CapacityRouter
from .router import Choice


class TokenChoiceConfig(CapacityConfig):
    """Describes softmax gates with or without renormalisation and capacity."""

    kind: Literal["token_choice"] = "token_choice"
    renormalise: bool = False
    """Makes the K gate weights sum to 1: a softmax over the chosen logits."""

    bias: bool = False
    """Adds a learned number per expert to the logits (gpt-oss)."""

    second_expert: Literal["always", "random"] = "always"
    """With "random", training uses the second expert with probability min(1, 2·its renormalised
    weight); evaluation always uses it.
    """

    jitter: float = Field(default=0.0, ge=0, lt=1)
    """Multiplies the router's input by U(1 − jitter, 1 + jitter), in training."""

    @property
    def random_second(self) -> bool:
        """Returns whether training uses a row's second expert at random."""
        return self.second_expert == "random"

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.top_k == 1 and self.renormalise:
            raise ValueError(
                "top_k=1 with renormalise=true makes every gate weight 1, and the router learns "
                "nothing from the experts; set renormalise=false, or top_k to 2 or more"
            )
        if self.random_second and not (self.top_k == 2 and self.renormalise):
            raise ValueError(
                f'second_expert="random" with top_k={self.top_k}, '
                f"renormalise={str(self.renormalise).lower()}: its probability is twice its share of "
                "two renormalised gate weights; set top_k=2 and renormalise=true"
            )
        return self


class TokenChoiceRouter(CapacityRouter):
    """Gates with softmax, top-k, with or without a capacity."""

    Config = TokenChoiceConfig
    config: TokenChoiceConfig
    keeps_float32: ClassVar = ("bias",)

    def __init__(
        self, config: TokenChoiceConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)
        self.bias = parameter(num_experts, init=init) if config.bias else None

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses the K largest logits of every row, in one kernel where available
        (kernels/fused/router.py).
        """
        rows_TD = self._jittered(x_TD.to(own_dtype(x_TD, self.weight)))
        gate: Gate = "softmax_of_chosen" if self.config.renormalise else "softmax"
        found = None if self.config.bias else self.route_in_one(rows_TD, self.weight, gate=gate)
        if found is not None:
            return Choice.of(found)
        logits_TE = router_logits(rows_TD, self.weight)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.to(logits_TE.dtype)
        chosen_TK, experts_TK = save_topk(logits_TE, self.config.top_k)
        weights_TK = softmax_gates(chosen_TK, logits_TE, renormalise=self.config.renormalise)
        return Choice(experts_TK, weights_TK, logits_TE)

    def _jittered(self, x_TD: Tensor) -> Tensor:
        width = self.config.jitter
        if not self.training or width == 0:
            return x_TD
        noise_TD = 1 + width * (2 * draw_uniform(x_TD.shape, x_TD.device) - 1)
        return x_TD * noise_TD.to(x_TD.dtype)


def softmax_gates(chosen_TK: Tensor, logits_TE: Tensor, *, renormalise: bool) -> Tensor:
    """Returns the gates, (T, K): softmax over all experts, or only over the chosen ones."""
    if renormalise:
        return chosen_TK.softmax(-1)
    return (chosen_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()
