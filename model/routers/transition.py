"""Transition tuning: a run starts as Mixture of Tokens and continues as a Switch with the same
weights (arXiv 2310.15961).

Until `switch_step` optimizer steps are done the router mixes (mixture.py). From then on every token
takes the expert of its largest softmax, weighted by it, with an optional capacity and the balancing
loss (Switch, arXiv 2101.03961, eq. 1 to 6). Router weight, experts, optimizer state, learning rate
and data are unaffected. The result needs no group context.

The loss jumps at the switch, for two reasons. Mixing normalises over tokens and choosing over
experts, so an offset that all tokens' logits for one expert share is invisible to the first and
decides the load of the second. And an expert's outputs have weights 1/E to 1 where the mixture's
had 1/M to 1. `calibrate`, which is not part of the published method, removes the first: it keeps
every expert's mean logit over the last mixing step's global batch, and subtracts it once the router
chooses.

The authors switch from E = M experts to one expert per token. With E = M·m smaller experts, top_k =
m keeps a token's cost. Their capacity is assigned sequence by sequence (`token_major`), which lets
later positions of other sequences take a token's place; the default here is `position_major`.

Legend: B sequences, T rows, D their width, G groups of M members, E experts.
"""

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from ..balance import RunningSum, rows_per_sequence, sum_per_sequence
from ..execution.recompute import save_topk
from ..initialise import Initializer, parameter
from ..layers import router_logits
from ..routing import Mixture, Routing
from .capacity import CapacityConfig, CapacityRouter
from .mixture import group_of_one, rows_by_position
from .router import Choice, Loss, Promises
from .token_choice import softmax_gates


class TransitionConfig(CapacityConfig):
    """Describes Mixture of Tokens followed by Switch with losses, capacity and `top_k`."""

    kind: Literal["transition"] = "transition"
    sequences_per_group: PositiveInt = 32
    """Sequences M of a group, while mixing."""

    switch_step: PositiveInt = 150_000
    """Optimizer steps that mix; later ones choose."""

    calibrate: bool = False
    """Subtracts every expert's mean logit of the last mixing step once tokens choose."""

    @property
    def promises(self) -> Promises:
        """Returns what both halves of the run guarantee."""
        return replace(super().promises, batch_invariant=False)

    @property
    def evaluation_promises(self) -> Promises:
        """Returns what this configuration guarantees in evaluation."""
        return replace(super().evaluation_promises, batch_invariant=False)

    @property
    def group_sequences(self) -> int:
        """Returns how many sequences are routed together."""
        return self.sequences_per_group

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns the experts per row while mixing, which equals `top_k` afterwards."""
        return num_experts / self.sequences_per_group

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row while mixing, three times those afterwards."""
        return 6 * d_row * num_experts

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        super().check(num_experts)
        if num_experts != self.sequences_per_group * self.top_k:
            raise ValueError(
                f"num_experts={num_experts} must be "
                f"router.sequences_per_group={self.sequences_per_group} × router.top_k={self.top_k} "
                f"= {self.sequences_per_group * self.top_k}, so that a token costs the same before "
                "and after the transition"
            )

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.sequences_per_group == 1:
            raise ValueError(group_of_one("sequences_per_group"))
        return self


class TransitionRouter(CapacityRouter):
    """Mixes or chooses with one weight, depending on the steps done."""

    Config = TransitionConfig
    config: TransitionConfig
    mean_logit: Tensor

    def __init__(
        self, config: TransitionConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)
        self.register_buffer("mean_logit", torch.zeros(num_experts))
        self.mixes = True
        self.before_step(0)

    @property
    def group_context_size(self) -> int:
        """Returns how many sequences must accompany one in evaluation."""
        return self.config.sequences_per_group - 1 if self.mixes else 0

    def before_step(self, step: int) -> None:
        """Switches from mixing to choosing once `switch_step` steps are done."""
        self.mixes = step < self.config.switch_step
        self.carried = ("logits", "rows") if self.mixes and self.config.calibrate else ()

    def after_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """Keeps this step's mean logits; those of the last mixing step that was not skipped
        remain.
        """
        self.mean_logit.copy_(totals["logits"] / totals["rows"])

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Plans a mixture, or routes.

        Raises:
            ValueError: while mixing, the sequences do not form whole groups.
        """
        if not self.mixes:
            return super().forward(x_TD, batch_size=batch_size, real_T=real_T)
        logits_TE = self._logits(x_TD)
        rows_GM = rows_by_position(
            x_TD.shape[0], batch_size, self.config.sequences_per_group, device=x_TD.device
        )
        weights_GME = logits_TE[rows_GM].softmax(1)
        return Routing(
            Mixture(rows_GM, weights_GME, weights_GME, self.num_experts), logits_TE[:, None]
        )

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses the best experts, weighted by their probabilities."""
        logits_TE = self._logits(x_TD)
        logits_TE = logits_TE - self.mean_logit.to(logits_TE.dtype)
        chosen_TK, experts_TK = save_topk(logits_TE, self.config.top_k)
        weights_TK = softmax_gates(chosen_TK, logits_TE, renormalise=False)
        return Choice(experts_TK, weights_TK, logits_TE)

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        """Sums the logits while mixing, for calibration."""
        if not self.mixes:
            return super().statistics(routing, batch_size)
        logits_TE = routing.logits_THA.detach().flatten(1)
        return {
            "logits": sum_per_sequence(logits_TE, routing, batch_size),
            "rows": rows_per_sequence(routing, batch_size),
        }

    def losses(self, sums: dict[str, Tensor], running: RunningSum) -> list[Loss]:
        """Returns the Switch's losses; none while mixing."""
        return [] if self.mixes else super().losses(sums, running)

    def _logits(self, x_TD: Tensor) -> Tensor:
        return router_logits(x_TD, self.weight)
