"""The router of the Sparse Universal Transformer (arXiv 2310.07096): a small network, softmax,
top-k, renormalised gates.

Its loss maximises the mutual information of rows x and experts e, I(e; x) = H(e) − H(e|x) (after
Mod-Squad, arXiv 2212.08066): many experts in use, and every row certain of its own. With row
weights q, Σ q = 1, over all rows of a micro-batch and all depth steps of the shared layer together,
and P_e = Σ q·p_e,

    corrected      H(e|x) − H(e) = −Σ q·p ln p + Σ_e P_e ln P_e         −ln E at best, 0 at worst
    as_published   H(e|x) + H(e) = −Σ q·p ln p − Σ_e P_e ln P_e         0 when all rows share one expert

SUT's released code, and the MoEUT authors' port (arXiv 2405.16039), compute the second: the
marginal term has the opposite sign of the stated aim, and rewards collapse. Without halting the
port also divides by the number of probabilities, T·E, instead of rows, T. "as_published" reproduces
both.

With halting, q is the probability that a row has not halted (model/loops/halting.py), and the loss has a
gradient through it.

Legend: B sequences, T rows (B·S, sequence-major), D their width, E experts, K experts chosen.
"""

from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from ..balance import RunningSum
from ..execution.draws import draw_uniform
from ..execution.recompute import save_decision
from ..initialise import Initializer, uniform
from ..layers import Linear, wide_dtype
from ..routing import Routing, token_routes
from .router import Loss, Promises, Router, TopKConfig


class SutConfig(TopKConfig):
    """Describes SUT's router: a two-layer network, softmax, top-k, renormalised gates.

    Its loss is on the mutual information of rows and experts.
    """

    kind: Literal["sut"] = "sut"
    top_k: PositiveInt = 2
    """Experts per token."""

    sampled: NonNegativeInt = 0
    """How many of the K experts are drawn by probability, in training; the others are the best."""

    mi_loss: NonNegativeFloat = 0.001
    """Weight of the mutual-information loss."""

    mi_sign: Literal["corrected", "as_published"] = "corrected"
    """Sign of the mutual-information loss, also for MoMHA."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row."""
        return 2 * d_row * (d_row + num_experts)

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        super().check(num_experts)
        if self.sampled > self.top_k:
            raise ValueError(
                f"router.sampled={self.sampled} is more than router.top_k={self.top_k}: sample at "
                "most top_k experts"
            )


class SutRouter(Router):
    """Scores with softmax(W_b tanh(W_a x + b_a)); the K gates are p / (Σ p + 1e-6)."""

    Config = SutConfig
    config: SutConfig

    def __init__(
        self, config: SutConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.hidden = Linear(d_row, d_row, init=init, bias=True, bias_init=uniform(d_row**-0.5))
        self.output = Linear(d_row, num_experts, init=init)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses experts (T, K) int64, with gate weights (T, K) and logits (T, E), both
        float32.
        """
        logits_TE = self.output(torch.tanh(self.hidden(x_TD)))
        logits_TE = logits_TE.to(wide_dtype(logits_TE))
        probabilities_TE = logits_TE.softmax(-1)
        chosen_TK = self._chosen(probabilities_TE.detach())
        experts_TK = save_decision(lambda: chosen_TK)
        weights_TK = probabilities_TE.gather(1, experts_TK)
        return experts_TK, weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-6), logits_TE

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Sends every row through its chosen experts and back into itself."""
        experts_TK, weights_TK, logits_TE = self.choose(x_TD)
        routes = token_routes(experts_TK, weights_TK, num_experts=self.num_experts)
        return Routing(routes, logits_TE[:, None], wanted_TK=experts_TK)

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        """Sums per sequence the mutual information's terms, with q not yet normalised.

        These are `probability` Σ q·p (B, E), `certainty` Σ q·p ln p (B,) and `mass` Σ q (B,).
        """
        logits_TE = routing.logits_THA.squeeze(1)
        log_p_BSE = logits_TE.log_softmax(-1).unflatten(0, (batch_size, -1))
        p_BSE = log_p_BSE.exp()
        q_BS = (
            torch.ones_like(p_BSE[..., 0])
            if routing.row_weight_T is None
            else routing.row_weight_T.view(batch_size, -1)
        )
        if routing.rows is not None and routing.rows.real_T is not None:
            q_BS = q_BS * routing.rows.real_T.view(batch_size, -1)
        quirk = (
            self.num_experts
            if routing.row_weight_T is None and self.config.mi_sign == "as_published"
            else 1
        )
        return {
            "probability": (q_BS[..., None] * p_BSE).sum(1),
            "certainty": (q_BS * (p_BSE * log_p_BSE).sum(-1)).sum(1),
            "mass": quirk * q_BS.sum(1),
        }

    def losses(self, sums: dict[str, Tensor], running: RunningSum) -> list[Loss]:
        """Computes the mutual-information term over the micro-batch, as sequences' shares."""
        if not self.config.mi_loss:
            return []
        # a micro-batch of padding alone gives 0 instead of NaN
        mass = sums["mass"].sum().clamp_min(torch.finfo(sums["mass"].dtype).tiny)
        p_BE = sums["probability"] / mass
        # An expert whose softmax underflows everywhere adds 0 instead of NaN.
        negative_marginal_B = (
            p_BE * p_BE.sum(0).clamp_min(torch.finfo(p_BE.dtype).tiny).log()
        ).sum(1)
        conditional_B = -sums["certainty"] / mass
        sign = 1 if self.config.mi_sign == "corrected" else -1
        value_B = len(p_BE) * (conditional_B + sign * negative_marginal_B)
        return [Loss("mutual_information", value_B, self.config.mi_loss, mean_over_layers=False)]

    def _chosen(self, probabilities_TE: Tensor) -> Tensor:
        """Chooses the K best; in training draws the last `sampled` of them.

        Draws use p + 1e-6 of the remaining experts: with u uniform, the largest p / −ln u are a draw
        without replacement.
        """
        top_k, sampled = self.config.top_k, self.config.sampled if self.training else 0
        best_TK = probabilities_TE.topk(top_k - sampled, dim=1).indices
        if not sampled:
            return best_TK
        race_TE = -draw_uniform(probabilities_TE.shape, probabilities_TE.device).log()
        left_TE = ((probabilities_TE + 1e-6) / race_TE).scatter(1, best_TK, -1.0)
        return torch.cat((best_TK, left_TE.topk(sampled, dim=1).indices), 1)
