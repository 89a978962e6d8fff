"""Layers of a moebius model for modeling_moebius.py; needs only torch and transformers.

Matrices, norms, experts, routers and the feed-forward. Experts run in a plain loop, written for use
and reading rather than speed. Routers and norms compute in float32 for any dtype of the weights, as
in training.

Legend: B sequences, S positions, T rows (B·S of them, or sub-tokens), D model width, H heads, E
experts, A experts of a head, K experts of a row, G groups of experts, N routes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_moebius import MoebiusConfig

# Parts ---------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """Returns x in float32, the precision of norms and routers; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


class Linear(nn.Linear):
    """Computes y = W x (+ b) in the weight's dtype for any dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (…, d_in) to (…, d_out)."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(input.to(self.weight.dtype), self.weight, bias)


class LayerNorm(nn.LayerNorm):
    """Normalizes rows in float32, with eps 1e-5."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes (…, D) in any dtype to (…, D) float32."""
        x = wide(input)
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Divides rows by their root mean square in float32, with eps 1e-6."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes (…, D) in any dtype to (…, D) float32."""
        x = wide(x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: MoebiusConfig) -> nn.Module:
    """Builds the model's norm of a row."""
    d_model = config.model["d_model"]
    return (
        RMSNorm(d_model, eps=1e-6)
        if config.model["norm_layer"] == "rmsnorm"
        else LayerNorm(d_model)
    )


GATED = ("swiglu", "geglu", "clamped_swiglu")


def activate(z: Tensor, activation: str) -> Tensor:
    """Applies an activation; gated ones use the first half of the columns as gate."""
    if activation in GATED:
        gate, content = z.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, content = gate.clamp(max=7.0), content.clamp(-7.0, 7.0)
            return (content + 1) * gate * torch.sigmoid(1.702 * gate)
        return activate(gate, {"swiglu": "silu", "geglu": "gelu"}[activation]) * content
    if activation == "relu2":
        return torch.relu(z).square()
    return {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}[activation](z)


def hidden_columns(width: int, activation: str) -> int:
    """Returns the columns that an activation needs for `width` hidden ones."""
    return 2 * width if activation in GATED else width


class DenseMLP(nn.Module):
    """Computes W_down a(W_up x + b) + b': a dense feed-forward, or shared experts."""

    def __init__(self, d_model: int, d_hidden: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(d_model, hidden_columns(d_hidden, activation), bias=bias)
        self.down = Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, D) to (…, D)."""
        return self.down(activate(self.up(x), self.activation))


class ExpertMLP(nn.Module):
    """Computes one expert of a feed-forward."""

    def __init__(self, d_model: int, d_expert: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.w_up = Linear(d_model, hidden_columns(d_expert, activation), bias=bias)
        self.w_down = Linear(d_expert, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, D) to (…, D)."""
        return self.w_down(activate(self.w_up(x), self.activation))


class Experts(nn.Module):
    """Sends rows through a bank of experts, along routes.

    A route reads a source row, applies an expert, weights the output and adds it to a target row.
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(
        self,
        x: Tensor,
        source_N: Tensor,
        expert_N: Tensor,
        weight_N: Tensor,
        target_N: Tensor,
        num_targets: int,
    ) -> Tensor:
        """Returns the weighted sums of the experts' outputs, one row per target."""
        order_N = expert_N.argsort(stable=True)
        counts = torch.bincount(expert_N, minlength=len(self.experts)).tolist()
        sums = None
        for expert, routes in zip(self.experts, order_N.split(counts), strict=True):
            if len(routes) == 0 and sums is not None:
                continue
            outputs = weight_N[routes, None] * expert(x[source_N[routes]])
            if sums is None:
                sums = outputs.new_zeros(num_targets, outputs.shape[1])
            sums = sums.index_add(0, target_N[routes], outputs)
        assert sums is not None
        return sums


# Routers: rows to the K experts of each and the weights of their outputs, in float32 ----------------


