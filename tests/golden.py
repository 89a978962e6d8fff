"""Recorded runs of the official code as (config, weights under our names, expectations)."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
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
from moebius.train.families.import_run import translate


@dataclass(frozen=True)
class Golden:
    """Holds one recorded run."""

    arrays: dict[str, np.ndarray]
    config: ModelConfig
    recorded: dict[str, Any]  # the arguments of the recorded program

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns all tensors under `prefix` ("w/", "g/", "w_after/"), by our parameter names."""
        found = {
            key.removeprefix(prefix): self[key] for key in self.arrays if key.startswith(prefix)
        }
        return translate(found, self.config, origin=prefix)

    def model(self, **changes: object) -> Transformer:
        """Builds a model with the recorded weights."""
        model = Transformer(self.config, **changes)  # type: ignore[arg-type]
        model.load_state_dict(self.tensors("w/"))
        return model


def load_golden(name: str) -> Golden:
    """Reads one recorded run, or skips the test without the recordings."""
    with np.load(shared_folder() / "golden" / f"{name}.npz", allow_pickle=False) as file:
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
    """Builds the model of the paper's training code from recorded arguments."""
    variant, order = r["transformer.variant"], r.get("transformer.universal.group_type", "abab")
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
