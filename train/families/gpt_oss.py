"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every second layer, clamped SwiGLU."""

from . import family as f
from .keys import ConfigKey, Only, Rotary, Windows

_YARN = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
_ROUTER = {
    "self_attn.sinks": "attention.sinks",
    "mlp.router.weight": f.GATE,
    "mlp.router.bias": "feed_forward.router.bias",
}
_UP = [
    {"gate_up_proj": ("w_up", half), "gate_up_proj_bias": ("b_up", half)}
    for half in (f.EVEN, f.ODD)
]
_DOWN = {"down_proj": "w_down", "down_proj_bias": "b_down"}
GPT_OSS = f.Family(
    ("gpt_oss",),
    "GptOssForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.TOKEN_CHOICE,
        f.QKVO_BIAS,
        Rotary(150000.0, scaling=_YARN),
        ConfigKey("num_local_experts", f.NUM_EXPERTS, also=("num_experts",)),
        ConfigKey("intermediate_size", f.D_EXPERT),
        Windows(),
        Only("swiglu_limit", 7.0),
        Only("swiglu_alpha", 1.702),
    ),
    constants={
        "attention.sinks": True,
        "feed_forward.activation": "clamped_swiglu",
        "feed_forward.expert_bias": True,
        "feed_forward.router.kind": "token_choice",
        "feed_forward.router.renormalise": True,
        "feed_forward.router.bias": True,
    },
    defaults=dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880)
    | dict(num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64)
    | dict(rms_norm_eps=1e-5, attention_bias=True, sliding_window=128, num_experts_per_tok=4)
    | dict(num_local_experts=128, router_aux_loss_coef=0.001),
    rules=(
        *(*f.OUTER, *f.ATTENTION, *f.in_layers(_ROUTER)),
        *(rule for names in _UP for rule in f.in_layers(names, "mlp.experts.", f.BANKS)),
        *f.in_layers(_DOWN, "mlp.experts.", f.BANKS),
    ),
)
