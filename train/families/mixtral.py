"""Mixtral (arXiv 2401.04088)."""

from . import family as f
from .keys import Key, Only, Rotary

MIXTRAL = f.Family(
    ("mixtral",),
    "MixtralForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.TOKEN_CHOICE,
        Rotary(1e6),
        Key("num_local_experts", f.NUM_EXPERTS, also=("num_experts",)),
        Key("intermediate_size", f.D_EXPERT),
        Key("sliding_window", "attention.window", null=True),
        Only("router_jitter_noise", 0.0),
    ),
    constants={
        "feed_forward.router.kind": "token_choice",
        "feed_forward.router.renormalise": True,
    },
    defaults=dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336)
    | dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    | dict(rms_norm_eps=1e-5, sliding_window=None, num_experts_per_tok=2, num_local_experts=8)
    | dict(router_aux_loss_coef=0.001),
    rules=(
        *(*f.OUTER, *f.ATTENTION, *f.in_layers({"block_sparse_moe.gate.weight": f.GATE})),
        *f.experts("block_sparse_moe.experts.", "w1", "w3", "w2"),
    ),
    also=(*f.ROUTER, *f.FUSED),
)
