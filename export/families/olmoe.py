"""OLMoE (arXiv 2409.02060)."""

from . import family as f
from .keys import Key, Only, Rotary

OLMOE = f.Family(
    ("olmoe",),
    "OlmoeForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.TOKEN_CHOICE,
        f.QKVO_BIAS,
        f.RENORMALISE,
        Rotary(),
        Key("num_experts", f.NUM_EXPERTS, also=("num_local_experts",)),
        Key("intermediate_size", f.D_EXPERT),
        Only("clip_qkv", None),
    ),
    constants={"attention.qk_norm": "all_heads", "feed_forward.router.kind": "token_choice"},
    defaults=dict(vocab_size=50304, hidden_size=2048, intermediate_size=2048)
    | dict(num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=None)
    | dict(rms_norm_eps=1e-5, attention_bias=False, num_experts_per_tok=8, num_experts=64)
    | dict(router_aux_loss_coef=0.01, norm_topk_prob=False),
    rules=f.MIXTURE,
    also=f.FUSED,
)
