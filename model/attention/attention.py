"""Causal self-attention with rotary positions: SwitchHead (experts on V and O) and dense attention.

MoMHA is in momha.py.

Legend: B sequences, S positions, M of keys (S and those cached), T = B·S tokens, D model width, H
heads, C channels of a head, A experts of a head.
"""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.attention_config import (
    ATTENTION,
    RotaryConfig,
    SwitchHeadConfig,
    WithPositionsConfig,
)
from ..config.model_config import ModelConfig
from ..documents import Documents
from ..experts import ExpertLinears
from ..initialise import Initializer, Initializers, parameter, zeros
from ..layers import Linear, neighbours_as_halves, rotate_scaled
from ..moe import SparseLayer
from ..routers.router import Router
from ..routers.sigmoid import SigmoidConfig, SigmoidRouter
from ..routing import Routing, head_to_token_routes, token_to_head_routes
from .base import Attention, DepthContext
from .momha import MoMHA

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)


class RotaryAttention(Attention):
    """Holds dense queries and keys with rotary positions; subclasses add V and O.

    The scale C^(−1/2) is split over q and k, which keeps low-precision products in range.
    """

    def __init__(self, config: ModelConfig, *, init: Initializer, backend: str) -> None:
        super().__init__(config.attention)
        self.backend = backend  # of the experts; Triton's rotates in one kernel
        width = self.num_heads * self.d_head
        self.query = Linear(config.d_model, width, init=init)
        self.key = Linear(config.d_model, width, init=init)
        self.qk_bias, self.qk_norm, self.neighbours = None, False, 0
        attention = config.attention
        if isinstance(attention, WithPositionsConfig):
            self.qk_norm, positions = attention.qk_norm, attention.positions
            if attention.qk_bias:
                self.qk_bias = parameter(2, self.num_heads, 1, self.d_head, init=zeros)
            if isinstance(positions, RotaryConfig) and positions.pairs == "neighbours":
                self.neighbours = attention.rotary_channels

    def _queries_and_keys(self, n_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys before they rotate, (B, H, S, C) each."""
        q_BHSC, k_BHSC = self._heads(self.query(n_BSD)), self._heads(self.key(n_BSD))
        if self.qk_bias is not None:
            bias_2H1C = self.qk_bias.to(q_BHSC.dtype)
            q_BHSC, k_BHSC = q_BHSC + bias_2H1C[0], k_BHSC + bias_2H1C[1]
        if self.qk_norm:
            q_BHSC, k_BHSC = (F.rms_norm(x, (self.d_head,)) for x in (q_BHSC, k_BHSC))
        if self.neighbours:
            q_BHSC, k_BHSC = (neighbours_as_halves(x, self.neighbours) for x in (q_BHSC, k_BHSC))
        return q_BHSC, k_BHSC

    def attend(self, n_BSD: Tensor, v_BHSC: Tensor, context: DepthContext) -> Tensor:
        """Returns softmax(rope(q)·rope(k)ᵀ / √C + causal)·v for every head, (B, H, S, C).

        With a cache the new positions follow the cached ones: queries and keys rotate by absolute
        position, and every new query sees the whole past.
        """
        assert context.rotary is not None
        assert context.unhalted is None, "only MoMHA supports halting"
        # cast once for both products, which keep it for the backward pass
        n_BSD = n_BSD.to(self.query.weight.dtype)
        scale = self.d_head**-0.25
        q_BHSC, k_BHSC = rotate_scaled(
            *self._queries_and_keys(n_BSD),
            context.rotary,
            scale=scale,
            backend=self.backend,
        )
        v_BHSC = v_BHSC.to(q_BHSC.dtype)
        if context.cache is not None:
            k_BHSC, v_BHSC = context.cache.append(k_BHSC, v_BHSC)
        return attend_visible(q_BHSC, k_BHSC, v_BHSC, context.documents)


class SwitchHead(RotaryAttention):
    """Makes V and O mixtures of experts, one per head (arXiv 2312.07987, eq. 7 to 10).

    The V router decides for the key/value token ("source side"), the O router for the query token
    ("destination side"). Both read the normalised rows, as do Q and K; the V experts read
    `value_input`.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers, *, backend: str) -> None:
        super().__init__(config, init=initializers.switchhead(config.d_model), backend=backend)
        assert isinstance(config.attention, SwitchHeadConfig)
        heads, d_model, d_head = config.attention.num_heads, config.d_model, config.attention.d_head
        self.num_experts = config.attention.expert_count
        choice = SigmoidConfig(
            top_k=config.attention.top_k,
            balance=config.attention.balance,
        )
        init = initializers.attention_router()
        self.value_router = SigmoidRouter(
            choice, d_model, self.num_experts, init=init, num_heads=heads
        )
        self.output_router = SigmoidRouter(
            choice, d_model, self.num_experts, init=init, num_heads=heads
        )
        self.value_router.backend = self.output_router.backend = backend
        value_init, output_init = (
            initializers.attention_experts(d_model),
            initializers.attention_experts(heads * d_head),
        )
        self.value = SparseLayer(
            ExpertLinears(self.num_experts, d_model, d_head, backend=backend, init=value_init)
        )
        self.output = SparseLayer(
            ExpertLinears(self.num_experts, d_head, d_model, backend=backend, init=output_init)
        )

    def routers(self) -> dict[str, Router]:
        """Returns the routers of V and of O."""
        return {"value": self.value_router, "output": self.output_router}

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends with the V and O experts that each head's routers choose."""
        batch, length, _ = n_BSD.shape
        heads, channels = self.num_heads, self.d_head
        n_TD = (n_BSD if router_input_BSD is None else router_input_BSD).flatten(0, 1)
        experts_THK, weights_THK, value_logits = self.value_router.choose_per_head(n_TD)
        value_routes = token_to_head_routes(
            experts_THK, weights_THK, num_experts=self.num_experts, equal_blocks=context.equal_rows
        )
        value_routing = Routing(value_routes, value_logits).of_documents(context.rows)
        v_UC = self.value(value_input_BSD.flatten(0, 1), value_routing.routes)
        v_BHSC = v_UC.view(batch, length, heads, channels).transpose(1, 2)
        attended_BHSC = self.attend(n_BSD, v_BHSC, context)
        experts_THK, weights_THK, output_logits = self.output_router.choose_per_head(n_TD)
        output_routes = head_to_token_routes(
            experts_THK, weights_THK, num_experts=self.num_experts, equal_blocks=context.equal_rows
        )
        output_routing = Routing(output_routes, output_logits).of_documents(context.rows)
        attended_UC = attended_BHSC.transpose(1, 2).reshape(-1, channels)
        y_TD = self.output(attended_UC, output_routing.routes)
        routings = {"value": value_routing, "output": output_routing}
        return y_TD.unflatten(0, (batch, length)), routings


