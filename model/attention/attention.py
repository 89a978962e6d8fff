"""Causal self-attention with rotary positions: SwitchHead (experts on V and O) and dense attention.

MoMHA is in momha.py, multi-head latent attention in mla.py.

Legend: B sequences, S positions, M of keys (S and those cached), T = B·S tokens, D model width, H
heads of queries, V of keys and values, C channels of a head, A experts of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import runs_triton
from ...kernels.fused.router import Routed
from ...kernels.gradients import joined_product
from ..config.attention_config import (
    ATTENTION,
    DenseAttentionConfig,
    SwitchHeadConfig,
    WithPositionsConfig,
)
from ..config.model_config import ModelConfig
from ..initialise import Initializer, Initializers, parameter, zeros
from ..layers import Linear, RMSNorm, is_untouched, neighbours_as_halves, rotate_scaled
from ..moe import expert_linears
from ..routers.router import Router
from ..routers.sigmoid import SigmoidConfig, SigmoidRouter
from ..routing import Routes, Routing, head_to_token_routes, token_to_head_routes
from .base import Attention, DepthContext
from .mla import LatentAttention
from .momha import MoMHA
from .visible import attend_visible


class RotaryAttention(Attention):
    """Holds dense queries and keys with rotary positions; subclasses add V and O.

    The scale of the scores is split over q and k, which keeps low-precision products in range.
    """

    roles: ClassVar = {"qk_bias": "vector"}

    def __init__(self, config: ModelConfig, *, init: Initializer, backend: str) -> None:
        super().__init__(config.attention)
        attention = config.attention
        own = attention if isinstance(attention, DenseAttentionConfig) else DenseAttentionConfig()
        shared = attention if isinstance(attention, WithPositionsConfig) else own
        self.backend = backend  # of the experts; Triton's rotates in one kernel
        self.sinks: Tensor | None = None  # (H,), in the softmax; they add nothing
        self.window: int | None = None  # positions that each one sees; None: all before it
        self.kv_heads = own.num_kv_heads or self.num_heads
        self.half_scale = self.d_head**-0.25 if own.scale is None else own.scale**0.5
        widths = self.num_heads * self.d_head, self.kv_heads * self.d_head
        has_bias = own.bias != "none"
        self.query = Linear(config.d_model, widths[0], init=init, bias=has_bias)
        self.key = Linear(config.d_model, widths[1], init=init, bias=has_bias)
        self.is_repeated = config.num_repeats > 1
        self.qk_norm, self.neighbours = shared.qk_norm, 0
        self.qk_bias = self.query_norm = self.key_norm = None
        if shared.qk_bias:
            self.qk_bias = parameter(2, self.num_heads, 1, self.d_head, init=zeros)
        if isinstance(self.qk_norm, str):
            if self.qk_norm == "per_head":
                widths = self.d_head, self.d_head
            eps = {} if config.norm_eps is None else {"eps": config.norm_eps}
            self.query_norm, self.key_norm = (RMSNorm(width, **eps) for width in widths)
        if shared.rotary.pairs == "neighbours":
            self.neighbours = shared.rotary_channels

    def _queries_and_keys(self, n_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries (B, H, S, C) and keys (B, V, S, C) before they rotate."""
        if self._joins(n_BSD):
            q_BSW, k_BSW = joined_product(n_BSD, self.query.weight, self.key.weight)
        else:
            q_BSW, k_BSW = self.query(n_BSD), self.key(n_BSD)
        if self.qk_norm == "all_heads":
            q_BSW, k_BSW = self._normed(q_BSW, k_BSW)
        q_BHSC, k_BVSC = self._heads(q_BSW), self._heads(k_BSW)
        if self.qk_bias is not None:
            bias_2H1C = self.qk_bias.to(q_BHSC.dtype)
            q_BHSC, k_BVSC = q_BHSC + bias_2H1C[0], k_BVSC + bias_2H1C[1]
        if self.qk_norm == "per_head":
            q_BHSC, k_BVSC = self._normed(q_BHSC, k_BVSC)
        elif self.qk_norm is True:
            q_BHSC, k_BVSC = (F.rms_norm(x, (self.d_head,)) for x in (q_BHSC, k_BVSC))
        if self.neighbours:
            q_BHSC, k_BVSC = (neighbours_as_halves(x, self.neighbours) for x in (q_BHSC, k_BVSC))
        return q_BHSC, k_BVSC

    def _joins(self, n_BSD: Tensor) -> bool:
        """Returns whether queries and keys are one product: in training, where a layer is shared and
        Triton runs. Changed or watched matrices are called as they are.
        """
        return (
            self.is_repeated
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and runs_triton(self.backend, n_BSD.device, n_BSD.dtype)
            and all(is_untouched(matrix) for matrix in (self.query, self.key))
        )

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.query_norm is not None
        assert self.key_norm is not None
        return self.query_norm(q).to(q.dtype), self.key_norm(k).to(k.dtype)

    def attend(self, n_BSD: Tensor, v_BVSC: Tensor, context: DepthContext) -> Tensor:
        """Returns softmax(scale · rope(q)·rope(k)ᵀ + causal)·v for every head, (B, H, S, C).

        With a cache the new positions follow the cached ones: queries and keys rotate by absolute
        position, and every new query sees the whole past, or its window of it.
        """
        assert context.rotary is not None
        assert context.unhalted is None, "only MoMHA supports halting"
        # cast once for both products, which keep it for the backward pass
        n_BSD = n_BSD.to(self.query.weight.dtype)
        q_BHSC, k_BVSC = rotate_scaled(
            *self._queries_and_keys(n_BSD),
            context.rotary,
            scale=self.half_scale,
            backend=self.backend,
        )
        v_BVSC = v_BVSC.to(q_BHSC.dtype)
        if context.cache is not None:
            k_BVSC, v_BVSC = context.cache.append(k_BVSC, v_BVSC)
        return attend_visible(
            q_BHSC, k_BVSC, v_BVSC, context.documents, window=self.window, sinks_H=self.sinks
        )


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
        choice = SigmoidConfig(top_k=config.attention.top_k, balance=config.attention.balance)
        self.value_router, self.output_router = (
            SigmoidRouter(
                choice,
                d_model,
                self.num_experts,
                init=initializers.attention_router(),
                num_heads=heads,
            )
            for _ in range(2)
        )
        self.value_router.backend = self.output_router.backend = backend
        linears, init = partial(expert_linears, backend=backend), initializers.attention_experts
        self.value = linears(self.num_experts, d_model, d_head, init=init(d_model))
        self.output = linears(self.num_experts, d_head, d_model, init=init(heads * d_head))

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
        both = self.value_router.choose_beside(self.output_router, n_TD)
        found = both[0] if both else self.value_router.choose_per_head(n_TD)
        value_routing = self._routing(token_to_head_routes, found, context)
        v_UC = self.value(value_input_BSD.flatten(0, 1), value_routing.routes)
        v_BHSC = v_UC.view(batch, length, heads, channels).transpose(1, 2)
        attended_BHSC = self.attend(n_BSD, v_BHSC, context)
        found = both[1] if both else self.output_router.choose_per_head(n_TD)
        output_routing = self._routing(head_to_token_routes, found, context)
        attended_UC = attended_BHSC.transpose(1, 2).reshape(-1, channels)
        y_TD = self.output(attended_UC, output_routing.routes)
        routings = {"value": value_routing, "output": output_routing}
        return y_TD.unflatten(0, (batch, length)), routings

    def _routing(
        self, as_routes: Callable[..., Routes], found: Routed, context: DepthContext
    ) -> Routing:
        routes = as_routes(
            found.experts_THK,
            found.gates_THK,
            num_experts=self.num_experts,
            equal_blocks=context.equal_rows,
        )
        routing = Routing(routes, found.logits_THA).with_sums(found.sums_BHA)
        return routing.of_documents(context.rows)


