"""Attention of a moebius model for modeling_moebius.py; needs only torch and transformers.

Rotary attention with dense or expert values and outputs, and SUT's attention.

Legend: B sequences, S new positions, M all positions (cached and new), T = B·S tokens, D model
width, H heads, C channels of a head, K experts of a row, N routes, U rows of heads or of experts, R
distances.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .configuration_moebius import MoebiusConfig
from .experts_moebius import Experts, Linear, SigmoidRouter, SutRouter, of_active, wide

RotaryTable = tuple[Tensor, Tensor]


class Past:
    """Holds the cache of a depth step and the visible positions."""

    def __init__(self, cache: Cache | None, step: int, visible_BS: Tensor) -> None:
        self.cache, self.step = cache, step
        self.visible = visible_BS  # bool (B or 1, 1, S, M): new positions × positions they see

    def append(self, k_BHSC: Tensor, v_BHSC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new positions' keys and values, and returns those of all positions."""
        if self.cache is None:
            return k_BHSC, v_BHSC
        while len(self.cache.layers) <= self.step:  # more loops than the model was trained with
            self.cache.layers.append(DynamicLayer())
        k_BHMC, v_BHMC = self.cache.update(k_BHSC, v_BHSC, self.step)
        if k_BHMC.shape[2] != self.visible.shape[-1]:
            raise ValueError(
                f"{type(self.cache).__name__} holds {k_BHMC.shape[2]} positions instead of "
                f"{self.visible.shape[-1]}: this model needs a DynamicCache"
            )
        return k_BHMC, v_BHMC


def visible_positions(attention_mask: Tensor | None, past: int, x_BSD: Tensor) -> Tensor:
    """Returns which new position (third) sees which of all (fourth): bool, (B or 1, 1, S, M).

    Each sees itself and earlier positions, but no padding. Padding also sees itself, so that no
    softmax is empty.

    Raises:
        ValueError: the mask has another shape than (B, M).
    """
    total = past + x_BSD.shape[1]
    key_M = torch.arange(total, device=x_BSD.device)
    query_S1 = key_M[past:, None]
    causal_SM = key_M <= query_S1
    if attention_mask is None:
        return causal_SM[None, None]
    if attention_mask.shape != (len(x_BSD), total):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, but must be "
            f"[{len(x_BSD)}, {total}]: sequences × positions, including cached ones"
        )
    real_B1M = attention_mask.bool()[:, None, :]
    return (causal_SM & (real_B1M | (key_M == query_S1)))[:, None]


def rotary_table(position_BS: Tensor, attention: dict[str, Any], dtype: torch.dtype) -> RotaryTable:
    """Returns cosine and sine, each (B, 1, S, rotated channels)."""
    positions = attention["positions"]
    if positions["kind"] != "rotary":
        width, base = 0, 1.0
    else:
        usual = attention["d_head"] // 2 // 2 * 2
        width = usual if positions["width"] is None else positions["width"]
        base = positions["base"]
    exponents = torch.arange(0, width, 2, device=position_BS.device, dtype=dtype)
    angles = position_BS[:, None, :, None].to(dtype) * base ** (-exponents / max(width, 1))
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def rotate(x_BHSC: Tensor, table: RotaryTable) -> Tensor:
    """Rotates the first channels of every head, paired by halves; the rest pass unchanged."""
    cos, sin = table
    turned, rest = x_BHSC.split((cos.shape[-1], x_BHSC.shape[-1] - cos.shape[-1]), dim=-1)
    turned = turned.to(cos.dtype)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned.to(x_BHSC.dtype), rest), dim=-1)


