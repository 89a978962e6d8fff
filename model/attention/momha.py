"""MoMHA, the Mixture of Multi-Head Attention of the Sparse Universal Transformer (arXiv 2310.07096;
after MoA, arXiv 2210.05144).

An attention expert is a pair of matrices: Q_e makes the queries of H heads, O_e reads those heads'
results. Every token picks K experts. Keys and values are dense and shared by all experts, so a
cache is as large as for one expert.

    q_j  = Q_jᵀ x                                      for each picked expert j
    k, v = W_k m, W_v m                                m: the rows themselves, or their halted states
    out  = Σ_j g_j · O_jᵀ concat_heads(softmax(q_j·k / √C + rel) v)
    rel  = (q_j·C^(−¼)) · relative[head, clip(key position − query position)]     learned, zero at the start, of all experts

As published, the scale is split over q and k, the relative term has only q's share, and it
has columns for later positions, which a causal model never reads. Cost per token: K·H rows of
scores.

Legend: B sequences, S new positions, M all positions (S and the cached ones), T = B·S tokens, D
model width, E experts, K experts of a token, H heads of an expert, C channels of a head, R
distances.
"""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.attention_config import MoMHAConfig
from ..config.feed_forward_config import ExpertsConfig
from ..config.model_config import ModelConfig
from ..initialise import Initializers, parameter, zeros
from ..layers import Linear
from ..moe import expert_linears
from ..routers.router import Router
from ..routers.sut import SutConfig, SutRouter
from ..routing import Routing, head_to_token_routes, token_to_head_routes
from .base import Attention, DepthContext


class MoMHA(Attention):
    """Attends with experts on Q and O, which share one routing."""

    roles: ClassVar = {"relative": "vector"}

    def __init__(self, config: ModelConfig, initializers: Initializers, *, backend: str) -> None:
        super().__init__(config.attention)
        assert isinstance(config.attention, MoMHAConfig)
        self.config, self.num_experts = config.attention, config.attention.num_experts
        d_model, width = config.d_model, self.config.num_heads * self.config.d_head
        self.router = SutRouter(
            _choice(config.attention, config.experts),
            d_model,
            self.num_experts,
            init=initializers.router(d_model),
        )
        linears, init = partial(expert_linears, backend=backend), initializers.attention_experts
        self.query = linears(self.num_experts, d_model, width, init=init(d_model))
        self.output = linears(self.num_experts, width, d_model, init=init(width))
        self.key = Linear(d_model, width, init=initializers.momha_dense(d_model))
        self.value = Linear(d_model, width, init=initializers.momha_dense(d_model))
        self.relative = parameter(
            self.config.num_heads, self.config.d_head, 2 * self.config.max_distance + 1, init=zeros
        )

    def routers(self) -> dict[str, Router]:
        """Returns the router of Q and O, under "attention"."""
        return {"attention": self.router}

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends with the Q and O experts that the router chooses; positions are relative.

        Halted tokens and padding get 0 and cost no expert.
        """
        batch, length, _ = n_BSD.shape
        router_input_BSD = n_BSD if router_input_BSD is None else router_input_BSD
        experts_TK, weights_TK, logits_TE = self.router.choose(router_input_BSD.flatten(0, 1))
        experts_TK1, weights_TK1 = experts_TK[..., None], weights_TK[..., None]
        query_routes = token_to_head_routes(
            experts_TK1, torch.ones_like(weights_TK1), num_experts=self.num_experts
        )
        output_routes = head_to_token_routes(experts_TK1, weights_TK1, num_experts=self.num_experts)
        routing = Routing(output_routes, logits_TE[:, None], wanted_TK=experts_TK)
        routing = routing.of_documents(context.rows)
        if context.rows is not None:
            query_routes = query_routes.without_padding(context.rows)
        if (unhalted := context.unhalted) is not None:
            value_input_BSD, weight_T = unhalted.memory_BSD, unhalted.weight_of_rows(batch * length)
            routing = routing.of_weighted_rows(weight_T)
            query_routes = query_routes.kept(weight_T[query_routes.source_N] > 0)
        q_UW = self.query(n_BSD.flatten(0, 1), query_routes)
        heads = (self.config.top_k, self.config.num_heads, self.config.d_head)
        q_BHKSC = q_UW.view(batch, length, *heads).permute(0, 3, 2, 1, 4)
        attended_BHKSC = self.attend(q_BHKSC, value_input_BSD, context)
        attended_UW = attended_BHKSC.permute(0, 3, 2, 1, 4).reshape(q_UW.shape)
        return self.output(attended_UW, routing.routes).view(n_BSD.shape), {"attention": routing}

    def attend(self, q_BHKSC: Tensor, memory_BSD: Tensor, context: DepthContext) -> Tensor:
        """Attends from every expert's queries, treated as extra positions, to the shared keys and
        values.
        """
        scale = self.config.d_head**-0.25
        q_BHKSC, k_BHSC, v_BHSC = (
            q_BHKSC * scale,
            self._heads(self.key(memory_BSD)) * scale,
            self._heads(self.value(memory_BSD)),
        )
        if context.cache is not None:
            k_BHSC, v_BHSC = context.cache.append(k_BHSC, v_BHSC)
        bias_BHKSM = self._relative_scores(q_BHKSC, k_BHSC.shape[2])
        if (visible_B1SS := context.visible_B1SS) is not None:
            bias_BHKSM = bias_BHKSM.masked_fill(~visible_B1SS[:, None], float("-inf"))
        attended_BHUC = F.scaled_dot_product_attention(
            q_BHKSC.flatten(2, 3), k_BHSC, v_BHSC, attn_mask=bias_BHKSM.flatten(2, 3), scale=1.0
        )
        return attended_BHUC.view_as(q_BHKSC)

    def _relative_scores(self, q_BHKSC: Tensor, total: int) -> Tensor:
        """Returns each score's distance term, and −∞ where the key is later than the query.

        The scores of all distances are laid out from far to near, and each row is shifted by its
        position (Transformer-XL, arXiv 1901.02860, appendix B). Without an index the backward pass
        is deterministic.
        """
        new, farthest = q_BHKSC.shape[3], self.config.max_distance - 1
        seen_HCR = self.relative[..., 1 : farthest + 2]  # from −farthest to 0
        scores_BHKSR = torch.einsum("bhksc,hcr->bhksr", q_BHKSC, seen_HCR)
        missing = total - 1 - farthest
        if missing > 0:
            scores_BHKSR = torch.cat(
                (scores_BHKSR[..., :1].expand(*scores_BHKSR.shape[:-1], missing), scores_BHKSR), -1
            )
        scores_BHKSM = scores_BHKSR[..., scores_BHKSR.shape[-1] - total :]
        shifted_BHKSM = (
            F.pad(scores_BHKSM, (1, 0)).flatten(-2)[..., new:].unflatten(-1, (new, total))
        )
        later_SM = torch.ones(new, total, dtype=torch.bool, device=q_BHKSC.device).triu(
            total - new + 1
        )
        return shifted_BHKSM.masked_fill(later_SM, float("-inf"))


def _choice(config: MoMHAConfig, experts: ExpertsConfig | None) -> SutConfig:
    """Returns the router's configuration; its loss has the sign of the feed-forward's."""
    router = None if experts is None else experts.router
    return SutConfig(
        top_k=config.top_k,
        sampled=config.sampled,
        mi_loss=config.balance,
        mi_sign=router.mi_sign if isinstance(router, SutConfig) else "corrected",
    )