class DenseAttention(RotaryAttention):
    """Makes V and O dense matrices; V queries' heads can share a head of keys and values.

    SwitchHead with one expert per head becomes this plus a gate, a sigmoid of the normalised row
    that multiplies each head's result, as in the official MoEUT release.
    """

    def __init__(
        self, config: ModelConfig, initializers: Initializers, *, backend: str, member: int = 0
    ) -> None:
        attention = config.attention
        gated = attention.kind == "switchhead"
        rule = initializers.switchhead if gated else initializers.dense
        output = rule if gated else partial(initializers.dense, is_output=True)
        super().__init__(config, init=rule(config.d_model), backend=backend)
        bias = attention.bias if isinstance(attention, DenseAttentionConfig) else "none"
        width = self.num_heads * self.d_head
        self.value = Linear(
            config.d_model,
            self.kv_heads * self.d_head,
            init=rule(config.d_model),
            bias=bias != "none",
        )
        self.output = Linear(width, config.d_model, init=output(width), bias=bias == "qkvo")
        self.head_gate = (
            Linear(config.d_model, self.num_heads, init=rule(config.d_model)) if gated else None
        )
        if isinstance(attention, DenseAttentionConfig):
            self.window = attention.window_of(member)
            if attention.sinks:
                self.sinks = parameter(self.num_heads, init=initializers.sinks())

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
        v_BVSC = self._heads(self.value(n_BSD if same_input else value_input_BSD))
        attended_BSHC = self.attend(n_BSD, v_BVSC, context).transpose(1, 2)
        if self.head_gate is not None:
            attended_BSHC = attended_BSHC * torch.sigmoid(self.head_gate(n_BSD))[..., None]
        return self.output(attended_BSHC.flatten(2)), {}


def make_attention(
    config: ModelConfig, initializers: Initializers, member: int, *, backend: str
) -> Attention:
    """Builds the attention that `config` selects, of a layer of the group."""
    if config.attention.kind not in ATTENTION.classes:
        return ATTENTION.entry(config.attention.kind)(config, initializers, backend=backend)
    if config.attention.kind == "momha":
        return MoMHA(config, initializers, backend=backend)
    if config.attention.kind == "mla":
        return LatentAttention(config, initializers)
    if config.attention.expert_count:
        return SwitchHead(config, initializers, backend=backend)
    return DenseAttention(config, initializers, backend=backend, member=member)
