"""The whole model: embed, repeat the group of layers, read out.

    x = Emb[tokens]
    for r in range(R):            # repeats, outer
        for layer in group:       # group members, inner: A B A B …; the same weights for every r
            x = layer(x)
    logits = W_out · LN(x) + b    # untied from the embedding

MoEUT (arXiv 2405.16039) has nothing step-dependent: no layer embedding, no halting, no residual scaling. The residual stream
is float32 in every precision. Cost of one token and depth step, in multiply-accumulates: attention
(2 k_A + 2)·D·H·C plus the scores, feed-forward 2·K·F·D, routers (E + 2·H·N_A)·D.

Legend: B sequences, S positions, D model width, V vocabulary, L depth steps, G layers in a group, R = L/G repeats.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import LayerCache, make_attention
from .balance import DepthLoad, RouterReport, collect_loads, negative_entropy, report_routing
from .config import ModelConfig
from .layers import LayerNorm, Linear
from .moe import SigmaMoE


@dataclass(frozen=True)
class ModelOutput:
    """Logits, and what the routers of all depth steps did."""

    logits_BSV: Tensor
    regularisation_B: Tensor  # float32, per sequence; zero in evaluation mode
    loads: dict[str, DepthLoad]  # by kind of router: feed_forward, value, output


class DenseFeedForward(nn.Module):
    """W2 relu(W1 x + b1) + b2: the baseline's feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.d_feed_forward, bias=True)
        self.down = Linear(config.d_feed_forward, config.d_model, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) to (…, D)."""
        return self.down(self.up(x).relu_())


class Layer(nn.Module):
    """Attention and feed-forward with their residual connections.

    Peri-layernorm: a norm stands only before a map whose result goes into a softmax or sigmoid (queries, keys, routers);
    values and experts read the raw residual, so an update scales with the residual it is added to. Pre-layernorm: all read
    the normalised rows.
    """

    def __init__(self, config: ModelConfig, *, backend: str) -> None:
        super().__init__()
        self.raw_values = config.norm == "peri"
        self.attention_norm = LayerNorm(config.d_model)
        self.attention = make_attention(config, backend=backend)
        self.feed_forward_norm = LayerNorm(config.d_model)
        sparse = config.feed_forward == "sigma_moe"
        self.feed_forward = SigmaMoE(config, backend=backend) if sparse else DenseFeedForward(config)

    def forward(self, x_BSD: Tensor, cache: LayerCache | None) -> tuple[Tensor, dict[str, RouterReport]]:
        """(B, S, D) float32 to (B, S, D) float32."""
        n_BSD = self.attention_norm(x_BSD)
        y_BSD, routings = self.attention(x_BSD if self.raw_values else n_BSD, n_BSD, cache)
        x_BSD = x_BSD + y_BSD
        n_BSD = self.feed_forward_norm(x_BSD)
        values_BSD = x_BSD if self.raw_values else n_BSD
        if isinstance(self.feed_forward, SigmaMoE):
            y_TD, routings["feed_forward"] = self.feed_forward(values_BSD.flatten(0, 1), n_BSD.flatten(0, 1))
            y_BSD = y_TD.view_as(x_BSD)
        else:
            y_BSD = self.feed_forward(n_BSD)
        batch = x_BSD.shape[0]
        return x_BSD + y_BSD, {kind: report_routing(routing, batch) for kind, routing in routings.items()}


class Transformer(nn.Module):
    """MoEUT or one of its relatives, as `config` says.

    Built without values: `initialise` (model/initialise.py) or a checkpoint fills them.
    """

    def __init__(self, config: ModelConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.group = nn.ModuleList(Layer(config, backend=backend) for _ in range(config.group_size))
        self.final_norm = LayerNorm(config.d_model)
        self.head = Linear(config.d_model, config.vocab_size, bias=True)

    def forward(self, tokens_BS: Tensor, cache: list[LayerCache] | None = None) -> ModelOutput:
        """Next-token logits of every position.

        Args:
            tokens_BS: int64, 0 … V−1. With a cache, only the positions that are new.
            cache: one entry per depth step (`new_cache`), extended in place.
        """
        x_BSD = F.embedding(tokens_BS, self.embedding).float()
        reports: list[dict[str, RouterReport]] = []
        for step in range(self.config.num_layers):
            layer = self.group[step % self.config.group_size]
            x_BSD, report = layer(x_BSD, None if cache is None else cache[step])
            reports.append(report)
        logits_BSV = self.head(self.final_norm(x_BSD)).float()
        return ModelOutput(logits_BSV, self._regularisation(reports, tokens_BS), collect_loads(reports))

    def new_cache(self) -> list[LayerCache]:
        """An empty cache: one entry per depth step, not per layer, for a shared layer sees new keys at every repeat."""
        return [LayerCache() for _ in range(self.config.num_layers)]

    def _regularisation(self, reports: list[dict[str, RouterReport]], tokens_BS: Tensor) -> Tensor:
        """Σ over group members of γ·ℓ_FF + δ·(ℓ_V + ℓ_O), per sequence (arXiv 2405.16039, §2.2)."""
        config, (batch, length) = self.config, tokens_BS.shape
        total_B = torch.zeros(batch, device=tokens_BS.device)
        if not self.training:
            return total_B
        for member in range(config.group_size):
            repeats = reports[member :: config.group_size]
            for kind in repeats[0]:
                summed_BHA = torch.stack([report[kind].softmax_sum_BHA for report in repeats]).sum(0)
                coefficient = config.feed_forward_balance if kind == "feed_forward" else config.attention_balance
                total_B = total_B + coefficient * negative_entropy(summed_BHA, config.num_repeats * length)
        return total_B
