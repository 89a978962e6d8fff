"""Writes a checkpoint's weights as safetensors with one key per expert.

Experts are stored individually in torch.nn.Linear's [out, in], as mixtures of experts are
published. A converter or server picks whole experts by name, without knowing our banks [E, in,
out]. The price is a few thousand keys and a transposition. docs/export.md lists the keys.

`dtype` applies to weights that enter matrix products. Routers, norms, biases, embeddings and
buffers keep their precision, as in training, so exporting a bfloat16 run preserves its bits.

Cost: three passes over the bytes; memory for one output file and the largest tensor.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..data_pipeline.files import sync
from ..distributed.checkpoint.format import CheckpointError, StartProgress, StoredCheckpoint
from ..distributed.checkpoint.loading import dtype_named, read_tensor
from ..distributed.checkpoint.pieces import INDEX_FILE, ONE_FILE, Piece, cut, require_safetensors
from ..distributed.checkpoint.writing import write_synced
from ..model.execution.precision import product_weights
from ..model.transformer import Transformer
from ..train.config.run_config import Config, ConfigError
from ..train.families.own import OWN

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ExportedTensor:
    """Describes one exported key: what its pieces cut out of a tensor of the model."""

    pieces: tuple[Piece, ...]  # several if they interleave
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Returns its name in the file."""
        return self.pieces[0].key

    @property
    def name(self) -> str:
        """Returns the name of the model's tensor."""
        return self.pieces[0].name

    @property
    def num_bytes(self) -> int:
        """Returns the size of its values."""
        return math.prod(self.pieces[0].shape) * self.dtype.itemsize

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns a copy of this part of the model's whole tensor, as exported."""
        whole = torch.empty(self.pieces[0].shape, dtype=self.dtype)
        for piece in self.pieces:
            whole[..., piece.phase :: piece.step].copy_(cut(tensor, piece))
        return whole


Plan = Mapping[str, list[ExportedTensor]]
"""The tensors of every file, by its name."""


def plan_files(tensors: Iterable[ExportedTensor], max_file_bytes: int) -> Plan:
    """Assigns tensors to files, in their order, up to `max_file_bytes` each."""
    files: list[list[ExportedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.num_bytes > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.num_bytes
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {
        f"model-{n:05}-of-{len(files):05}.safetensors": pieces
        for n, pieces in enumerate(files, start=1)
    }


def num_bytes_of(plan: Plan) -> int:
    """Returns the size of all values of a plan."""
    return sum(piece.num_bytes for pieces in plan.values() for piece in pieces)


def write_weights(
    stored: StoredCheckpoint,
    plan: Plan,
    folder: Path,
    start_progress: StartProgress,
    *,
    is_published: bool = False,
) -> None:
    """Writes the planned files and their index into a folder, and reads every file back.

    As published, a single file has no index.

    Raises:
        CheckpointError: the disk is full, or a file reads back differently.
    """
    total = num_bytes_of(plan)
    on_bytes = start_progress("writing the files", total)
    for file, tensors in _cut(stored, plan):
        _save(tensors, folder / file)
        _compare(tensors, folder / file)
        on_bytes(sum(tensor.nbytes for tensor in tensors.values()))
        tensors.clear()  # before the next file is filled
    if is_published and len(plan) == 1:
        return
    weight_map = {piece.key: file for file, pieces in plan.items() for piece in pieces}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_synced(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def own_tensors(
    stored: StoredCheckpoint, config: Config, dtype: Precision
) -> Iterator[ExportedTensor]:
    """Yields the model's tensors under moebius' names, with one key per expert, in their order.

    Raises:
        ConfigError: the run stores everything in bfloat16.
    """
    if config.train.precision == "bfloat16_only":
        raise ConfigError(
            'train.precision="bfloat16_only" cannot be exported, because exports keep norms, routers '
            "and embeddings in float32; use the run's checkpoints (`moebius eval`, `generate`)"
        )
    with torch.device("meta"):
        model = Transformer(config.model)
    cast = product_weights(model)
    for key, tensor in sorted(stored.index.tensors.items()):
        name = key.removeprefix("model.")
        if name == key:  # the optimizer's
            continue
        own = DTYPES[dtype] if name in cast else dtype_named(tensor.dtype)
        for rule in OWN.forms(name)[0]:
            for piece in rule.pieces(name, tensor.shape):
                yield ExportedTensor((piece,), own)


def _cut(stored: StoredCheckpoint, plan: Plan) -> Iterator[tuple[str, dict[str, Tensor]]]:
    name, tensor = "", torch.empty(0)
    for file, pieces in plan.items():
        tensors = {}
        for piece in pieces:
            if piece.name != name:
                del tensor  # before the next one is read
                name, tensor = piece.name, read_tensor(stored, f"model.{piece.name}")
            tensors[piece.key] = piece.cut(tensor)
        yield file, tensors


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    library = require_safetensors()
    try:
        library.torch.save_file(tensors, file, metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise CheckpointError(
            f"{file.name} could not be written: {error}; the export was removed"
        ) from error
    # The library makes files that only their owner can read.
    file.chmod(file.parent.stat().st_mode & 0o666)
    sync(file)


def _compare(tensors: dict[str, Tensor], file: Path) -> None:
    """Reads a file back and compares it with what was written."""
    library = require_safetensors()
    try:
        with library.safe_open(file, framework="pt") as opened:
            unlike = [
                key
                for key, tensor in tensors.items()
                if not torch.equal(_bytes_of(opened.get_tensor(key)), _bytes_of(tensor))
            ]
    except library.SafetensorError as error:
        unlike = [str(error)]
    if unlike:
        raise CheckpointError(
            f"{file.name} reads back differently ({unlike[0]}); check the disk. The export was removed"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # nan is not equal to itself, but its bytes are
