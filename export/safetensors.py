"""Exports a checkpoint's weights as safetensors with one key per expert, and loads them back.

Experts are stored individually in torch.nn.Linear's [out, in], as mixtures of experts are
published. A converter or server picks whole experts by name, without knowing our banks [E, in,
out]. The price is a few thousand keys and a transposition. docs/formats.md lists the keys.

`dtype` applies to weights that enter matrix products. Routers, norms, biases, embeddings and
buffers keep their precision, as in training, so exporting a bfloat16 run preserves its bits.

Cost: three passes over the bytes; memory for one output file and the largest tensor.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..data_pipeline.errors import ShardError
from ..data_pipeline.files import sync
from ..data_pipeline.manifest import is_prepared
from ..data_pipeline.tokenizers.interface import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    main_file,
)
from ..data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ..data_pipeline.tokenizers.tokenizer import check_meaning, prepared_tokenizer
from ..distributed.checkpoint.atomic_directory import (
    atomic_directory,
    refuse_existing,
    refuse_name_of_another_step,
)
from ..distributed.checkpoint.format import (
    CheckpointError,
    StartProgress,
    StoredCheckpoint,
    open_checkpoint,
    open_verified,
)
from ..distributed.checkpoint.loading import dtype_named, read_tensor
from ..distributed.checkpoint.writing import write_synced
from ..distributed.parallelize import expert_names
from ..model.config.model_config import ModelConfig
from ..model.execution.precision import enters_a_product
from ..model.transformer import Transformer
from ..train.config.run_config import Config, ConfigError
from ..train.config.validation import validated

INDEX_FILE = "model.safetensors.index.json"
Precision = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES_OF_EXPERTS = {  # a bank's attribute -> key after the expert's number
    "w_up": "w_up.weight",
    "w_down": "w_down.weight",
    "b_up": "w_up.bias",
    "b_down": "w_down.bias",
    "weight": "weight",
}


@dataclass(frozen=True)
class ExportedTensor:
    """Describes one exported key: a tensor of the model, or one expert, transposed."""

    key: str
    name: str  # in the model
    shape: tuple[int, ...]  # as exported
    expert: int | None = None

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns a copy of this part of the model's whole tensor."""
        part = tensor if self.expert is None else tensor[self.expert]
        turned = part.T if self.expert is not None and part.dim() == 2 else part
        return turned.clone(memory_format=torch.contiguous_format)

    def put(self, value: Tensor, tensor: Tensor) -> None:
        """Copies a value back into its part of the model's whole tensor."""
        part = tensor if self.expert is None else tensor[self.expert]
        part.copy_(value.T if self.expert is not None and part.dim() == 2 else value)


@dataclass(frozen=True)
class Description:
    """Holds the files beside the weights, and a line about the tokenizer for the user."""

    files: Mapping[str, str | bytes]
    tokenizer: str  # which, or why none


@dataclass(frozen=True)
class Exported:
    """Summarizes an export for the user."""

    step: int
    files: list[str]
    num_keys: int
    num_bytes: int
    tokenizer: str  # which, or why none

    def __str__(self) -> str:
        files = (
            self.files[0] if len(self.files) == 1 else f"{self.files[0]} … {len(self.files)} files"
        )
        size = f"{self.num_keys:,} keys, {self.num_bytes / 10**6:,.1f} MB"
        return f"weights of step {self.step}, {size}\n  {files}\n  {self.tokenizer}"


def pieces_of(name: str, shape: tuple[int, ...], *, has_experts: bool) -> Iterator[ExportedTensor]:
    """Yields the exported tensors of one tensor of the model."""
    if not has_experts:
        yield ExportedTensor(
            f"{name}.weight" if name in ("embedding", "position_embedding") else name, name, shape
        )
        return
    bank, _, attribute = name.rpartition(".experts.")
    for expert in range(shape[0]):
        key = f"{bank}.experts.{expert}.{_NAMES_OF_EXPERTS[attribute]}"
        yield ExportedTensor(key, name, tuple(reversed(shape[1:])), expert)


