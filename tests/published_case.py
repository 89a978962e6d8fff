"""Recorded folders of published families, and models with their weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from shared import shared_folder
from torch import Tensor

from moebius.distributed.checkpoint.grown import PublishedReader
from moebius.model.transformer import Transformer
from moebius.train.families.table import FolderPlan, open_family, shapes_of

MIXTURES = tuple(
    f"hf_{name}_a"
    for name in (
        *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
        *("gpt_oss", "granitemoe", "granitemoeshared", "glm4_moe", "ernie4_5_moe"),
    )
)
DENSE = tuple(f"hf_{name}_a" for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2"))
RECORDED = MIXTURES + DENSE
AWKWARD = tuple(
    f"hf_folders_a/{name}"
    for name in ("qwen3_moe_sharded", "qwen3_moe_fused", "deepseek_v3_mtp", "gpt_oss_mxfp4")
)


def folder_of(name: str) -> Path:
    """Returns a recorded folder, or skips the test without the recordings."""
    return shared_folder() / "golden" / name


@cache
def arrays_of(name: str) -> dict[str, Tensor]:
    """Returns what was recorded of a folder's model."""
    folder = folder_of(name)
    beside = folder.with_name(f"{folder.name}.npz")
    with np.load(beside if beside.exists() else folder / "expected.npz") as file:
        kept = {key: file[key] for key in file.files}
    return {key: torch.from_numpy(kept[key]) for key in kept if kept[key].dtype.kind in "fiub"}


def names_to_export(name: str) -> set[str]:
    """Returns the names of tensors that an export of an awkward folder must have."""
    with np.load(folder_of(name) / "expected.npz") as file:
        return {str(key) for key in file["names"]}


def model_of(plan: FolderPlan, *, backend: str = "auto", **changes: Any) -> Transformer:
    """Builds the model of a folder with its weights; `changes` are dotted keys with __."""
    config = plan.model.changed({key.replace("__", "."): value for key, value in changes.items()})
    model = Transformer(config, backend=backend)
    model.load_state_dict(state_of(plan))
    return model.eval()


def state_of(plan: FolderPlan, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the weights of a folder by our names."""
    reader = PublishedReader(plan.folder, plan.pieces)
    return {name: reader.weight(name, dtype) for name in shapes_of(plan.model)}


def recorded_model(name: str, **changes: Any) -> Transformer:
    """Builds the model of a recorded folder."""
    return model_of(open_family(folder_of(name)), **changes)


def unbalanced_model(name: str, **changes: Any) -> Transformer:
    """Builds the model of a recorded folder without a balancing loss."""
    more = {} if name in DENSE else {"feed_forward__router__balance": 0.0}
    return recorded_model(name, **more, **changes)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's safetensors; a name in two files fails."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                assert key not in found, key
                found[key] = opened.get_tensor(key)
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Lists the names that differ in dtype, shape or bytes, or that only one side has."""
    return sorted(
        key
        for key in one.keys() | other.keys()
        if key not in one
        or key not in other
        or one[key].dtype != other[key].dtype
        or one[key].shape != other[key].shape
        or not torch.equal(*(each[key].reshape(-1).view(torch.uint8) for each in (one, other)))
    )


def config_in(folder: Path, file: str = "config.json") -> dict[str, Any]:
    """Returns a folder's config.json."""
    return json.loads((folder / file).read_text())