class DenseAttention(RotaryAttention):
    """Makes V and O dense matrices.

    SwitchHead with one expert per head becomes this plus a gate, a sigmoid of the normalised row
    that multiplies each head's result, as in the official MoEUT release.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers, *, backend: str) -> None:
        gated = config.attention.kind == "switchhead"
        rule = initializers.switchhead if gated else initializers.dense
        output = rule if gated else partial(initializers.dense, is_output=True)
        super().__init__(config, init=rule(config.d_model), backend=backend)
        width = config.attention.num_heads * config.attention.d_head
        self.value = Linear(config.d_model, width, init=rule(config.d_model))
        self.output = Linear(width, config.d_model, init=output(width))
        self.head_gate = (
            Linear(config.d_model, config.attention.num_heads, init=rule(config.d_model))
            if gated
            else None
        )

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Computes dense attention, and returns no routings."""
        same_input = value_input_BSD is n_BSD
        n_BSD = n_BSD.to(self.query.weight.dtype)  # cast once for all products
        v_BHSC = self._heads(self.value(n_BSD if same_input else value_input_BSD))
        attended_BSHC = self.attend(n_BSD, v_BHSC, context).transpose(1, 2)
        if self.head_gate is not None:
            attended_BSHC = attended_BSHC * torch.sigmoid(self.head_gate(n_BSD))[..., None]
        return self.output(attended_BSHC.flatten(2)), {}


def attend_visible(
    q_BHSC: Tensor, k_BHMC: Tensor, v_BHMC: Tensor, documents: Documents | None
) -> Tensor:
    """Returns softmax(q·kᵀ + causal)·v, within documents if attention respects them, (B, H, S, C).

    Queries and keys are scaled already; the queries are the last S of M positions. Documents need a
    mask only where torch's variable-length attention does not run, as in float32.
    """
    new, total, channels = q_BHSC.shape[2], k_BHMC.shape[2], q_BHSC.shape[3]
    if documents is None or documents.positions_BS is None:
        if new == total:
            return F.scaled_dot_product_attention(q_BHSC, k_BHMC, v_BHMC, is_causal=True, scale=1.0)
        visible = torch.ones(new, total, dtype=torch.bool, device=q_BHSC.device).tril(total - new)
    elif documents.offsets is None or q_BHSC.dtype not in _VARLEN_DTYPES or channels > 256:
        visible = documents.visible_B1SS
    else:
        return _attend_runs(q_BHSC, k_BHMC, v_BHMC, documents.offsets, documents.longest)
    return F.scaled_dot_product_attention(q_BHSC, k_BHMC, v_BHMC, attn_mask=visible, scale=1.0)


def _attend_runs(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attends within each run of rows laid end to end; every tensor is (B, H, S, C)."""
    from torch.nn.attention.varlen import varlen_attn  # late: imports torch's compiler, seconds

    batch, _, length, channels = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if missing := -channels % 8:  # of what the kernel takes
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    runs, causal = (offsets, offsets, longest, longest), (-1, 0)
    attended_THC = cast(Tensor, varlen_attn(q, k, v, *runs, scale=1.0, window_size=causal))
    return attended_THC.narrow(-1, 0, channels).unflatten(0, (batch, length)).transpose(1, 2)


def make_attention(config: ModelConfig, initializers: Initializers, *, backend: str) -> Attention:
    """Builds the attention that `config` selects."""
    if config.attention.kind not in ATTENTION.classes:
        return ATTENTION.entry(config.attention.kind)(config, initializers, backend=backend)
    if config.attention.kind == "momha":
        return MoMHA(config, initializers, backend=backend)
    if config.attention.expert_count:
        return SwitchHead(config, initializers, backend=backend)
    return DenseAttention(config, initializers, backend=backend)
