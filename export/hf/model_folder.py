"""Writes a folder that transformers loads: weights, the model's code, its tokenizer and a card.

Weights are safetensors with one key per expert (../safetensors.py); the modules of
modeling_moebius.py have the same names as ours. That code needs only torch and transformers. It
processes each sequence by itself and each position without later ones, so only models that promise
both in evaluation can be exported this way.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...data_pipeline.errors import DataError, InputError, ShardError
from ...data_pipeline.manifest import is_prepared
from ...data_pipeline.read.rows import SplitReader
from ...data_pipeline.tokenizers.hub import open_tokenizer
from ...data_pipeline.tokenizers.interface import Tokenizer, main_file
from ...data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ...data_pipeline.tokenizers.tokenizer import check_meaning, prepared_tokenizer
from ...distributed.checkpoint.atomic_directory import (
    atomic_directory,
    refuse_existing,
    refuse_name_of_another_step,
)
from ...distributed.checkpoint.format import (
    StartProgress,
    StoredCheckpoint,
    Weights,
    open_checkpoint,
    open_verified,
)
from ...distributed.checkpoint.loading import choose_weights
from ...distributed.checkpoint.source import read_source
from ...distributed.checkpoint.writing import write_synced
from ...model.config.model_config import ModelConfig
from ...train.config.run_config import Config, ConfigError
from ...train.record.run_folder import checkpoint_config
from ..safetensors import (
    DTYPES,
    Precision,
    num_bytes_of,
    own_tensors,
    plan_files,
    require_safetensors,
    write_weights,
)
from .card import make_card
from .family_folder import dtype_before, family_config, family_tensors, origin_of, original_files
from .tokenizer import tokenizer_files

_SAMPLE_ROWS = 64
Layout = Literal["hf", "safetensors"]
# What moebius' own code for transformers does not compute, with the values that it does: blocks of
# other people's models, which go out in their own format.
_BEYOND_CODE: dict[str, tuple[Any, ...]] = {
    "norm_eps": (None,),
    "scale_embedding": (False, True),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "attention.num_kv_heads": (None,),
    "attention.bias": ("none",),
    "attention.qk_norm": (False, True),
    "attention.scale": (None,),
    "attention.window": (None,),
    "attention.sinks": (False,),
    "attention.positions.yarn": (None,),
    "attention.positions.amplitude": (1.0,),
    "feed_forward.d_shared_expert": (None,),
    "feed_forward.shared_gate": (False,),
    "feed_forward.router.bias": (False,),
}
CODE = (
    "configuration_moebius.py",
    "experts_moebius.py",
    "attention_moebius.py",
    "loops_moebius.py",
    "modeling_moebius.py",
)


@dataclass(frozen=True)
class Exported:
    """Summarizes an export for the user."""

    step: int
    files: list[str]
    num_keys: int
    num_bytes: int
    tokenizer: str  # which, or why none
    weights: Weights = "trained"

    def __str__(self) -> str:
        files = (
            self.files[0] if len(self.files) == 1 else f"{self.files[0]} … {len(self.files)} files"
        )
        size = f"{self.num_keys:,} keys, {self.num_bytes / 10**6:,.1f} MB"
        what = "averaged weights" if self.weights == "average" else "weights"
        return f"{what} of step {self.step}, {size}\n  {files}\n  {self.tokenizer}"


def export(
    source: Path,
    out: Path,
    *,
    layout: Layout = "hf",
    dtype: Precision | None = None,
    max_file_bytes: int = 5 * 10**9,
    with_tokenizer: bool = True,
    start_progress: StartProgress = lambda what, num_bytes: lambda more: None,
    weights: Weights = "trained",
) -> Exported:
    """Writes the model of the checkpoint `source`, and router state without gradients, as the folder
    `out`.

    `out` appears whole and verified, or not at all. "hf" is a folder that transformers loads,
    "safetensors" only the weights and the model's configuration, of any model.

    Args:
        source: the checkpoint; its run folder provides the card's figures.
        dtype: of weights that enter matrix products; none: that of the published folder that the
            run began with, or float32.
        with_tokenizer: False omits a tokenizer that transformers cannot represent.
        weights: those of the step, or their average.

    Raises:
        ValueError: transformers could not run this model as trained, its tokenizer cannot be
            converted, the checkpoint is damaged or belongs to no run, safetensors is missing, `out`
            exists, or the disk is full.
    """
    require_safetensors()
    refuse_name_of_another_step(out, None)
    refuse_existing(out)
    stored = choose_weights(open_checkpoint(source), weights)
    config = checkpoint_config(stored.path, stored.meta.meta)
    run_dir = stored.path.absolute().parent.parent
    origin = origin_of(run_dir, config.model) if layout == "hf" else None
    if origin is None:
        dtype = dtype or dtype_before(run_dir)
        if layout == "hf":
            check_promises(config.model)
    tokenizer, words, files = None, "no tokenizer, as requested", dict[str, bytes]()
    if layout == "safetensors":
        words = "no code and no tokenizer: other programs read the weights by their keys"
    elif origin is not None and origin.files:
        files = original_files(origin)
        words = f"{len(files)} files of the published folder that the run began with"
    elif with_tokenizer:
        tokenizer, words = _tokenizer_of(config, stored)
    texts = {}
    if tokenizer is not None:
        texts = tokenizer_files(tokenizer, config.data.seq_len, _sample_texts(config, tokenizer))
    own = own_tensors(stored, config, dtype or "fp32")
    tensors = own if origin is None else family_tensors(stored, origin, dtype)
    plan = plan_files(tensors, max_file_bytes)
    # last, because it can take an hour
    size = sum(file.num_bytes for file in stored.manifest.files.values())
    verified = open_verified(source, start_progress("checking the checkpoint", size))
    stored = choose_weights(verified, weights)
    if layout == "safetensors":
        texts["config.json"] = _bare_config(stored, config, dtype or "fp32")
    elif origin is not None:
        end = None if tokenizer is None else tokenizer.end_of_document_id
        texts["config.json"] = family_config(origin, dtype, config.data.seq_len, end)
        if (began := read_source(run_dir)) is not None and began.grown:  # not the card of before
            texts["README.md"] = f"# {config.job.name}\n\nThe run {began.public_words()}.\n"
    else:
        texts |= _model_files(stored, config, dtype or "fp32", tokenizer)
        texts["README.md"] = make_card(stored, config, words)
    with atomic_directory(out, needed_bytes=num_bytes_of(plan)) as folder:
        write_weights(stored, plan, folder, start_progress, is_published=origin is not None)
        for name, text in {**files, **texts}.items():
            write_synced(folder / name, text)
    num_keys = sum(map(len, plan.values()))
    return Exported(stored.meta.step, list(plan), num_keys, num_bytes_of(plan), words, weights)


def _bare_config(stored: StoredCheckpoint, config: Config, dtype: Precision) -> str:
    """Returns config.json of weights that lie without code: what reading them back needs."""
    values = {
        "step": stored.meta.step,
        "dtype": _name_of(dtype),
        "max_position_embeddings": config.data.seq_len,
        "model": config.model.model_dump(mode="json"),
    }
    return json.dumps(values, indent=2) + "\n"


def _name_of(dtype: Precision) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


def _tokenizer_of(config: Config, stored: StoredCheckpoint) -> tuple[Tokenizer | None, str]:
    """Returns the run's tokenizer, if it has one, and a line about it for the user.

    Raises:
        ShardError: the data was prepared again with another tokenizer than the checkpoint's.
    """
    if is_prepared(config.data.directory):
        check_meaning(config.data.directory, stored.meta.meta.get("data") or {})
    prepare = config.prepare
    try:
        if prepare.loads_tokenizer and not is_prepared(config.data.directory):  # as after an import
            end = prepare.end_of_document
            tokenizer = open_tokenizer(prepare.tokenizer, end_of_document=end)
        else:
            tokenizer = prepared_tokenizer(config.data.directory)
    except (ShardError, InputError) as error:
        return None, f"no tokenizer: {error}"
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer, "a tokenizer: ids are UTF-8 bytes, and 256 ends a document"
    return tokenizer, f"{main_file(tokenizer)} with {tokenizer.vocab_size} ids"


def _sample_texts(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Returns texts of the run's validation split, if available."""
    data = config.data
    try:
        reader = SplitReader(data.directory, "validation", seq_len=data.seq_len)
        rows = reader.read(np.arange(min(_SAMPLE_ROWS, reader.num_rows))).tokens
    except (ShardError, DataError, OSError):
        return []
    return [tokenizer.decode(row) for row in rows]


