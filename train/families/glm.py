"""GLM-4.5 (arXiv 2508.06471) and ERNIE 4.5: DeepSeek's gate with grouped-query attention.

ERNIE scores by softmax; its bias, too, chooses and never weighs.
"""

from typing import Any

from . import family as f
from .keys import ConfigKey, Dotted, Only, Own, Reader, Rotary, UnfitError

GLM4 = f.Family(
    ("glm4_moe",),
    "Glm4MoeForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.V3_GATE,
        Rotary(share=0.5),
        ConfigKey("attention_bias", "attention.bias", bool, {False: "none", True: "qkv"}),
        ConfigKey("use_qk_norm", "attention.qk_norm", bool, {False: False, True: "per_head"}),
    ),
    constants=f.FIXED_BIAS,
    defaults=dict(vocab_size=151552, hidden_size=4096, intermediate_size=10944)
    | dict(num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8)
    | dict(rms_norm_eps=1e-5, attention_bias=False, moe_intermediate_size=1408)
    | dict(num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128)
    | dict(routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1)
    | dict(norm_topk_prob=True, use_qk_norm=False),
    rules=(*f.MIXTURE, *f.DENSE, *f.SHARED, *f.SELECTION_BIAS),
    also=f.FUSED,
    mtp_layers=True,
)


_NAMES = ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")


def _sparse_layers(reader: Reader) -> dict[str, Any]:
    layers = reader.take("num_hidden_layers", int)
    interval, first = (reader.take(name, int) for name in _NAMES[:2])
    is_all = reader.values.get(_NAMES[2]) == -1
    reader.known.add(_NAMES[2])
    last = layers - 1 if is_all else reader.take(_NAMES[2], int)
    if interval < 1:
        raise UnfitError(f"moe_layer_interval={interval} must be at least 1")
    sparse = range(interval - 1, layers, interval)
    return {"feed_forward.sparse_layers": tuple(n for n in sparse if first <= n <= last)}


def _write_sparse_layers(model: Dotted) -> dict[str, Any]:
    sparse, layers = model["feed_forward.sparse_layers"], model["num_layers"]
    for interval in range(1, layers + 1):
        found = {n for n in range(interval - 1, layers, interval) if sparse[0] <= n <= sparse[-1]}
        if found == {*sparse}:
            return dict(zip(_NAMES, (interval, sparse[0], sparse[-1]), strict=True))
    raise UnfitError(f"sparse_layers={list(sparse)} are at no equal intervals")


_STATICS = "moe_statics.e_score_correction_bias"
_BIAS = (f.GATE_BIAS, f.LEADING_ONE)
ERNIE = f.Family(
    ("ernie4_5_moe",),
    "Ernie4_5_MoeForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        f.BALANCE,
        Rotary(500000.0),
        Own(_sparse_layers, _write_sparse_layers),
        ConfigKey("moe_num_experts", f.NUM_EXPERTS, also=("num_experts",)),
        ConfigKey("moe_k", f.TOP_K, also=("num_experts_per_tok",)),
        ConfigKey("moe_intermediate_size", f.D_EXPERT),
        ConfigKey("intermediate_size", f.D_DENSE),
        ConfigKey("moe_num_shared_experts", "feed_forward.num_shared_experts"),
        *(Only("moe_norm_min", 1e-12), Only("use_bias", False)),
        *(Only("moe_gate", "topk"), Only("moe_use_aux_free", True)),
    ),
    constants=f.FIXED_BIAS
    | {
        "attention.positions.pairs": "neighbours",
        "feed_forward.router.scores": "softmax",
        "feed_forward.router.balance_scope": "micro_batch",
    },
    defaults=dict(vocab_size=103424, hidden_size=2560, intermediate_size=12288)
    | dict(num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4)
    | dict(rms_norm_eps=1e-5, tie_word_embeddings=True, moe_intermediate_size=1536)
    | dict(moe_k=6, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_interval=1)
    | dict(moe_layer_start_index=1, router_aux_loss_coef=0.001)
    | dict(moe_layer_end_index=lambda reader: reader.take("num_hidden_layers", int) - 1),
    rules=(*f.MIXTURE, *f.DENSE, *f.SHARED, *f.in_layers({f"mlp.{_STATICS}": _BIAS})),
    also=(*f.FUSED, *f.in_layers({f"mlp.gate.{_STATICS}": _BIAS})),
    dropped=(r"^(model\.)?mtp",),
    float32=r"e_score_correction_bias$|\.mlp\.gate\.weight$",
    ignored=("moe_capacity",),
)
