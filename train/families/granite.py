"""Granite 3 mixtures, with factors of embedding, residual branches and logits, and maybe a shared MLP."""

from typing import Any

from . import family as f
from .keys import ConfigKey, Dotted, Own, Reader, Rotary


def _shared(reader: Reader) -> dict[str, Any]:
    width = reader.take("shared_intermediate_size", int)
    names = ("feed_forward.num_shared_experts", "feed_forward.d_shared_expert")
    return dict(zip(names, (1, width), strict=True)) if width else {}


def _write_shared(model: Dotted) -> dict[str, Any]:
    return {"shared_intermediate_size": model["feed_forward.d_shared_expert"]}


_PARTS = (
    *f.DENSE_ATTENTION,
    *f.TOKEN_CHOICE,
    f.QKVO_BIAS,
    Rotary(),
    ConfigKey("num_local_experts", f.NUM_EXPERTS, also=("num_experts",)),
    ConfigKey("intermediate_size", f.D_EXPERT),
    ConfigKey("embedding_multiplier", "scale_embedding", float),
    ConfigKey("residual_multiplier", "residual_multiplier", float),
    ConfigKey("logits_scaling", "logits_scaling", float),
    ConfigKey("attention_multiplier", "attention.scale", float),
)
_CONSTANTS = {"feed_forward.router.kind": "token_choice", "feed_forward.router.renormalise": True}
_DEFAULTS = (
    dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    | dict(num_attention_heads=32, num_key_value_heads=None, rms_norm_eps=1e-6)
    | dict(attention_bias=False, embedding_multiplier=1.0, logits_scaling=1.0)
    | dict(residual_multiplier=1.0, attention_multiplier=1.0, num_local_experts=8)
    | dict(num_experts_per_tok=2, router_aux_loss_coef=0.001)
)
_RULES = (
    *(*f.OUTER, *f.ATTENTION, *f.in_layers({"block_sparse_moe.router.layer.weight": f.GATE})),
    *f.banks("block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
)
_ALSO = (
    *f.in_layers({"block_sparse_moe.router.weight": f.GATE}),
    *f.banks("block_sparse_moe.experts.", "gate_up_proj", "down_proj"),
)
_SHARED = {"input_linear.weight": "up.weight", "output_linear.weight": "down.weight"}
GRANITE = f.Family(
    ("granitemoe",), "GraniteMoeForCausalLM", _PARTS, _CONSTANTS, _DEFAULTS, _RULES, _ALSO
)
GRANITE_SHARED = f.Family(
    ("granitemoeshared",),
    "GraniteMoeSharedForCausalLM",
    (*_PARTS, Own(_shared, _write_shared)),
    _CONSTANTS,
    _DEFAULTS | {"shared_intermediate_size": 0},
    (*_RULES, *f.in_layers(_SHARED, "shared_mlp.", "feed_forward.shared.")),
    _ALSO,
)
