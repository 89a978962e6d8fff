"""Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388), dense and as mixtures."""

from typing import Any

from . import family as f
from .keys import ConfigKey, Dotted, Own, Reader, Rotary, UnfitError, Windows


def _sparse_layers(reader: Reader) -> dict[str, Any]:
    step, dense = reader.take("decoder_sparse_step", int), reader.take("mlp_only_layers", list)
    if step < 1:
        raise UnfitError(f"decoder_sparse_step={step} must be at least 1")
    layers = range(step - 1, reader.take("num_hidden_layers", int), step)
    return {"feed_forward.sparse_layers": tuple(n for n in layers if n not in dense)}


def _write_sparse_layers(model: Dotted) -> dict[str, Any]:
    sparse = model["feed_forward.sparse_layers"]
    dense = [n for n in range(model["num_layers"]) if n not in sparse]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_PARTS = (
    *f.DENSE_ATTENTION,
    *f.TOKEN_CHOICE,
    f.RENORMALISE,
    ConfigKey("num_experts", f.NUM_EXPERTS, also=("num_local_experts",)),
    ConfigKey("moe_intermediate_size", f.D_EXPERT),
    ConfigKey("intermediate_size", f.D_DENSE),
    Own(_sparse_layers, _write_sparse_layers),
    Rotary(),
)
_CONSTANTS = {"feed_forward.router.kind": "token_choice"}
_ALL = dict(vocab_size=151936, rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=4096)
_DEFAULTS = (
    _ALL
    | dict(hidden_size=2048, num_hidden_layers=24, decoder_sparse_step=1)
    | dict(mlp_only_layers=lambda reader: [], norm_topk_prob=False, router_aux_loss_coef=0.001)
)
QWEN2 = f.Family(
    ("qwen2_moe",),
    "Qwen2MoeForCausalLM",
    parts=(
        *_PARTS,
        ConfigKey("qkv_bias", "attention.bias", bool, {True: "qkv", False: "none"}),
        ConfigKey("shared_expert_intermediate_size", "feed_forward.d_shared_expert"),
        Windows(switch=True),
    ),
    constants=_CONSTANTS | {"feed_forward.num_shared_experts": 1, "feed_forward.shared_gate": True},
    defaults=_DEFAULTS
    | dict(num_attention_heads=16, num_key_value_heads=16, intermediate_size=5632)
    | dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    | dict(num_experts_per_tok=4, num_experts=60, qkv_bias=True, max_window_layers=28),
    rules=(
        *(*f.MIXTURE, *f.DENSE, *f.swiglu("mlp.shared_expert.", "feed_forward.shared.")),
        *f.in_layers({"mlp.shared_expert_gate.weight": "feed_forward.shared_gate.weight"}),
    ),
    also=f.FUSED,
)
QWEN3 = f.Family(
    ("qwen3_moe",),
    "Qwen3MoeForCausalLM",
    parts=(*_PARTS, f.QKVO_BIAS, Windows(step=1, switch=True, listed=False)),
    constants=_CONSTANTS | {"attention.qk_norm": "per_head"},
    defaults=_DEFAULTS
    | dict(num_attention_heads=32, num_key_value_heads=4, intermediate_size=6144)
    | dict(moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128)
    | dict(attention_bias=False),
    rules=(*f.MIXTURE, *f.DENSE),
    also=f.FUSED,
)
_DENSE_PARTS = (*f.DENSE_PARTS, Rotary(), Windows(step=1, switch=True, begins=True))
_DENSE_DEFAULTS = (
    _ALL
    | dict(hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, max_window_layers=28)
    | dict(num_attention_heads=32, num_key_value_heads=32)
)
DENSE_QWEN2 = f.Family(
    ("qwen2",),
    "Qwen2ForCausalLM",
    parts=_DENSE_PARTS,
    constants=f.WITHOUT_EXPERTS | {"attention.bias": "qkv"},
    defaults=_DENSE_DEFAULTS,
    rules=f.DENSE_MODEL,
)
DENSE_QWEN3 = f.Family(
    ("qwen3",),
    "Qwen3ForCausalLM",
    parts=(*_DENSE_PARTS, f.QKVO_BIAS),
    constants=f.WITHOUT_EXPERTS | {"attention.qk_norm": "per_head"},
    defaults=_DENSE_DEFAULTS | dict(head_dim=128, attention_bias=False),
    rules=f.DENSE_MODEL,
)
