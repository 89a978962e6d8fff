"""Expert choice: every expert takes its best tokens, equally many for each (Zhou et al., arXiv
2202.09368).

    p = softmax over experts of x Wᵀ
    expert e takes the C tokens of a group with the largest p[·, e];  C = round(k/E · group size)
    y_t = Σ over the experts that took t of p[t, e] · expert_e(x_t)

It is balanced without a loss and its counts are known in advance, but a token may be taken by many
experts or by none, which leaves only the residual. Choosing among all tokens of a batch reads their
future, which a language model would learn to exploit. The causal form, from the granularity study
(arXiv 2402.07871) and Mixture of Tokens' comparison, chooses among the tokens at one position of
`sequences_per_group` sequences. Those authors add a LayerNorm to the layer's output (the model's
`output_norm`), which matters for experts smaller than a dense layer.

Legend: B sequences, T rows, D their width, G groups of M members, C members that an expert takes, E
experts, N = E·G·C routes.
"""

from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from ..execution.recompute import gather_unique, save_decision
from ..initialise import Initializer, parameter
from ..layers import own_dtype, router_logits
from ..routing import Routes, Routing
from .mixture import rows_by_position
from .router import Promises, Router, RouterConfig


class ExpertChoiceConfig(RouterConfig):
    """Describes expert choice by position across sequences, or flat over a micro-batch."""

    kind: Literal["expert_choice"] = "expert_choice"
    sequences_per_group: PositiveInt = 32
    """Sequences M that compete for an expert at each position; scope "flat" ignores it."""

    mean_experts: PositiveFloat = 1.0
    """Mean number of experts per token."""

    scope: Literal["position", "flat"] = "position"
    """Tokens that compete: "position", those at the same position of a group; "flat", all of a
    micro-batch, which reads the future.
    """

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(
            causal=self.scope == "position", batch_invariant=False, dropless=False, balanced=True
        )

    @property
    def group_sequences(self) -> int:
        """Returns how many sequences are routed together."""
        return self.sequences_per_group if self.scope == "position" else 1

    @property
    def reads_whole_sequences(self) -> bool:
        """Returns whether one position alone cannot be routed."""
        return self.scope == "flat"

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns how many experts take a row; flat counts one sequence as the micro-batch."""
        members = self.sequences_per_group if self.scope == "position" else sequence_rows
        return self.taken(num_experts, members) * num_experts / members

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        if self.mean_experts > num_experts:
            raise ValueError(
                f"router.mean_experts={self.mean_experts} is more than num_experts={num_experts}"
            )
        if self.scope == "position":
            self.taken(num_experts, self.sequences_per_group)

    def taken(self, num_experts: int, members: int) -> int:
        """Returns C: how many of a group's `members` an expert takes.

        Raises:
            ValueError: an expert would take no row.
        """
        wanted = self.mean_experts * members / num_experts
        if wanted < 0.5:
            least = -(-num_experts // (2 * self.mean_experts))
            by_position = self.scope == "position"
            unit = "sequences (router.sequences_per_group)" if by_position else "rows"
            raise ValueError(
                f"an expert would take round(router.mean_experts={self.mean_experts} · {members} "
                f"rows of a group / num_experts={num_experts}) = 0 rows: make groups of at least "
                f"{least:.0f} {unit}, or raise router.mean_experts"
            )
        return min(members, max(1, round(wanted)))


class ExpertChoiceRouter(Router):
    """Lets experts choose rows (arXiv 2202.09368), causally by position (arXiv 2402.07871)."""

    Config = ExpertChoiceConfig
    config: ExpertChoiceConfig

    def __init__(
        self, config: ExpertChoiceConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Routes the rows that experts take from every group, expert by expert, G·C for each.

        Padding is taken last, only if a group has fewer other rows than places.

        Raises:
            ValueError: the rows do not form whole groups.
        """
        logits_TE = router_logits(x_TD, self.weight)
        rows_GM = self._groups(x_TD.shape[0], batch_size, x_TD.device)
        taken = self.config.taken(self.num_experts, rows_GM.shape[1])
        # A router stored in bfloat16 rounds here, which makes ties; the first of equals wins.
        p_TE = logits_TE.softmax(-1).to(own_dtype(x_TD, self.weight)).to(logits_TE.dtype)
        p_EGM = p_TE.T[:, rows_GM]
        wish_EGM = p_EGM.detach()
        if real_T is not None:
            wish_EGM = wish_EGM.masked_fill(~real_T[rows_GM], -1.0)  # below every probability
        # A stable sort takes exactly C, the first of equals; a threshold might take more.
        members_EGC = save_decision(
            lambda: wish_EGM.sort(dim=-1, descending=True, stable=True).indices[..., :taken].clone()
        )
        weights_EGC = gather_unique(p_EGM, members_EGC)
        source_EGC = rows_GM.expand(self.num_experts, -1, -1).gather(2, members_EGC)
        routes = self._routes(source_EGC.reshape(-1), weights_EGC.reshape(-1), x_TD.shape[0])
        return Routing(routes, logits_TE[:, None])

    def _groups(self, num_rows: int, batch_size: int, device: torch.device) -> Tensor:
        if self.config.scope == "flat":
            return torch.arange(num_rows, device=device)[None]
        return rows_by_position(
            num_rows, batch_size, self.config.sequences_per_group, device=device
        )

    def _routes(self, source_N: Tensor, weight_N: Tensor, num_rows: int) -> Routes:
        per_expert = source_N.shape[0] // self.num_experts
        expert_N = torch.arange(self.num_experts, device=source_N.device).repeat_interleave(
            per_expert
        )
        return Routes(
            source_N,
            expert_N,
            weight_N,
            source_N,
            self.num_experts,
            num_rows,
            per_source=0,
            per_target=0,
            per_expert=per_expert,
        )