def split_heads(x_BSW: Tensor, num_heads: int) -> Tensor:
    """Splits (B, S, H·C) into heads, (B, H, S, C)."""
    return x_BSW.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class RotaryAttention(nn.Module):
    """Makes queries and keys, and attends; a subclass makes values and outputs."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__()
        self.settings, d_model = config.model["attention"], config.model["d_model"]
        self.num_heads, self.d_head = self.settings["num_heads"], self.settings["d_head"]
        self.query = Linear(d_model, self.num_heads * self.d_head, bias=False)
        self.key = Linear(d_model, self.num_heads * self.d_head, bias=False)
        self.qk_bias = None
        if self.settings.get("qk_bias"):
            self.qk_bias = nn.Parameter(torch.zeros(2, self.num_heads, 1, self.d_head))

    def prepare(self, x_BSW: Tensor, place: int, table: RotaryTable) -> Tensor:
        """Returns queries (place 0) or keys (1) as they meet, (B, H, S, C)."""
        x_BHSC = split_heads(x_BSW, self.num_heads)
        if self.qk_bias is not None:
            x_BHSC = x_BHSC + self.qk_bias[place].to(x_BHSC.dtype)
        if self.settings.get("qk_norm"):
            x_BHSC = F.rms_norm(x_BHSC, (self.d_head,))
        if self.settings.get("positions", {}).get("pairs") == "neighbours":
            pairs, rest = x_BHSC.split((width := table[0].shape[-1], self.d_head - width), -1)
            x_BHSC = torch.cat((pairs[..., ::2], pairs[..., 1::2], rest), -1)
        return rotate(x_BHSC * self.d_head**-0.25, table)  # the scale, on queries and keys each

    def attend(self, n_BSD: Tensor, v_BHSC: Tensor, table: RotaryTable, past: Past) -> Tensor:
        """Returns softmax(rope(q)·rope(k)ᵀ / √C)·v over visible positions, (B, H, S, C)."""
        q_BHSC = self.prepare(self.query(n_BSD), 0, table)
        k_BHSC = self.prepare(self.key(n_BSD), 1, table)
        k_BHMC, v_BHMC = past.append(k_BHSC, v_BHSC.to(q_BHSC.dtype))
        return F.scaled_dot_product_attention(
            q_BHSC, k_BHMC, v_BHMC, attn_mask=past.visible, scale=1.0
        )


class DenseAttention(RotaryAttention):
    """Makes values and outputs with dense matrices; SwitchHead with one expert also gates heads."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__(config)
        d_model, width = config.model["d_model"], self.num_heads * self.d_head
        self.value = Linear(d_model, width, bias=False)
        self.output = Linear(width, d_model, bias=False)
        is_gated = self.settings["kind"] == "switchhead"
        self.head_gate = Linear(d_model, self.num_heads, bias=False) if is_gated else None

    def forward(
        self, x_BSD: Tensor, n_BSD: Tensor, table: RotaryTable, past: Past, active: None = None
    ) -> Tensor:
        """Attends: x_BSD makes the values, n_BSD everything else."""
        v_BHSC = split_heads(self.value(x_BSD), self.num_heads)
        attended_BSHC = self.attend(n_BSD, v_BHSC, table, past).transpose(1, 2)
        if self.head_gate is not None:
            attended_BSHC = attended_BSHC * self.head_gate(n_BSD).sigmoid()[..., None]
        return self.output(attended_BSHC.flatten(2))


class SwitchHead(RotaryAttention):
    """Makes values and outputs with experts of each head (SwitchHead, arXiv 2312.07987)."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__(config)
        d_model, count = config.model["d_model"], self.num_heads * self.settings["num_experts"]
        self.value_router = SigmoidRouter(self.settings, d_model, count)
        self.output_router = SigmoidRouter(self.settings, d_model, count)
        self.value = Experts([Linear(d_model, self.d_head, bias=False) for _ in range(count)])
        self.output = Experts([Linear(self.d_head, d_model, bias=False) for _ in range(count)])

    def forward(
        self, x_BSD: Tensor, n_BSD: Tensor, table: RotaryTable, past: Past, active: None = None
    ) -> Tensor:
        """Attends: x_BSD makes the values, n_BSD everything else, including the routers' choices."""
        batch, length, _ = n_BSD.shape
        n_TD, heads = n_BSD.flatten(0, 1), self.num_heads
        experts_TN, weights_TN = self.value_router(n_TD, heads)
        per_head = experts_TN.shape[1] // heads
        # one row for each head of each token
        row_N = torch.arange(len(n_TD) * heads, device=n_TD.device).repeat_interleave(per_head)
        v_UC = self.value(
            x_BSD.flatten(0, 1),
            row_N // heads,
            experts_TN.flatten(),
            weights_TN.flatten(),
            row_N,
            len(n_TD) * heads,
        )
        v_BHSC = v_UC.view(batch, length, heads, -1).transpose(1, 2)
        attended_BHSC = self.attend(n_BSD, v_BHSC, table, past)
        attended_UC = attended_BHSC.transpose(1, 2).reshape(len(n_TD) * heads, -1)
        experts_TN, weights_TN = self.output_router(n_TD, heads)
        y_TD = self.output(
            attended_UC,
            row_N,
            experts_TN.flatten(),
            weights_TN.flatten(),
            row_N // heads,
            len(n_TD),
        )
        return y_TD.view(batch, length, -1)


