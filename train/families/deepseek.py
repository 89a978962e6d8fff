"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437); Kimi-K2 and Moonlight are V3."""

from typing import Any

from . import family as f
from .keys import ConfigKey, Dotted, Only, Own, Reader, Rotary

_METHODS = ConfigKey("topk_method", "", str, {"greedy": False, "group_limited_greedy": True})
_GROUPS = ("feed_forward.router.num_groups", "feed_forward.router.kept_groups")


def _groups(reader: Reader) -> dict[str, Any]:
    groups = [reader.take(name, int, null=True) for name in ("n_group", "topk_group")]
    is_limited = _METHODS.read(reader)[""]
    return dict(zip(_GROUPS, groups if is_limited else (1, 1), strict=True))


def _write_groups(model: Dotted) -> dict[str, Any]:
    groups, kept = (model[name] for name in _GROUPS)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"topk_method": method, "n_group": groups, "topk_group": kept}


_LATENT = (
    ConfigKey(
        "num_key_value_heads", "attention.num_heads", null=True
    ),  # they are equal; the next counts
    *f.SIZES,
    ConfigKey("qk_nope_head_dim", "attention.d_head"),
    ConfigKey("qk_rope_head_dim", "attention.d_rotary"),
    ConfigKey("v_head_dim", "attention.d_value"),
    ConfigKey("q_lora_rank", "attention.q_rank", null=True),
    ConfigKey("kv_lora_rank", "attention.kv_rank"),
    ConfigKey("attention_bias", "attention.bias", bool),
    Rotary(latent=True),
    Only("moe_layer_freq", 1),
)
_PAIRS = "attention.positions.pairs"
_CONSTANTS = f.FIXED_BIAS | {"attention.kind": "mla"}
_DEFAULTS = (
    dict(rms_norm_eps=1e-6, qk_nope_head_dim=128)
    | dict(num_key_value_heads=lambda reader: None)
    | dict(qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536, kv_lora_rank=512)
    | dict(attention_bias=False)
)
_PROJECTIONS = {
    "q_proj": "query",
    "q_a_proj": "query_down",
    "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_b_proj": "kv_up",
    "o_proj": "output",
}
_NORMS = {"q_a_layernorm": "query_norm", "kv_a_layernorm": "kv_norm"}
_RULES = (
    *(*f.OUTER, *f.attention(_PROJECTIONS, _NORMS), *f.ROUTER),
    *(*f.EXPERTS, *f.DENSE, *f.SHARED),
)
V2 = f.Family(
    ("deepseek_v2",),
    "DeepseekV2ForCausalLM",
    parts=(
        *_LATENT,
        *f.DEEPSEEK_GATE,
        Own(_groups, _write_groups),
        Only("scoring_func", "softmax"),
        Only("mlp_bias", False),
    ),
    constants=_CONSTANTS
    | {
        _PAIRS: "neighbours",
        "feed_forward.router.scores": "softmax",
        "feed_forward.router.group_score": "max",
        "feed_forward.router.renormalise": False,
    },
    defaults=_DEFAULTS
    | dict(vocab_size=102400, hidden_size=4096, intermediate_size=11008)
    | dict(num_hidden_layers=32, num_attention_heads=32, first_k_dense_replace=0)
    | dict(n_group=None, topk_group=None, n_routed_experts=64, n_shared_experts=2)
    | dict(routed_scaling_factor=1.0, topk_method="greedy", moe_intermediate_size=1407),
    rules=_RULES,
    also=f.FUSED,
    ignored=("norm_topk_prob",),
    zeros=f.GATE_BIAS,
)
V3 = f.Family(
    ("deepseek_v3", "kimi_k2"),
    "DeepseekV3ForCausalLM",
    parts=(
        *_LATENT,
        *f.V3_GATE,
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        ConfigKey("rope_interleave", _PAIRS, bool, {True: "neighbours", False: "halves"}),
    ),
    constants=_CONSTANTS,
    defaults=_DEFAULTS
    | dict(vocab_size=129280, hidden_size=7168, intermediate_size=18432)
    | dict(moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128)
    | dict(n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, n_group=8)
    | dict(topk_group=4, num_experts_per_tok=8, first_k_dense_replace=3, norm_topk_prob=True)
    | dict(rope_interleave=True),
    rules=(*_RULES, *f.SELECTION_BIAS),
    also=f.FUSED,
    mtp_layers=True,
)
