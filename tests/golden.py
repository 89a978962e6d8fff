"""The recorded runs of the official code as (config, weights under our names, expectations)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared import shared_folder
from torch import Tensor

from moebius.model.config.attention_config import (
    DenseAttentionConfig,
    MoMHAConfig,
    SwitchHeadConfig,
)
from moebius.model.config.feed_forward_config import (
    DenseFeedForwardConfig,
    ExpertsConfig,
)
from moebius.model.config.model_config import (
    HaltingConfig,
    InitialisationConfig,
    ModelConfig,
)
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.routers.sut import SutConfig
from moebius.model.transformer import Transformer

RELEASE_NAMES = {
    "attention.q.weight": "attention.query.weight",
    "attention.k.weight": "attention.key.weight",
    "attention.v": "attention.value.experts.weight",
    "attention.o": "attention.output.experts.weight",
    "attention.sel_v": "attention.value_router.weight",
    "attention.sel_o": "attention.output_router.weight",
    "ffn.keys": "feed_forward.sparse.experts.w_up",
    "ffn.values": "feed_forward.sparse.experts.w_down",
    "ffn.expert_sel": "feed_forward.router.weight",
    "ln1": "attention_norm",
    "ln2": "feed_forward_norm",
}
SINGLE_EXPERT_NAMES = {
    "attention.v": "attention.value.weight",
    "attention.o": "attention.output.weight",
    "attention.sel_o": "attention.head_gate.weight",
}
TRAINING_NAMES = {
    "self_attn.projections.q": "attention.query.weight",
    "self_attn.projections.k": "attention.key.weight",
    "self_attn.projections.v": "attention.value.experts.weight",
    "self_attn.projections.o": "attention.output.experts.weight",
    "self_attn.selections.v": "attention.value_router.weight",
    "self_attn.selections.o": "attention.output_router.weight",
    "self_attn.norm": "attention_norm",
    "self_attn.out_proj.weight": "attention.output.weight",
    "self_attn.data_to_q.weight": "attention.query.weight",
    "pkm.keys": "feed_forward.sparse.experts.w_up",
    "pkm.values": "feed_forward.sparse.experts.w_down",
    "pkm.expert_sel": "feed_forward.router.weight",
    "pkm.norm": "feed_forward_norm",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
}
SUT_NAMES = {
    "_gate.0": "halting.hidden",
    "_gate.3": "halting.output",
    "mod.self_attn_layer_norm": "group.0.attention_norm",
    "mod.final_layer_norm": "group.0.feed_forward_norm",
    "mod.self_attn.rel_pos_emb": "group.0.attention.relative",
    "mod.self_attn.k_proj": "group.0.attention.key",
    "mod.self_attn.v_proj": "group.0.attention.value",
    "mod.self_attn.q_proj.experts.w": "group.0.attention.query.experts.weight",
    "mod.self_attn.q_proj.output_experts.w": "group.0.attention.output.experts.weight",
    "mod.self_attn.q_proj.w_gate.0": "group.0.attention.router.hidden",
    "mod.self_attn.q_proj.w_gate.3": "group.0.attention.router.output",
    "mod.moe.experts.w": "group.0.feed_forward.sparse.experts.w_up",
    "mod.moe.experts.b": "group.0.feed_forward.sparse.experts.b_up",
    "mod.moe.output_experts.w": "group.0.feed_forward.sparse.experts.w_down",
    "mod.moe.output_experts.b": "group.0.feed_forward.sparse.experts.b_down",
    "mod.moe.w_gate.0": "group.0.feed_forward.router.hidden",
    "mod.moe.w_gate.3": "group.0.feed_forward.router.output",
}
OUTER_NAMES = {
    "embedding.weight": "embedding",
    "lm_head": "head",
    "output": "head",
    "out_norm": "final_norm",
}


@dataclass(frozen=True)
class Golden:
    """One recorded run."""

    arrays: dict[str, np.ndarray]
    config: ModelConfig
    recorded: dict[str, Any]  # the arguments of the recorded program

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """All tensors under `prefix` ("w/", "g/", "w_after/"), by our parameter names."""
        out = {}
        for key in self.arrays:
            if key.startswith(prefix):
                for name, value in self._translate(key.removeprefix(prefix), self[key]):
                    out[name] = value
        return out

    def model(self, **changes: object) -> Transformer:
        """A model with the recorded weights."""
        model = Transformer(self.config, **changes)  # type: ignore[arg-type]
        model.load_state_dict(self.tensors("w/"))
        return model

    def _translate(self, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
        for layers in ("transformer.layers.", "unique_layers."):
            if name.startswith(layers):
                member, _, rest = name.removeprefix(layers).partition(".")
                if self.config.attention.kind == "momha":
                    return [(_rename(rest, SUT_NAMES), value)]
                return [
                    (f"group.{member}.{new}", tensor)
                    for new, tensor in self._translate_part(rest, value)
                ]
        return [(_rename(name, OUTER_NAMES), value)]

    def _translate_part(self, part: str, value: Tensor) -> list[tuple[str, Tensor]]:
        if part == "self_attn.data_to_kv.weight":
            key, content = value.chunk(2)
            return [("attention.key.weight", key), ("attention.value.weight", content)]
        names = RELEASE_NAMES | TRAINING_NAMES
        if self.config.attention.kind == "switchhead" and not self.config.attention.expert_count:
            names = names | SINGLE_EXPERT_NAMES
        return [(_rename(part, names), value)]


def _rename(name: str, names: dict[str, str]) -> str:
    for old in sorted(names, key=len, reverse=True):
        if name == old or name.startswith(old + "."):
            return names[old] + name[len(old) :]
    raise KeyError(name)


def load_golden(name: str) -> Golden:
    """Reads one recorded run, or skips the test where the records are absent."""
    folder = shared_folder()
    if folder is None:
        pytest.skip(
            "the recorded runs of the official code are not beside the project (set MOEBIUS_SHARED)"
        )
    with np.load(Path(folder) / "golden" / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    recorded = json.loads(str(arrays.pop("config_json")))
    config = _release_config(recorded) if "preset" in recorded else training_config(recorded)
    return Golden(arrays, config, recorded)


def _release_config(r: dict) -> ModelConfig:
    return ModelConfig(
        vocab_size=r["n_tokens"],
        d_model=r["d_model"],
        num_layers=r["n_layers"],
        layers_per_group=r["group_size"],
        attention=SwitchHeadConfig(
            num_heads=r["n_heads"],
            d_head=r["d_head"],
            num_experts=r["att_n_experts"],
            top_k=r["att_k"],
        ),
        feed_forward=ExpertsConfig(
            num_experts=r["ff_n_experts"],
            router=SigmoidConfig(top_k=r["ff_k"]),
            d_expert=r["ff_expert_size"],
        ),
    )


# Variants of the training code: (what is in the layers, the norm). "post" is what its names leave
# out; which norm a "preln" of experts means, `moe.nonorm` says.
VARIANTS = {
    "preln_rope": ("dense", "pre"),
    "rope": ("dense", "post"),
    "preln_rope_universal": ("shared dense", "pre"),
    "rope_universal": ("shared dense", "post"),
    "preln_moe_universal": ("experts", "pre"),
    "moe_universal": ("experts", "post"),
    "sut_universal": ("sut", "post"),
    "actsut_universal": ("sut", "post"),
}


def training_config(r: dict) -> ModelConfig:
    """The model of a run of the paper's training code, from its recorded arguments.

    Raises:
        ValueError: a variant or an order of layers that is not known here.
    """
    variant, order = r["transformer.variant"], r.get("transformer.universal.group_type", "abab")
    if variant not in VARIANTS:
        raise ValueError(f"transformer.variant={variant!r} is none of {', '.join(VARIANTS)}")
    if order not in ("abab", "aabb"):
        raise ValueError(f"transformer.universal.group_type={order!r} is neither abab nor aabb")
    kind, norm = VARIANTS[variant]
    if kind == "sut":
        return _sut_config(r)
    common = {
        "vocab_size": r["n_tokens"],
        "d_model": r["state_size"],
        "num_layers": r["transformer.encoder_n_layers"],
        "order": order,
    }
    if kind == "experts":
        return _experts_config(r, common, norm)
    return _dense_config(r, common, norm, shared=kind == "shared dense")


def _heads(r: dict) -> dict:
    return {
        "num_heads": r["transformer.n_heads"],
        "d_head": r["transformer.head_projection_size"],
    }


def _dense_config(r: dict, common: dict, norm: str, *, shared: bool) -> ModelConfig:
    group = r.get("transformer.universal.group_size", 1) if shared else common["num_layers"]
    d_feed_forward = int(common["d_model"] * r["transformer.ff_multiplier"])
    return ModelConfig(
        **common,
        layers_per_group=group,
        norm=norm,  # pyright: ignore[reportArgumentType]
        attention=DenseAttentionConfig(**_heads(r)),
        feed_forward=DenseFeedForwardConfig(d_feed_forward=d_feed_forward),
    )


def _experts_config(r: dict, common: dict, norm: str) -> ModelConfig:
    if r.get("moe.nonorm") and norm != "pre":
        raise ValueError("moe.nonorm of a post-norm run: peri-layernorm is a kind of pre-norm")
    return ModelConfig(
        **common,
        layers_per_group=r["transformer.universal.group_size"],
        norm="peri" if r.get("moe.nonorm") else norm,  # pyright: ignore[reportArgumentType]
        attention=SwitchHeadConfig(
            **_heads(r),
            num_experts=r["moe.att.n_experts"],
            top_k=r["moe.att.k"],
            single_expert="gated_experts",
        ),
        feed_forward=ExpertsConfig(
            num_experts=r["moe.n_experts"],
            router=SigmoidConfig(top_k=r["pkm.n_heads"]),
            d_expert=r["moe.expert_size"],
        ),
    )


def _sut_config(r: dict) -> ModelConfig:
    halting = None
    if r["transformer.variant"] == "actsut_universal":
        halting = HaltingConfig(loss=r["transformer.act_loss"], loss_sum="all")
    return ModelConfig(
        vocab_size=r["n_tokens"],
        d_model=r["state_size"],
        num_layers=r["transformer.encoder_n_layers"],
        layers_per_group=1,
        norm="post",
        halting=halting,
        attention=MoMHAConfig(
            num_experts=r["moe.att.n_experts"],
            top_k=r["moe.att.k"],
            d_head=r["transformer.head_projection_size"],
            num_heads=r["moe.att.expert_size"] // r["transformer.head_projection_size"],
            balance=r["moa.miloss"],
        ),
        feed_forward=ExpertsConfig(
            num_experts=r["moe.n_experts"],
            d_expert=r["moe.expert_size"],
            expert_bias=True,
            router=SutConfig(
                top_k=r["pkm.n_heads"], mi_loss=r["moa.miloss"], mi_sign="as_published"
            ),
        ),
        initialisation=InitialisationConfig(kind="sut"),
    )