class LinearRouter(nn.Module):
    """Scores experts with one product, in float32."""

    def __init__(self, settings: dict[str, Any], d_row: int, num_experts: int) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(num_experts, d_row))

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns the score of every expert, (T, E)."""
        x_TD = wide(x_TD)
        return F.linear(x_TD, self.weight.to(x_TD.dtype))


class SigmoidRouter(LinearRouter):
    """Takes the K largest of every head's experts, weighted by their sigmoids (σ-MoE, MoEUT)."""

    def forward(self, x_TD: Tensor, num_heads: int = 1) -> tuple[Tensor, Tensor]:
        """Chooses for each head, whose experts are head · A … head · A + A − 1: (T, H·K) each."""
        logits_THA = self.logits(x_TD).unflatten(1, (num_heads, -1))
        values_THK, chosen_THK = logits_THA.topk(self.settings["top_k"], dim=-1)
        first_H1 = torch.arange(num_heads, device=x_TD.device)[:, None] * logits_THA.shape[2]
        return (chosen_THK + first_H1).flatten(1), values_THK.sigmoid().flatten(1)


def softmax_gates(chosen_TK: Tensor, logits_TE: Tensor, *, renormalise: bool) -> Tensor:
    """Returns the gates, (T, K): softmax over all experts, or over the chosen ones only."""
    if renormalise:
        return chosen_TK.softmax(-1)
    return (chosen_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()


class TokenChoiceRouter(LinearRouter):
    """Takes the K largest of a softmax (Switch, GShard, OLMoE, Mixtral)."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses K experts for every row."""
        logits_TE = self.logits(x_TD)
        chosen_TK, experts_TK = logits_TE.topk(self.settings["top_k"], dim=-1)
        renormalise = self.settings["renormalise"]
        return experts_TK, softmax_gates(chosen_TK, logits_TE, renormalise=renormalise)


class DeepSeekRouter(LinearRouter):
    """Selects with a bias and a limit on groups of experts, and weights without the bias."""

    selection_bias: Tensor

    def __init__(self, settings: dict[str, Any], d_row: int, num_experts: int) -> None:
        super().__init__(settings, d_row, num_experts)
        self.register_buffer("selection_bias", torch.zeros(num_experts))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses K experts for every row."""
        logits_TE = self.logits(x_TD)
        is_sigmoid = self.settings["scores"] == "sigmoid"
        log_scores_TE = F.logsigmoid(logits_TE) if is_sigmoid else logits_TE.log_softmax(-1)
        biased_TE = log_scores_TE.exp() + self.selection_bias.to(logits_TE.dtype)
        experts_TK = self._within_groups(biased_TE).topk(self.settings["top_k"], dim=-1).indices
        chosen_TK = log_scores_TE.gather(1, experts_TK)
        weights_TK = chosen_TK.softmax(-1) if self.settings["renormalise"] else chosen_TK.exp()
        return experts_TK, self.settings["route_scale"] * weights_TK

    def _within_groups(self, biased_TE: Tensor) -> Tensor:
        """Sets experts outside the row's best groups to minus infinity."""
        groups, kept = self.settings["num_groups"], self.settings["kept_groups"]
        if kept == groups:
            return biased_TE
        grouped = biased_TE.unflatten(1, (groups, -1))
        best = 2 if self.settings["group_score"] == "top2" else 1
        open_groups = grouped.topk(best, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=grouped.device)
        closed = closed.scatter(1, open_groups, False)
        return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)


class CosineRouter(nn.Module):
    """Compares rows and experts on a low-dimensional sphere (X-MoE, arXiv 2204.09179)."""

    def __init__(self, settings: dict[str, Any], d_row: int, num_experts: int) -> None:
        super().__init__()
        self.settings = settings
        self.is_released = settings["behaviour"] == "torchscale"
        width = settings["d_routing"] or max(1, num_experts // 2)
        width = 16 if self.is_released else width
        self.projection = nn.Parameter(torch.empty(width, d_row))
        self.expert_embedding = nn.Parameter(torch.empty(num_experts, width))
        self.log_temperature = None if self.is_released else nn.Parameter(torch.empty(1))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses the K nearest experts of every row."""
        x_TD = wide(x_TD)
        z_TR = x_TD @ self.projection.to(x_TD.dtype).T
        embedding_ER = self.expert_embedding.to(x_TD.dtype)
        top_k = self.settings["top_k"]
        if self.log_temperature is None:
            logits_TE = z_TR @ F.normalize(embedding_ER, dim=-1, eps=1e-4).T
            chosen_TK, experts_TK = logits_TE.topk(top_k, dim=-1)
            return experts_TK, softmax_gates(chosen_TK, logits_TE, renormalise=top_k > 1)
        cosine_TE = F.normalize(z_TR, dim=-1) @ F.normalize(embedding_ER, dim=-1).T
        logits_TE = cosine_TE * torch.exp(-self.log_temperature.to(x_TD.dtype))
        chosen_TK, experts_TK = logits_TE.topk(top_k, dim=-1)
        if self.settings["gate"] == "sigmoid":
            return experts_TK, chosen_TK.sigmoid()
        return experts_TK, softmax_gates(chosen_TK, logits_TE, renormalise=False)


class SutRouter(nn.Module):
    """Scores with softmax(W_b tanh(W_a x + b_a)); gates are p / (Σ p + 1e-6) (SUT)."""

    def __init__(self, settings: dict[str, Any], d_row: int, num_experts: int) -> None:
        super().__init__()
        self.settings = settings
        self.hidden = Linear(d_row, d_row)
        self.output = Linear(d_row, num_experts, bias=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses K experts for every row."""
        p_TE = wide(self.output(torch.tanh(self.hidden(x_TD)))).softmax(-1)
        weights_TK, experts_TK = p_TE.topk(self.settings["top_k"], dim=-1)
        return experts_TK, weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-6)