def export(
    source: Path,
    out: Path,
    *,
    describe: Callable[[StoredCheckpoint, Config, Precision], Description] | None = None,
    dtype: Precision = "fp32",
    max_file_bytes: int = 5 * 10**9,
    start_progress: StartProgress = lambda what, num_bytes: lambda more: None,
) -> Exported:
    """Writes the weights of the checkpoint `source`, and router state without gradients, into
    `out`.

    `out` appears whole and verified, or not at all. `describe` makes the files beside the weights;
    by default config.json and the tokenizer's own files.

    Raises:
        ValueError: the checkpoint is damaged or belongs to no run, safetensors is missing, `out`
            exists, or the disk is full.
    """
    require_safetensors()
    refuse_name_of_another_step(out, None)
    refuse_existing(out)  # early, because verifying can take an hour
    size = sum(file.num_bytes for file in open_checkpoint(source).manifest.files.values())
    stored = open_verified(source, start_progress("checking the checkpoint", size))
    config = config_of(stored)
    dtypes = _dtypes_of(stored, config, dtype)
    plan = _plan(stored, dtypes, max_file_bytes)
    total = sum(_num_bytes(piece, dtypes) for pieces in plan.values() for piece in pieces)
    beside = (describe or _describe)(stored, config, dtype)
    with atomic_directory(out, needed_bytes=total) as folder:
        on_bytes = start_progress("writing the files", total)
        for file, tensors in _cut(stored, plan, dtypes):
            _save(tensors, folder / file)
            _compare(tensors, folder / file)
            on_bytes(sum(tensor.nbytes for tensor in tensors.values()))
        weight_map = {piece.key: file for file, pieces in plan.items() for piece in pieces}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_synced(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
        for name, content in beside.files.items():
            write_synced(folder / name, content)
    return Exported(stored.meta.step, list(plan), len(weight_map), total, beside.tokenizer)


def load_export(folder: Path, *, backend: str = "auto") -> Transformer:
    """Loads the model of an export, whole on the CPU in evaluation mode.

        from moebius.export.safetensors import load_export

        model = load_export(Path("export"))

    Weights keep the precision in which they were exported.

    Raises:
        ValueError: the folder is not an export of moebius, or keys or shapes do not fit its model.
    """
    require_safetensors()
    values = _read_json(folder / "config.json")
    try:
        config, step = ModelConfig.model_validate(values["model"]), int(values["step"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{folder / 'config.json'} does not describe a moebius model: {reason}"
        ) from error
    weight_map = _weight_map_of(folder)
    with torch.device("meta"):
        model = Transformer(config, backend=backend)
    banks = expert_names(model)
    pieces = {
        piece.key: piece
        for name, tensor in _tensors_of(model).items()
        for piece in pieces_of(name, tuple(tensor.shape), has_experts=name in banks)
    }
    if unlike := sorted(pieces.keys() ^ weight_map.keys()):
        kind = "lacks the" if unlike[0] in pieces else "has the unexpected"
        raise ConfigError(
            f"{folder}: {kind} key {unlike[0]} (differences from its model: {len(unlike)})"
        )
    model.to_empty(device="cpu")
    tensors = _tensors_of(model)
    for file in sorted(set(weight_map.values())):
        keys = [key for key, place in weight_map.items() if place == file]
        for key, value in _read_file(folder / file, keys):
            _fill(tensors[pieces[key].name], pieces[key], value, folder)
    model.before_step(step)
    return model.eval()


# Planning and writing -----------------------------------------------------------------------------


def _dtypes_of(
    stored: StoredCheckpoint, config: Config, dtype: Precision
) -> dict[str, torch.dtype]:
    """Returns each tensor's dtype in the export: `dtype` if it enters matrix products, otherwise
    its own.
    """
    if config.train.precision == "bfloat16_only":
        raise ConfigError(
            'train.precision="bfloat16_only" cannot be exported, because exports keep norms, routers '
            "and embeddings in float32; use the run's checkpoints (`moebius eval`, `generate`)"
        )
    with torch.device("meta"):
        model = Transformer(config.model)
    cast = {name for name, _ in model.named_parameters() if enters_a_product(name)}
    return {
        name: _DTYPES[dtype] if name in cast else dtype_named(tensor.dtype)
        for key, tensor in stored.index.tensors.items()
        if (name := key.removeprefix("model.")) != key
    }


def _plan(
    stored: StoredCheckpoint, dtypes: Mapping[str, torch.dtype], max_file_bytes: int
) -> dict[str, list[ExportedTensor]]:
    """Assigns tensors to files, in the order of their names, up to `max_file_bytes` per file."""
    files: list[list[ExportedTensor]] = [[]]
    filled = 0
    for name, tensor in sorted(stored.index.tensors.items()):
        if not name.startswith("model."):
            continue
        for piece in pieces_of(
            name.removeprefix("model."), tensor.shape, has_experts=name in stored.meta.num_experts
        ):
            size = _num_bytes(piece, dtypes)
            if files[-1] and filled + size > max_file_bytes:
                files.append([])
                filled = 0
            files[-1].append(piece)
            filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{n:05}-of-{len(files):05}.safetensors": pieces
        for n, pieces in enumerate(files, start=1)
    }


def _cut(
    stored: StoredCheckpoint,
    plan: Mapping[str, list[ExportedTensor]],
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    name, tensor = "", torch.empty(0)
    for file, pieces in plan.items():
        tensors = {}
        for piece in pieces:
            if piece.name != name:
                name, tensor = piece.name, read_tensor(stored, f"model.{piece.name}")
            tensors[piece.key] = piece.cut(tensor).to(dtypes[piece.name])
        yield file, tensors


def _num_bytes(piece: ExportedTensor, dtypes: Mapping[str, torch.dtype]) -> int:
    return torch.Size(piece.shape).numel() * dtypes[piece.name].itemsize


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


def require_safetensors() -> Any:
    """Returns the safetensors library, which only exports need."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "exports need safetensors, which is not installed: pip install 'moebius[export]'"
        ) from error
    return safetensors


# Files beside the weights -------------------------------------------------------------------------


def config_of(stored: StoredCheckpoint) -> Config:
    """Returns the configuration of the run that wrote a checkpoint."""
    if not {"config", "progress"} <= stored.meta.meta.keys():
        raise CheckpointError(f"{stored.path}: lacks configuration or progress, so no run wrote it")
    return validated(Config, stored.meta.meta["config"], origin=str(stored.path / "meta.json"))


def _describe(stored: StoredCheckpoint, config: Config, dtype: Precision) -> Description:
    tokenizer, words = tokenizer_of(config, stored)
    described = config_values(stored, config, tokenizer, dtype)
    files = {"config.json": json.dumps(described, indent=2) + "\n"}
    return Description({**files, **_tokenizer_files(tokenizer, config)}, words)


def config_values(
    stored: StoredCheckpoint, config: Config, tokenizer: Tokenizer | None, dtype: Precision
) -> dict[str, Any]:
    """Returns config.json: the usual names, and the model's own configuration, resolved."""
    model = config.model
    return {
        "model_type": "moebius",
        "architectures": ["Transformer"],
        "dtype": str(_DTYPES[dtype]).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_heads,
        "max_position_embeddings": config.data.seq_len,
        "tie_word_embeddings": model.tied_head,
        "eos_token_id": None if tokenizer is None else tokenizer.end_of_document_id,
        "tokenizer": config.prepare.tokenizer,
        "step": stored.meta.step,
        "tokens": stored.meta.meta["progress"]["tokens"],
        "checkpoint_digest": stored.manifest.digest,
        "versions": stored.meta.versions,
        "sparse_members": list(model.sparse_members),
        "model": model.model_dump(mode="json"),
    }


def tokenizer_of(
    config: Config, stored: StoredCheckpoint | None = None
) -> tuple[Tokenizer | None, str]:
    """Returns the run's tokenizer, if it has one, and a line about it for the user.

    Raises:
        ShardError: the data was prepared again with another tokenizer than the checkpoint's.
    """
    if stored is not None and is_prepared(config.data.directory):
        check_meaning(config.data.directory, stored.meta.meta.get("data") or {})
    try:
        tokenizer = prepared_tokenizer(config.data.directory)
    except ShardError as error:
        return None, f"no tokenizer: {error}"
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer, "no tokenizer file: ids are UTF-8 bytes, and 256 ends a document"
    return tokenizer, f"{main_file(tokenizer)} with {tokenizer.vocab_size} ids"


def _tokenizer_files(tokenizer: Tokenizer | None, config: Config) -> dict[str, bytes]:
    if tokenizer is None or isinstance(tokenizer, BytesTokenizer):
        return {}
    described = {
        "eos_token": tokenizer.end_of_document,
        "model_max_length": config.data.seq_len,
    }
    if TOKENIZER_FILE in tokenizer.files:
        described = {"tokenizer_class": "PreTrainedTokenizerFast"} | described
    text = json.dumps(described, indent=2) + "\n"
    return {**tokenizer.files, CONFIG_FILE: text.encode()}


# Reading ------------------------------------------------------------------------------------------


def _tensors_of(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _read_file(file: Path, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    library = require_safetensors()
    try:
        with library.safe_open(file, framework="pt") as opened:
            for key in keys:
                yield key, opened.get_tensor(key)
    except (library.SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


@torch.no_grad()
def _fill(tensor: Tensor, piece: ExportedTensor, value: Tensor, folder: Path) -> None:
    """Copies one exported value into its tensor of the model, which adopts the value's precision."""
    if tuple(value.shape) != piece.shape:
        raise ConfigError(
            f"{folder}: {piece.key} has shape {list(value.shape)}, but its model needs "
            f"{list(piece.shape)}"
        )
    if tensor.dtype != value.dtype:
        if not (tensor.is_floating_point() and value.is_floating_point()):
            raise ConfigError(
                f"{folder}: {piece.key} is {value.dtype}, but its model needs {tensor.dtype}"
            )
        tensor.data = tensor.data.to(value.dtype)
    piece.put(value, tensor)


def _weight_map_of(folder: Path) -> dict[str, str]:
    """Reads which key is in which file; the index is untrusted."""
    found = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ConfigError(f"{folder / INDEX_FILE}: has no weight_map from keys to files")
    files = sorted(set(found.values()))
    if outside := [file for file in files if Path(file).name != file]:
        raise ConfigError(f"{folder / INDEX_FILE}: names a file outside its folder: {outside[0]}")
    if absent := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(f"{folder}: lacks {', '.join(absent)} of {len(files)} weight files")
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); pass a folder from `moebius ckpt export`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: is not a JSON object")
    return found