def _beyond_code(model: ModelConfig) -> list[str]:
    """Lists the keys whose values moebius' own code for transformers does not compute."""
    values = model.model_dump()
    found = ['model.attention.kind="mla"'] if model.attention.kind == "mla" else []
    for path, known in _BEYOND_CODE.items():
        value: Any = values
        for name in path.split("."):
            value = value.get(name, known[0]) if isinstance(value, dict) else known[0]
        if not any(type(value) is type(each) and value == each for each in known):
            found.append(f"model.{path}={value!r}")
    return found


def check_promises(model: ModelConfig) -> None:
    """Checks that a model's outputs depend only on the sequence and on no later position.

    Raises:
        ConfigError: names a broken promise, or a part of the user's own that transformers has no
            code for.
    """
    if own := [f"{key}={name!r}" for key, name in model.own_parts.items()]:
        raise ConfigError(
            f"{' and '.join(own)} cannot be exported to Hugging Face, because the folder holds only "
            "moebius' own code; use --format safetensors, or moebius itself (`moebius eval`, `generate`)"
        )
    if beyond := _beyond_code(model):
        raise ConfigError(
            f"{' and '.join(beyond)} cannot be exported to Hugging Face: the model is none of the families in "
            "docs/models.md, and moebius' own code for transformers lacks this; use --format safetensors"
        )
    promises = model.evaluation_promises
    broken = []
    if not promises.causal:
        broken.append("a later position can change the output at an earlier one")
    if not promises.batch_invariant:
        broken.append("the other sequences of a batch can change a sequence's output")
    if not broken:
        return
    assert model.experts is not None, "only experts make a sequence depend on others"
    advice = ""
    factor = getattr(model.experts.router, "evaluation_capacity_factor", None)
    if factor is not None:
        advice = (
            f" (evaluation_capacity_factor={factor}; a model trained with "
            "model.feed_forward.router.evaluation_capacity_factor=none can be exported)"
        )
    raise ConfigError(
        f"router.kind={model.experts.router.kind!r} as configured cannot be exported to Hugging "
        f"Face: {' and '.join(broken)}{advice}. transformers' padding, batching and caching would "
        "change its outputs; use --format safetensors, or moebius itself (`moebius eval`, `generate`)"
    )