class MoMHA(nn.Module):
    """Makes queries and outputs with experts that share keys and values (SUT, arXiv 2310.07096)."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__()
        self.settings, d_model = config.model["attention"], config.model["d_model"]
        self.num_heads, count = self.settings["num_heads"], self.settings["num_experts"]
        width = self.num_heads * self.settings["d_head"]
        self.router = SutRouter(self.settings, d_model, count)
        self.query = Experts([Linear(d_model, width, bias=False) for _ in range(count)])
        self.output = Experts([Linear(width, d_model, bias=False) for _ in range(count)])
        self.key = Linear(d_model, width, bias=False)
        self.value = Linear(d_model, width, bias=False)
        distances = 2 * self.settings["max_distance"] + 1
        self.relative = nn.Parameter(
            torch.empty(self.num_heads, self.settings["d_head"], distances)
        )

    def forward(
        self, x_BSD: Tensor, n_BSD: Tensor, table: RotaryTable, past: Past, active: Tensor | None
    ) -> Tensor:
        """Attends: x_BSD makes keys and values, n_BSD queries and choices; `table` is ignored.

        Halted (inactive) tokens get 0.
        """
        batch, length, _ = n_BSD.shape
        n_TD = n_BSD.flatten(0, 1)
        experts_TK, weights_TK = self.router(n_TD)
        weights_TK = of_active(weights_TK, active)
        top_k = experts_TK.shape[1]
        row_N = torch.arange(experts_TK.numel(), device=n_TD.device)  # every expert of every token
        expert_N = experts_TK.flatten()
        ones_N = torch.ones_like(weights_TK).flatten()
        q_UW = self.query(n_TD, row_N // top_k, expert_N, ones_N, row_N, len(row_N))
        q_BKSHC = q_UW.view(batch, length, top_k, self.num_heads, -1).transpose(1, 2)
        attended_BKSHC = self.attend(q_BKSHC, x_BSD, past)
        attended_UW = attended_BKSHC.transpose(1, 2).reshape(len(row_N), -1)
        y_TD = self.output(
            attended_UW, row_N, expert_N, weights_TK.flatten(), row_N // top_k, len(n_TD)
        )
        return y_TD.view(n_BSD.shape)

    def attend(self, q_BKSHC: Tensor, x_BSD: Tensor, past: Past) -> Tensor:
        """Lets the queries of every expert attend to the same keys and values."""
        scale = self.settings["d_head"] ** -0.25
        k_BHSC = split_heads(self.key(x_BSD), self.num_heads) * scale
        v_BHSC = split_heads(self.value(x_BSD), self.num_heads)
        k_BHMC, v_BHMC = past.append(k_BHSC, v_BHSC)
        q_BKSHC = q_BKSHC.to(k_BHMC.dtype) * scale
        scores = torch.einsum("bkshc,bhmc->bkhsm", q_BKSHC, k_BHMC)
        scores = wide(scores) + wide(self._distance_scores(q_BKSHC, past.visible))
        hidden = ~past.visible[:, None]
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v_BHMC.dtype)
        return torch.einsum("bkhsm,bhmc->bkshc", p, v_BHMC)

    def _distance_scores(self, q_BKSHC: Tensor, visible: Tensor) -> Tensor:
        """Returns each score's term from the distance, (B, K, H, S, M)."""
        new, total = visible.shape[-2:]
        far = self.settings["max_distance"] - 1
        position_M = torch.arange(total, device=visible.device)
        distance_SM = position_M - position_M[total - new :, None]
        column_SM = distance_SM.clamp(-far, far) + far + 1
        relative = self.relative.to(q_BKSHC.dtype)
        scores = torch.einsum("bkshc,hcr->bkhsr", q_BKSHC, relative)
        return scores.gather(-1, column_SM.expand(*scores.shape[:3], -1, -1))


def make_attention(config: MoebiusConfig) -> nn.Module:
    """Builds the attention that the configuration names."""
    settings = config.model["attention"]
    if settings["kind"] == "momha":
        return MoMHA(config)
    if settings["kind"] == "switchhead":
        one_gate = settings["num_experts"] == 1 and settings["single_expert"] == "output_gate"
        return DenseAttention(config) if one_gate else SwitchHead(config)
    return DenseAttention(config)
