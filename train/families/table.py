"""The table of families, and what a folder of one of them means: a model and pieces of its tensors."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ...data_pipeline.words import some_of
from ...distributed.checkpoint.pieces import Piece, PublishedFolder
from ...model.config.model_config import ModelConfig
from ...model.transformer import Transformer
from ...plugins import PluginError, Registry, distrust, nearest, trust
from ..config.run_config import ConfigError
from .deepseek import V2, V3
from .family import Family, Rule
from .glm import ERNIE, GLM4
from .gpt_oss import GPT_OSS
from .granite import GRANITE, GRANITE_SHARED
from .mixtral import LLAMA, MISTRAL, MIXTRAL, OLMO2, OLMOE
from .own import OWN
from .qwen import DENSE_QWEN2, DENSE_QWEN3, QWEN2, QWEN3

FAMILIES = (
    *(MIXTRAL, OLMOE, QWEN2, QWEN3, V2, V3, GPT_OSS, GRANITE, GRANITE_SHARED, GLM4, ERNIE),
    *(LLAMA, MISTRAL, DENSE_QWEN2, DENSE_QWEN3, OLMO2),
)
FAMILY = Registry(
    "family",
    "a family of models",
    {model_type: family for family in (*FAMILIES, OWN) for model_type in family.model_types},
    "a Family",
    fits=lambda found: isinstance(found, Family),
)
_INV_FREQ = r"rotary_emb\.inv_freq$"
_LONGEST = 4096  # tokens of a sequence, where the folder says nothing
_ROWS = 4096  # of embedding and head that are compared at a time


@dataclass(frozen=True)
class FolderPlan:
    """Describes what a folder of a family becomes here, checked before anything is allocated."""

    folder: PublishedFolder
    family: str
    model: ModelConfig
    pieces: list[Piece]
    ignored: tuple[str, ...]  # published tensors that are left out
    dequantised: tuple[str, ...]  # published tensors in a packed format
    notes: tuple[str, ...]  # what was assumed, for the user

    @property
    def longest(self) -> int:
        """Returns how many tokens of a sequence the model was trained for, if the folder says so."""
        said = self.folder.config.get("max_position_embeddings")
        return said if isinstance(said, int) and said > 0 else _LONGEST


def open_family(path: Path, family: str | None = None) -> FolderPlan:
    """Opens a published folder and checks that it is whole; reads weights only of a tied head.

    Args:
        path: a folder with config.json.
        family: `module:name` of one's own; by default config.json's model_type names a known one.

    Raises:
        ValueError: the folder is damaged, incomplete, of no known family, or asks for what moebius
            does not compute.
    """
    folder = PublishedFolder(path)
    usual = OWN.model_types[0] if isinstance(folder.config.get("model"), dict) else None
    name = family or str(folder.config.get("model_type", usual))
    found = _family_named(name, is_given=family is not None)
    distrust(folder.config, folder.path)
    try:
        model, notes = found.read(folder.config)
        if model.layers_per_group > len(folder.keys):
            raise ConfigError(
                f"num_hidden_layers={model.num_layers} with {len(folder.keys)} tensors"
            )
        pieces = pieces_of(found, model, folder.keys)
        folder.check(pieces)
        ignored = _left_out(folder, found, model, pieces)
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: {error}") from None
    packed = tuple(key for key, stored in folder.keys.items() if stored.packed)
    return FolderPlan(folder, name, model, pieces, ignored, packed, tuple(dict.fromkeys(notes)))


def _family_named(name: str, *, is_given: bool) -> Family:
    """Returns the family of a name; only one that the user has given can be `module:name`."""
    if is_given:
        trust(name)
    elif name not in FAMILY.known:
        raise PluginError(
            f"model_type: {name!r:.100} is not a family of models{nearest(name, FAMILY.known) or ':'} "
            f"choose {', '.join(FAMILY.known)}, or name a Family of your own, --family module:name"
        )
    return FAMILY.get(name)


def family_of(model: ModelConfig, family: str | None = None) -> Family | None:
    """Returns the family that a model is of, by its configuration; None: it is moebius' own.

    Args:
        family: the name that `open_family` found, which is tried first.
    """
    known = [FAMILY.get(family)] if family else []
    return next((each for each in (*known, *FAMILIES) if each.fits(model)), None)


@cache
def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters and stored buffers, by name."""
    try:
        with torch.device("meta"):
            state = Transformer(model).state_dict()
    except RuntimeError as error:
        raise ConfigError(f"its sizes give no model: {str(error).splitlines()[0]}") from None
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def pieces_of(
    family: Family, model: ModelConfig, keys: Collection[str] | None = None
) -> list[Piece]:
    """Returns the pieces that give every tensor of the model once, in the order of its tensors.

    Args:
        family: the model's.
        model: its configuration.
        keys: published tensors that exist, which decide between published and other names; buffers
            that the family lacks are then pieces without a key. None: the published names.

    Raises:
        ConfigError: a tensor has no rule, is missing, or is there under two names.
    """
    found: list[Piece] = []
    for name, shape in shapes_of(model).items():
        if name.endswith(family.zeros):
            found += [] if keys is None else [Piece("", name, (0,) * len(shape), shape, ())]
            continue
        forms = family.forms(name)
        if not forms:
            raise ConfigError(f"{family.architecture} has no tensor for {name} {list(shape)}")
        rules = forms[0] if keys is None else _chosen(forms, name, shape, keys)
        found += [piece for rule in rules for piece in rule.pieces(name, shape)]
    return found


