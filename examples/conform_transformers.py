"""Hugging Face transformers' own expert parallelism under moebius_conform (satellites/conform/README.md).

    python -m moebius_conform examples/conform_transformers.py:batched_mm

checks the sparse layer of OLMoE in the installed release, loaded as a user loads it, whose experts
are computed by one of transformers' implementations: `eager`, `batched_mm` or `grouped_mm`. All
ranks have the same rows (`tp_size == ep_size`).
"""

import dataclasses
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from moebius_conform import Layer

CONFIG = OlmoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
)


def build(group: dist.ProcessGroup, implementation: str) -> nn.Module:
    """Saves a small model and loads it over so many ranks; its sparse layer is what is checked."""
    folder = Path(tempfile.gettempdir()) / f"conform-olmoe-{os.getppid()}"  # one for all ranks
    if group.rank() == 0:
        OlmoeForCausalLM(CONFIG).save_pretrained(folder)
    settings: dict[str, Any] = {"experts_implementation": implementation}
    if group.size() > 1:
        settings["distributed_config"] = over(group.size())
    dist.barrier(group)
    model = OlmoeForCausalLM.from_pretrained(folder, **settings)
    dist.barrier(group)
    if group.rank() == 0:
        shutil.rmtree(folder)
    return model.train().get_submodule("model.layers.0.mlp")


def over(size: int) -> DistributedConfig:
    """Experts over all ranks, in the words of the installed release."""
    if "ep_size" in {field.name for field in dataclasses.fields(DistributedConfig)}:
        return DistributedConfig(tp_size=size, ep_size=size)
    return DistributedConfig(tp_size=size, enable_expert_parallel=True)


def call(layer: nn.Module, x_TD: Tensor) -> Tensor:
    """Transformers' layers want (batch, positions, width)."""
    y_BTD = layer(x_TD[None])
    return (y_BTD[0] if isinstance(y_BTD, tuple) else y_BTD)[0]


def layer_with(implementation: str) -> Layer:
    """The layer with one of transformers' implementations of its experts."""
    return Layer(
        build=functools.partial(build, implementation=implementation),
        top_k=CONFIG.num_experts_per_tok,
        tokens="same",
        call=call,
    )


eager, batched_mm, grouped_mm = (layer_with(name) for name in ("eager", "batched_mm", "grouped_mm"))
