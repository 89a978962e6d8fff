"""Runs a moebius model under transformers; needs only torch and transformers.

Covers models that process each sequence by itself and read no later position: MoEUT and its
variants, σ-MoE, SwitchHead, SUT with and without halting, dense and naive Universal Transformers,
and mixtures without a capacity (top-k, DeepSeek, X-MoE, Multi-Head MoE, GShard as evaluated).

    x = Emb[tokens]
    for member in schedule:                  # a shared layer is applied repeatedly
        x = group[member](x)                 # between loops: loops_moebius.py
    logits = head(norm(x))

A cache has one entry per depth step, not per layer. Routers, norms, biases, embeddings and the
residual stream are float32 for any dtype of the weights, as in training. With `labels` the loss is
the cross-entropy alone, without moebius' balancing losses.

Legend: B sequences, S new positions, M all positions (cached and new), D model width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .attention_moebius import (
    MoMHA,
    Past,
    RotaryTable,
    make_attention,
    rotary_table,
    visible_positions,
)
from .configuration_moebius import MoebiusConfig
from .experts_moebius import (
    CosineRouter,
    DenseMLP,
    Linear,
    LinearRouter,
    SparseFeedForward,
    make_norm,
    wide,
)
from .loops_moebius import Loops

NOT_SPLIT, NOT_MOVED = ["Layer"], ["past_key_values"]  # with several devices
TIED = {"head.weight": "embedding.weight"}  # if config.json ties them
# Parts of the names of modules and parameters that stay float32 in a bfloat16 model.
FLOAT32 = ["router", "norm", "halting", "embedding", "bias"]


class Layer(nn.Module):
    """Applies attention and feed-forward with their residual connections.

    Peri-norm: a norm only before what ends in a softmax or sigmoid. Pre-norm: everything reads
    normalized rows. Post-norm: the norm follows the addition. Sandwich and branch add to pre-norm a
    norm after the addition or before it. Output has only the one before it.
    """

    def __init__(self, config: MoebiusConfig, member: int) -> None:
        super().__init__()
        self.norm, d_model = config.model["norm"], config.model["d_model"]
        section = config.model["feed_forward"]
        self.is_sparse = member in config.sparse_members
        has_norm = self.norm != "output"
        self.attention_norm = make_norm(config) if has_norm else None
        self.attention = make_attention(config)
        has_norm = has_norm and (self.is_sparse or self.norm != "peri")
        self.feed_forward_norm = make_norm(config) if has_norm else None
        self.attention_output_norm = self.feed_forward_output_norm = None
        if self.norm in ("sandwich", "branch", "output"):
            self.attention_output_norm = make_norm(config)
            self.feed_forward_output_norm = make_norm(config)
        if self.is_sparse:
            self.feed_forward = SparseFeedForward(config)
        else:
            self.feed_forward = DenseMLP(
                d_model,
                section["d_feed_forward"],
                section["activation"],
                bias=section["dense_bias"],
            )

    def forward(
        self,
        x_BSD: Tensor,
        table: RotaryTable,
        past: Past,
        memory_BSD: Tensor | None = None,
        active_BS: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Computes one depth step, (B, S, D) to (B, S, D).

        Args:
            x_BSD: the residual stream.
            table: cosine and sine of the new positions.
            past: the cache of this depth step, and the visible positions.
            memory_BSD: under halting, input of keys and values; None: x.
            active_BS: under halting, tokens that still compute; None: all.
            scale: of what is added to the residual stream.
        """
        n_BSD, values_BSD = self._inputs(x_BSD, self.attention_norm)
        values_BSD = values_BSD if memory_BSD is None else memory_BSD
        y_BSD = self.attention(values_BSD, n_BSD, table, past, active_BS)
        norms = self.attention_norm, self.attention_output_norm
        x_BSD = self._add(x_BSD, y_BSD, *norms, scale)
        n_BSD, values_BSD = self._inputs(x_BSD, self.feed_forward_norm)
        read = (values_BSD, n_BSD, active_BS) if self.is_sparse else (values_BSD,)
        y_BSD = self.feed_forward(*read)
        norms = self.feed_forward_norm, self.feed_forward_output_norm
        return self._add(x_BSD, y_BSD, *norms, scale)

    def _inputs(self, x_BSD: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Returns the input of queries, keys and routers, and the input of values and experts."""
        if self.norm == "post" or norm is None:
            return x_BSD, x_BSD
        n_BSD = norm(x_BSD)
        return n_BSD, x_BSD if self.norm == "peri" else n_BSD

    def _add(
        self,
        x_BSD: Tensor,
        y_BSD: Tensor,
        norm: nn.Module | None,
        output_norm: nn.Module | None,
        scale: float,
    ) -> Tensor:
        if self.norm in ("branch", "output") and output_norm is not None:
            y_BSD = output_norm(y_BSD)
        x_BSD = x_BSD + (y_BSD if scale == 1 else scale * y_BSD)
        after = {"post": norm, "sandwich": output_norm}.get(self.norm)
        return x_BSD if after is None else after(x_BSD)


class Halting(nn.Module):
    """Computes the probabilities that a token continues or halts after a state (SUT)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.hidden = Linear(d_model, d_model)
        self.output = Linear(d_model, 2, bias=False)

    def forward(self, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the probabilities of continuing and of halting, each (B, S)."""
        p_BS2 = wide(self.output(F.gelu(self.hidden(y_BSD)))).softmax(-1)
        return p_BS2[..., 0], p_BS2[..., 1]


class MoebiusForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the next token: embedding, the group of layers repeated, head."""

    config_class = MoebiusConfig
    config: MoebiusConfig
    _tied_weights_keys = TIED
    _no_split_modules = NOT_SPLIT
    _supports_sdpa = True
    _skip_keys_device_placement = NOT_MOVED
    _keep_in_fp32_modules_strict = FLOAT32

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__(config)
        model = config.model
        d_model, positions = model["d_model"], model["attention"].get("positions", {})
        self.embedding = nn.Embedding(config.vocab_size, d_model)
        self.position_embedding = None
        if positions.get("kind") == "learned":
            self.position_embedding = nn.Embedding(positions["max_positions"], d_model)
        self.group = nn.ModuleList(
            Layer(config, member) for member in range(model["layers_per_group"])
        )
        self.halting = None if model["halting"] is None else Halting(d_model)
        has_final_norm = model["final_norm"] and model["norm"] != "post"
        self.final_norm = make_norm(config) if has_final_norm else None
        self.loops = Loops(config)
        self.head = Linear(d_model, config.vocab_size, bias=model["head_bias"])
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initializes parameters missing from a checkpoint with common values."""
        super()._init_weights(module)
        if isinstance(module, MoMHA):
            nn.init.zeros_(module.relative)
        if isinstance(module, CosineRouter | LinearRouter):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=0.02)

    def get_input_embeddings(self) -> nn.Module:
        """Returns the module that embeds the input tokens."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the module that embeds the input tokens."""
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head, which computes the logits."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head, which computes the logits."""
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Computes the next token's logits, (B, S, V) float32, and with `labels` the loss.

        Args:
            input_ids: int64 (B, S); with a cache, only the new positions.
            attention_mask: (B, M), 0 for padding on either side; None: no padding.
            position_ids: int64 (B, S); None: counted from each sequence's first real token.
            past_key_values: a DynamicCache, which is extended.
            inputs_embeds: replaces `input_ids`.
            labels: int64 (B, S): the tokens themselves, −100 where none counts.
            use_cache: return a cache, created if none is given.
            logits_to_keep: number of last positions, 0 for all, or their indices.
            num_loops: how often the repeated layers are applied; None: as trained. `generate` takes
                it too.
            kwargs: `num_items_in_batch`, which divides the loss; others are ignored.
        """
        x_BSD = self._embed(input_ids, inputs_embeds)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        visible = visible_positions(attention_mask, past, x_BSD)
        if position_ids is None:
            position_ids = _count_positions(attention_mask, past, x_BSD)
        x_BSD = self._decode(x_BSD, position_ids, visible, past_key_values, num_loops)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BSV = wide(self.head(x_BSD[:, kept]))
        return CausalLMOutputWithPast(
            loss=self._loss(logits_BSV, labels, **kwargs),
            logits=logits_BSV,
            past_key_values=past_key_values if use_cache else None,
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        return self.embedding(input_ids) if inputs_embeds is None else inputs_embeds

    def _loss(self, logits_BSV: Tensor, labels: Tensor | None, **kwargs: Any) -> Tensor | None:
        if labels is None:
            return None
        return self.loss_function(
            logits=logits_BSV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
        )

    def _decode(
        self,
        x_BSD: Tensor,
        position_BS: Tensor,
        visible: Tensor,
        cache: Cache | None,
        num_loops: int | None,
    ) -> Tensor:
        """Returns the rows that the head reads."""
        model, final_norm = self.config.model, self.final_norm or nn.Identity()
        if self.position_embedding is not None:
            learned = self.position_embedding.num_embeddings
            if (last := int(position_BS.max()) + 1) > learned:
                raise ValueError(f"{last} positions exceed the model's {learned} learned ones")
            x_BSD = x_BSD + self.position_embedding(position_BS)
        if model["scale_embedding"]:
            x_BSD = x_BSD * model["d_model"] ** 0.5
        if model["norm"] == "post":
            x_BSD = F.layer_norm(wide(x_BSD) * model["d_model"] ** 0.5, x_BSD.shape[-1:], eps=1e-5)
        attention = {"positions": {"kind": "none"}, **model["attention"]}
        table = rotary_table(position_BS, attention, wide(x_BSD).dtype)
        schedule = self.config.schedule(num_loops)
        steps = range(0 if cache is None else len(cache.layers))
        filled = sum(cache is not None and cache.get_seq_length(step) > 0 for step in steps)
        if filled not in (0, len(schedule)):
            raise ValueError(
                f"the cache has {filled} depth steps, and this pass has {len(schedule)}: continue a "
                "cache with the num_loops that it was made with"
            )
        pasts = [Past(cache, step, visible) for step in range(len(schedule))]
        if self.halting is not None:
            return final_norm(self._decode_halting(self.halting, x_BSD, table, pasts))
        program, e_BSD = self.config.loops, None
        first, last = program["prelude"], model["layers_per_group"] - program["coda"] - 1
        core = [loop for _, loop in schedule if loop is not None]
        scale = 1.0
        if program["residual_scale"] is not None:
            scale = program["residual_scale"] * (last - first + 1) ** 0.5 / len(core)
        for (member, loop), past in zip(schedule, pasts, strict=True):
            if member == first and loop is not None:
                if loop == 0:
                    x_BSD, e_BSD = self.loops.start(x_BSD, position_BS)
                x_BSD = self.loops.begin(x_BSD, e_BSD, loop, max(core) + 1)
            x_BSD = self.group[member](x_BSD, table, past, scale=1.0 if loop is None else scale)
            if member < last or loop is None:
                continue
            if program["final_norm"] == "every_loop":
                x_BSD = final_norm(x_BSD)
            if loop == max(core) and self.loops.injection is not None:
                x_BSD = self.loops.injection.finish(x_BSD)
            if loop == max(core) and program["final_norm"] == "around_coda":
                x_BSD = final_norm(x_BSD)
        if program["final_norm"] == "every_loop" and not program["coda"]:
            return x_BSD
        return final_norm(x_BSD)

    def _decode_halting(
        self, gate: Halting, x_BSD: Tensor, table: RotaryTable, pasts: list[Past]
    ) -> Tensor:
        """Applies the single layer until tokens halt (SUT, arXiv 2310.07096, §3.3).

        After each step a gate breaks a piece off the rest of a token's stick. The output is the sum
        of the token's states, weighted by the pieces. A token with less than 1 − threshold left
        stops computing; the others still read its output.
        """
        least = 1 - self.config.model["halting"]["threshold"]
        layer = self.group[0]
        left_BS = torch.ones_like(x_BSD[..., 0])
        y_BSD = layer(x_BSD, table, pasts[0], memory_BSD=x_BSD)
        memory_BSD, answer_BSD = y_BSD, torch.zeros_like(y_BSD)
        for past in pasts[1:]:
            go_on_BS, halt_BS = gate(y_BSD)
            piece_BS, left_BS = left_BS * halt_BS, left_BS * go_on_BS
            answer_BSD = answer_BSD + piece_BS[..., None] * y_BSD
            active_BS = left_BS >= least
            y_BSD = layer(y_BSD, table, past, memory_BSD=memory_BSD, active_BS=active_BS)
            now_BSD = answer_BSD + left_BS[..., None] * y_BSD
            memory_BSD = torch.where(active_BS[..., None], now_BSD, memory_BSD)
        return memory_BSD


def _count_positions(attention_mask: Tensor | None, past: int, x_BSD: Tensor) -> Tensor:
    """Returns the position of each new token, (B or 1, S), without counting padding."""
    if attention_mask is None:
        return torch.arange(past, past + x_BSD.shape[1], device=x_BSD.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
