"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1, eq. 9 to 19).

    q   = W_q n, or W_uq · norm(W_dq n)          H heads of C + R channels
    c   , k_R = W_dkv n                            a latent of width L, and one key that rotates
    k, v = W_ukv · norm(c)                         H heads of C and of V channels
    y   = W_o · softmax(scale · [q_C, rope(q_R)]·[k, rope(k_R)]ᵀ + causal)·v

The cache holds the normalised latent and the rotated key, L + R numbers per token; keys and values of
earlier positions are read out of it again. The inner norms' eps is 1e-6 in every published model.

Legend: B sequences, S positions, M all positions (S and those cached), H heads, C channels without
position, R that rotate, V of a value, L width of the latent.
"""

from functools import partial

import torch
from torch import Tensor

from ..config.attention_config import MLAConfig
from ..config.model_config import ModelConfig
from ..initialise import Initializers
from ..layers import Linear, RMSNorm, neighbours_as_halves, rotate
from ..routing import Routing
from .base import Attention, DepthContext
from .visible import attend_visible


class LatentAttention(Attention):
    """Reads keys and values of all heads out of one latent per token."""

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__(config.attention)
        own = config.attention
        assert isinstance(own, MLAConfig)
        self.own = own
        self.scale = own.scale or (own.d_head + own.d_rotary) ** -0.5
        d_model, heads = config.d_model, own.num_heads
        width = heads * (own.d_head + own.d_rotary)

        def new(d_in: int, d_out: int, *, bias: bool = False, is_output: bool = False) -> Linear:
            init = partial(initializers.dense, is_output=is_output)(d_in)
            return Linear(d_in, d_out, init=init, bias=bias)

        if own.q_rank is None:
            self.query = new(d_model, width)
        else:
            self.query_down = new(d_model, own.q_rank, bias=own.bias)
            self.query_norm = RMSNorm(own.q_rank)
            self.query_up = new(own.q_rank, width)
        self.kv_down = new(d_model, own.kv_rank + own.d_rotary, bias=own.bias)
        self.kv_norm = RMSNorm(own.kv_rank)
        self.kv_up = new(own.kv_rank, heads * (own.d_head + own.d_value))
        self.output = new(heads * own.d_value, d_model, bias=own.bias, is_output=True)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the products."""
        return self.kv_up.weight.dtype

    def forward(
        self,
        value_input_BSD: Tensor,
        n_BSD: Tensor,
        context: DepthContext,
        *,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Routing]]:
        """Attends, and returns no routings."""
        assert context.rotary is not None
        assert context.unhalted is None, "only MoMHA supports halting"
        own, n_BSD = self.own, n_BSD.to(self.dtype)
        q_BHSC, q_BHSR = self._queries(n_BSD).split((own.d_head, own.d_rotary), -1)
        latent_BSL, k_BSR = self.kv_down(n_BSD).split((own.kv_rank, own.d_rotary), -1)
        latent_B1SL = self.kv_norm(latent_BSL).to(latent_BSL.dtype)[:, None]
        q_BHSR, k_B1SR = (self._rotated(x, context) for x in (q_BHSR, k_BSR[:, None]))
        if context.cache is not None:
            k_B1SR, latent_B1SL = context.cache.append(k_B1SR, latent_B1SL)
        k_BHMC, v_BHMV = self._keys_and_values(latent_B1SL.squeeze(1))
        k_BHMR = k_B1SR.expand(-1, own.num_heads, -1, -1)
        attended_BHSV = attend_visible(
            torch.cat((q_BHSC, q_BHSR), -1) * self.scale**0.5,
            torch.cat((k_BHMC, k_BHMR), -1) * self.scale**0.5,
            v_BHMV,
            context.documents,
        )
        return self.output(attended_BHSV.transpose(1, 2).flatten(2)), {}

    def _queries(self, n_BSD: Tensor) -> Tensor:
        is_direct = self.own.q_rank is None
        q_BSW = self.query(n_BSD) if is_direct else self.query_up(self._query_latent(n_BSD))
        return q_BSW.unflatten(-1, (self.own.num_heads, -1)).transpose(1, 2)

    def _query_latent(self, n_BSD: Tensor) -> Tensor:
        return self.query_norm(self.query_down(n_BSD))

    def _keys_and_values(self, latent_BML: Tensor) -> tuple[Tensor, Tensor]:
        both_BMHW = self.kv_up(latent_BML).unflatten(-1, (self.own.num_heads, -1))
        k_BHMC, v_BHMV = both_BMHW.transpose(1, 2).split((self.own.d_head, self.own.d_value), -1)
        return k_BHMC, v_BHMV

    def _rotated(self, x_BHSR: Tensor, context: DepthContext) -> Tensor:
        assert context.rotary is not None
        if self.own.positions.pairs == "neighbours":
            x_BHSR = neighbours_as_halves(x_BHSR, self.own.d_rotary)
        return rotate(x_BHSR, context.rotary)