ROUTERS = {
    "sigmoid": SigmoidRouter,
    "token_choice": TokenChoiceRouter,
    "deepseek": DeepSeekRouter,
    "cosine": CosineRouter,
    "sut": SutRouter,
}

# Feed-forward --------------------------------------------------------------------------------------


class SubTokens(nn.Module):
    """Splits a row into h rows of width D/h, and joins them again (Multi-Head MoE)."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head = Linear(d_model, d_model)
        self.merge = Linear(d_model, d_model)

    def split(self, x_TD: Tensor) -> Tensor:
        """Splits rows, (T, D) to (T·h, D/h)."""
        return self.head(x_TD).unflatten(1, (self.num_heads, -1)).flatten(0, 1)

    def join(self, y_UC: Tensor) -> Tensor:
        """Joins rows, (T·h, D/h) to (T, D)."""
        return self.merge(y_UC.unflatten(0, (-1, self.num_heads)).flatten(1))


class SparseFeedForward(nn.Module):
    """Sends every row through its chosen experts and the shared ones."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__()
        settings, d_model = config.model["feed_forward"], config.model["d_model"]
        self.settings = settings
        num_experts, d_expert = settings["num_experts"], settings["d_expert"]
        activation, bias = settings["activation"], settings["expert_bias"]
        width = d_model // settings["sub_tokens"]
        self.view = SubTokens(d_model, settings["sub_tokens"]) if width < d_model else None
        self.router = ROUTERS[settings["router"]["kind"]](settings["router"], width, num_experts)
        self.sparse = Experts(
            [ExpertMLP(width, d_expert, activation, bias=bias) for _ in range(num_experts)]
        )
        d_shared = settings["num_shared_experts"] * d_expert
        self.shared = DenseMLP(d_model, d_shared, activation, bias=bias) if d_shared else None
        self.output_norm = LayerNorm(d_model) if settings["output_norm"] else None

    def forward(self, x_BSD: Tensor, n_BSD: Tensor, active_BS: Tensor | None) -> Tensor:
        """Returns the outputs, (B, S, D).

        Args:
            x_BSD: input of experts.
            n_BSD: input of the router.
            active_BS: bool, tokens that have not halted; the others get no expert. None: all.
        """
        x_TD, n_TD = x_BSD.flatten(0, 1), n_BSD.flatten(0, 1)
        if self.view is not None:
            x_TD, n_TD = self.view.split(x_TD), self.view.split(n_TD)
        experts_TK, weights_TK = self.router(n_TD)
        weights_TK = of_active(weights_TK, active_BS)
        row_N = torch.arange(len(x_TD), device=x_TD.device).repeat_interleave(experts_TK.shape[1])
        y_TD = self.sparse(
            x_TD, row_N, experts_TK.flatten(), weights_TK.flatten(), row_N, len(x_TD)
        )
        if self.view is not None:
            y_TD = self.view.join(y_TD)
        y_BSD = y_TD.view(x_BSD.shape)
        if self.output_norm is not None:
            y_BSD = self.output_norm(y_BSD)
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)


def of_active(weights_TK: Tensor, active_BS: Tensor | None) -> Tensor:
    """Returns gate weights with 0 for the rows of halted tokens."""
    if active_BS is None:
        return weights_TK
    active_T = active_BS.flatten().repeat_interleave(len(weights_TK) // active_BS.numel())
    return weights_TK * active_T[:, None]