def _chosen(
    forms: list[list[Rule]], name: str, shape: tuple[int, ...], keys: Collection[str]
) -> list[Rule]:
    """Returns the one form whose tensors exist."""
    firsts = {rules[0].published.replace("{E}", "0"): rules for rules in forms}
    there = [key for key in firsts if key in keys]
    if len(there) > 1:
        raise ConfigError(f"one tensor is there twice, as {' and '.join(there)}")
    if not there:
        wanted = next(forms[0][0].pieces(name, shape)).shape
        raise ConfigError(f"has no tensor {' or '.join(firsts)}, shape {list(wanted)}")
    rules = firsts[there[0]]
    if "{E}" in rules[0].published and shape[0] > len(keys):
        raise ConfigError(
            f"the model of config.json has {shape[0]} experts, and the folder has {len(keys)} tensors"
        )
    return rules


def _left_out(
    folder: PublishedFolder, family: Family, model: ModelConfig, pieces: list[Piece]
) -> tuple[str, ...]:
    """Returns the published tensors that are left out on purpose.

    Raises:
        ConfigError: one is unknown.
    """
    more = folder.config.get("num_nextn_predict_layers", folder.config.get("num_mtp_layers", 1))
    last = model.num_layers + (more if isinstance(more, int) and family.mtp_layers else 0)

    def is_known(key: str) -> bool:
        if any(re.search(pattern, key) for pattern in (_INV_FREQ, *family.dropped)):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", key)
        if layer is None:
            return _is_tied(key, folder, family, pieces)
        return model.num_layers <= int(layer[1]) < last

    used = {piece.key for piece in pieces}
    others = [key for key in folder.keys if key not in used]
    if unknown := [key for key in others if not is_known(key)]:
        tied = "; it ties the head to the embedding" if "lm_head.weight" in unknown else ""
        raise ConfigError(
            f"the model of config.json has no place for {some_of(unknown)}{tied}; a folder is read "
            "only if every tensor is known"
        )
    return tuple(others)


def _is_tied(key: str, folder: PublishedFolder, family: Family, pieces: list[Piece]) -> bool:
    """Returns whether a tensor is the head of a model that ties it, and equal to the embedding."""
    if key not in {rule.published for form in family.forms("head.weight") for rule in form}:
        return False
    embedding = next(piece for piece in pieces if piece.name == "embedding")
    both, (rows, width) = (embedding, embedding._replace(key=key)), embedding.sizes
    folder.check(both)
    for row in range(0, rows, _ROWS):
        sizes = (min(_ROWS, rows - row), width)
        if not torch.equal(*(folder.read(piece, (row, 0), sizes).float() for piece in both)):
            return False
    return True
