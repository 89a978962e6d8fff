"""GLM-4.5 (arXiv 2508.06471): DeepSeek-V3's gate with grouped-query attention."""

from . import family as f
from .keys import Key, Rotary

GLM4 = f.Family(
    ("glm4_moe",),
    "Glm4MoeForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.V3_GATE,
        Rotary(share=0.5),
        Key("attention_bias", "attention.bias", bool, {False: "none", True: "qkv"}),
        Key("use_qk_norm", "attention.qk_norm", bool, {False: False, True: "per_head"}),
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
