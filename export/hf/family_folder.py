"""Writes a model of a published family in the family's own format, without code of moebius.

A run that began with a published folder has that folder's small files in `source/`. They come back
byte for byte, config.json follows the original, and tensors have the dtypes that they had.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch

from ...data_pipeline.files import json_object
from ...distributed.checkpoint.format import CheckpointError, StoredCheckpoint
from ...distributed.checkpoint.loading import dtype_named, read_tensor
from ...distributed.checkpoint.pieces import CONFIG_FILE, DTYPES_FILE, Piece
from ...distributed.checkpoint.source import SOURCE_FILES, kept_files, read_source
from ...model.config.model_config import ModelConfig
from ...train.families.family import Family
from ...train.families.keys import BALANCE_KEYS, Dotted
from ...train.families.table import FAMILY, family_of, pieces_of
from ..safetensors import DTYPES, ExportedTensor, Precision

_DTYPE_KEYS = ("dtype", "torch_dtype")
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Origin:
    """Describes the family of a run's model, and the published folder that the run began with."""

    family: Family
    run_dir: Path
    model: ModelConfig

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Returns the kept files by name, config.json too; none: the run began without."""
        files = {path.name: path.read_bytes() for path in kept_files(self.run_dir)}
        return {} if _is_own(files.get(CONFIG_FILE, b"{}")) else files

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """Returns the dtypes of the published tensors that are unlike most, and of "most"."""
        if DTYPES_FILE not in self.files:
            return {"most": "float32"}
        where = f"{self.run_dir / SOURCE_FILES / DTYPES_FILE}"
        try:
            found = json_object(self.files[DTYPES_FILE], where)
            return {**found["others"], "most": found["most"]}
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{where}: is damaged ({error}): import the folder again"
            ) from None

    def dtype_of(self, piece: Piece) -> torch.dtype:
        """Returns the dtype of a published tensor in the folder, whatever its name was there."""
        others = [rule.published for form in self.family.forms(piece.name)[1:] for rule in form]
        found = filter(None, map(self.dtypes.get, (piece.key, *others)))
        return dtype_named(next(found, self.dtypes["most"]))


def origin_of(run_dir: Path, model: ModelConfig) -> Origin | None:
    """Returns what a run's model is and began with; None: the model is moebius' own."""
    source = read_source(run_dir)
    family = family_of(model, source.family if source else None)
    return None if family is None else Origin(family, run_dir, model)


def _is_own(config: bytes) -> bool:
    """Returns whether config.json is that of an export of moebius' own, which describes no family."""
    return isinstance(json_object(config, CONFIG_FILE).get("model"), dict)


def dtype_before(run_dir: Path) -> Precision:
    """Returns the dtype of the own export that a run began with, or else float32."""
    kept = run_dir / SOURCE_FILES / CONFIG_FILE
    text = kept.read_bytes() if kept.exists() else b"{}"
    dtype = f"torch.{json_object(text, str(kept)).get('dtype')}"
    found = (name for name in get_args(Precision) if str(DTYPES[name]) == dtype)
    return next(found, "fp32") if _is_own(text) else "fp32"


def family_tensors(
    stored: StoredCheckpoint, origin: Origin, dtype: Precision | None
) -> Iterator[ExportedTensor]:
    """Yields the model's tensors under the family's names.

    Args:
        stored: the checkpoint.
        origin: what its model is.
        dtype: of all tensors but those that the family keeps in float32; none: as in the folder
            that the run began with.

    Raises:
        CheckpointError: the family has no place for what the checkpoint learned.
    """
    family = origin.family
    for key in stored.index.tensors:
        is_lacking = key.startswith("model.") and key.endswith(family.zeros)
        if is_lacking and read_tensor(stored, key).any():
            raise CheckpointError(
                f"{stored.path}: {key} is not zero, and {family.architecture} has none; use "
                "--format safetensors"
            )
    pieces = pieces_of(family, origin.model)
    for key, group in itertools.groupby(pieces, key=lambda piece: piece.key):
        parts = tuple(group)
        chosen = DTYPES[dtype] if dtype else origin.dtype_of(parts[0])
        if re.search(family.float32, key) and (dtype or key.endswith("e_score_correction_bias")):
            chosen = torch.float32
        yield ExportedTensor(parts, chosen)


def family_config(
    origin: Origin, dtype: Precision | None, max_positions: int, end_id: int | None
) -> str:
    """Returns config.json: the original with what has changed, or a new one in both dialects."""
    family, model = origin.family, origin.model
    where = f"{origin.run_dir / SOURCE_FILES / CONFIG_FILE}"
    values = json_object(origin.files.get(CONFIG_FILE, b"{}"), where)
    if not values:
        ids = {"eos_token_id": end_id, "pad_token_id": end_id}
        values = family.write(model, max_positions) | ids
    values["vocab_size"] = model.vocab_size
    longest = values.get("max_position_embeddings")
    written = family.write(model, longest if isinstance(longest, int) else max_positions)
    before = values.get("model_type")  # of a growth, perhaps another family's
    is_other = before in FAMILY.known and before not in family.model_types
    if is_other or not family.fits(model, values):
        others = {name for part in family.parts for name in getattr(part, "also", ())}
        kept = (key for key in values if key.endswith("_token_id") or not is_other)
        values = {key: values[key] for key in kept if key not in others}
        values |= written
    elif _balance(family, values) != _balance(family, written):
        values |= {key: written[key] for key in BALANCE_KEYS if key in written}
    keys = [key for key in _DTYPE_KEYS if key in values] or ["torch_dtype"]
    main = str(DTYPES[dtype]).removeprefix("torch.") if dtype else origin.dtypes["most"]
    values |= dict.fromkeys(keys, main)
    if family.mtp_layers or any(map(values.get, _MTP_KEYS)):  # they were not loaded
        values |= dict.fromkeys([key for key in _MTP_KEYS if key in values] or _MTP_KEYS[:1], 0)
    values.pop("quantization_config", None)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _balance(family: Family, values: Mapping[str, Any]) -> Any:
    """Returns the weight of the balancing loss that the family's own class adds."""
    return Dotted(family.read(values)[0]).values["feed_forward"].get("router", {}).get("balance")


def original_files(origin: Origin) -> dict[str, bytes]:
    """Returns the files that the folder of origin had beside weights and config.json."""
    own = (CONFIG_FILE, DTYPES_FILE)
    return {name: data for name, data in origin.files.items() if name not in own}
