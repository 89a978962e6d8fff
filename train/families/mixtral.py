"""Mixtral (arXiv 2401.04088) and OLMoE (arXiv 2409.02060); Llama, Mistral and OLMo 2, all dense."""

from typing import Any

from . import family as f
from .keys import ConfigKey, Dotted, Only, Own, Reader, Rotary, UnfitError

_LLAMA_SIZES = (
    dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    | dict(intermediate_size=11008, num_key_value_heads=None)
    | dict(rms_norm_eps=1e-6, attention_bias=False)
)
_MISTRAL_SIZES = _LLAMA_SIZES | dict(intermediate_size=14336, num_key_value_heads=8)
LLAMA = f.Family(
    ("llama",),
    "LlamaForCausalLM",
    parts=(
        *f.DENSE_PARTS,
        f.QKVO_BIAS,
        Rotary(),
        ConfigKey("mlp_bias", "feed_forward.dense_bias", bool),
        Only("pretraining_tp", 1),
    ),
    constants=f.WITHOUT_EXPERTS,
    defaults=_LLAMA_SIZES | {"mlp_bias": False},
    rules=f.DENSE_MODEL,
)
MISTRAL = f.Family(
    ("mistral",),
    "MistralForCausalLM",
    parts=(*f.DENSE_PARTS, Rotary(), f.WINDOW),
    constants=f.WITHOUT_EXPERTS,
    defaults=_MISTRAL_SIZES | {"sliding_window": 4096},
    rules=f.DENSE_MODEL,
)
OLMO2 = f.Family(
    ("olmo2",),
    "Olmo2ForCausalLM",
    parts=(*f.DENSE_PARTS, f.QKVO_BIAS, Rotary()),
    constants=f.WITHOUT_EXPERTS | {"norm": "output", "attention.qk_norm": "all_heads"},
    defaults=_LLAMA_SIZES | dict(vocab_size=50304, rms_norm_eps=1e-5),
    rules=(
        *(*f.EMBEDDING_AND_HEAD, *f.ATTENTION, *f.DENSE),
        *f.in_layers({"post_attention_layernorm.weight": "attention_output_norm.weight"}),
        *f.in_layers({"post_feedforward_layernorm.weight": "feed_forward_output_norm.weight"}),
    ),
)
MIXTRAL = f.Family(
    ("mixtral",),
    "MixtralForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        *f.TOKEN_CHOICE,
        Rotary(1e6),
        ConfigKey("num_local_experts", f.NUM_EXPERTS, also=("num_experts",)),
        ConfigKey("intermediate_size", f.D_EXPERT),
        f.WINDOW,
        Only("router_jitter_noise", 0.0),
    ),
    constants={
        "feed_forward.router.kind": "token_choice",
        "feed_forward.router.renormalise": True,
    },
    defaults=_MISTRAL_SIZES
    | dict(rms_norm_eps=1e-5, sliding_window=None, num_experts_per_tok=2, num_local_experts=8)
    | dict(router_aux_loss_coef=0.001),
    rules=(
        *(*f.OUTER, *f.ATTENTION, *f.in_layers({"block_sparse_moe.gate.weight": f.GATE})),
        *f.experts("block_sparse_moe.experts.", "w1", "w3", "w2"),
    ),
    also=(*f.ROUTER, *f.FUSED),
)


def _read_width(reader: Reader) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "head_dim")
    _check_width(*(reader.take(name, int) for name in names))
    return {}


def _write_width(model: Dotted) -> dict[str, Any]:
    names = ("d_model", "attention.num_heads", "attention.d_head")
    _check_width(*(model[name] for name in names))
    return {}


def _check_width(d_model: int, num_heads: int, d_head: int) -> None:
    """Refuses what the class cannot build: its norms of queries and keys are as wide as the stream."""
    if num_heads * d_head != d_model:
        raise UnfitError(
            f"head_dim={d_head} with num_attention_heads={num_heads}: OLMoE needs heads of "
            f"hidden_size={d_model} channels together"
        )


OLMOE = f.Family(
    ("olmoe",),
    "OlmoeForCausalLM",
    parts=(
        *f.DENSE_ATTENTION,
        Own(_read_width, _write_width),
        *f.TOKEN_CHOICE,
        f.QKVO_BIAS,
        f.RENORMALISE,
        Rotary(),
        ConfigKey("num_experts", f.NUM_EXPERTS, also=("num_local_experts",)),
        ConfigKey("intermediate_size", f.D_EXPERT),
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