def _model_files(
    stored: StoredCheckpoint, config: Config, dtype: Precision, tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Returns the model's code and config.json: the usual names, and the model's own configuration."""
    model, end = config.model, None if tokenizer is None else tokenizer.end_of_document_id
    described: dict[str, Any] = {
        "model_type": "moebius",
        "architectures": ["MoebiusForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_moebius.MoebiusConfig",
            "AutoModelForCausalLM": "modeling_moebius.MoebiusForCausalLM",
        },
        "dtype": _name_of(dtype),
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_heads,
        "max_position_embeddings": config.data.seq_len,
        "tie_word_embeddings": model.tied_head,
        "eos_token_id": end,
        "pad_token_id": end,
        "tokenizer": config.prepare.tokenizer,
        "step": stored.meta.step,
        "tokens": stored.meta.meta["progress"]["tokens"],
        "checkpoint_digest": stored.manifest.digest,
        "versions": stored.meta.versions,
        "sparse_members": list(model.sparse_members),
        "model": model.model_dump(mode="json"),
    }
    generation = {"eos_token_id": end, "pad_token_id": end}
    folder = Path(__file__).parent
    code = {name: (folder / name).read_text(encoding="utf-8") for name in CODE}
    return code | {
        "config.json": json.dumps(described, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
