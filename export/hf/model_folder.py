"""Writes a folder that transformers loads: weights, the model's code, its tokenizer and a card.

Weights are safetensors with one key per expert (../safetensors.py); the modules of
modeling_moebius.py have the same names as ours. That code needs only torch and transformers. It
processes each sequence by itself and each position without later ones, so only models that promise
both in evaluation can be exported this way.
"""

import json
from pathlib import Path

import numpy as np

from ...data_pipeline.errors import DataError, ShardError
from ...data_pipeline.read.rows import SplitReader
from ...data_pipeline.tokenizers.interface import Tokenizer
from ...distributed.checkpoint.format import StartProgress, StoredCheckpoint, open_checkpoint
from ...model.config.model_config import ModelConfig
from ...plugins import is_own
from ...train.config.run_config import Config, ConfigError
from ..safetensors import (
    Description,
    Exported,
    Precision,
    config_of,
    config_values,
    export,
    tokenizer_of,
)
from .card import make_card
from .tokenizer import tokenizer_files

_SAMPLE_ROWS = 64
CODE = (
    "configuration_moebius.py",
    "experts_moebius.py",
    "attention_moebius.py",
    "loops_moebius.py",
    "modeling_moebius.py",
)


def export_to_hf(
    source: Path,
    out: Path,
    *,
    dtype: Precision = "fp32",
    max_file_bytes: int = 5 * 10**9,
    with_tokenizer: bool = True,
    start_progress: StartProgress = lambda what, num_bytes: lambda more: None,
) -> Exported:
    """Writes the model of the checkpoint `source` as a Hugging Face folder `out`.

    `out` appears whole or not at all.

    Args:
        source: the checkpoint; its run folder provides the card's figures.
        with_tokenizer: False omits a tokenizer that transformers cannot represent.

    Raises:
        ValueError: transformers could not run this model as trained, its tokenizer cannot be
            converted, or `export` refuses.
    """
    opened = open_checkpoint(source)
    config = config_of(opened)
    check_promises(config.model)  # early, because verifying can take an hour
    tokenizer, words = (
        tokenizer_of(config, opened) if with_tokenizer else (None, "no tokenizer, as requested")
    )
    words = words.replace("no tokenizer file", "a tokenizer")
    files: dict[str, str] = {}
    if tokenizer is not None:
        files = tokenizer_files(tokenizer, config.data.seq_len, _sample_texts(config, tokenizer))

    def describe(stored: StoredCheckpoint, config: Config, dtype: Precision) -> Description:
        card = {"README.md": make_card(stored, config, words)}
        return Description(
            {**_model_files(stored, config, dtype, tokenizer), **card, **files}, words
        )

    return export(
        source,
        out,
        describe=describe,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        start_progress=start_progress,
    )


def _sample_texts(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Returns texts of the run's validation split, if available."""
    data = config.data
    try:
        reader = SplitReader(data.directory, "validation", seq_len=data.seq_len)
        rows = reader.read(np.arange(min(_SAMPLE_ROWS, reader.num_rows))).tokens
    except (ShardError, DataError, OSError):
        return []
    return [tokenizer.decode(row) for row in rows]


def check_promises(model: ModelConfig) -> None:
    """Checks that a model's outputs depend only on the sequence and on no later position.

    Raises:
        ConfigError: names a broken promise, or a part of the user's own that transformers has no
            code for.
    """
    parts = {
        "model.attention.kind": model.attention.kind,
        "model.feed_forward.activation": model.feed_forward.activation,
        "model.norm_layer": model.norm_layer,
        "model.feed_forward.router.kind": model.experts.router.kind if model.experts else "",
    }
    if own := [f"{key}={name!r}" for key, name in parts.items() if is_own(name)]:
        raise ConfigError(
            f"{' and '.join(own)} cannot be exported to Hugging Face, because the folder holds only "
            "moebius' own code; use --format safetensors, or moebius itself (`moebius eval`, "
            "`generate`)"
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
    end = None if tokenizer is None else tokenizer.end_of_document_id
    described = config_values(stored, config, tokenizer, dtype) | {
        "architectures": ["MoebiusForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_moebius.MoebiusConfig",
            "AutoModelForCausalLM": "modeling_moebius.MoebiusForCausalLM",
        },
        "pad_token_id": end,
    }
    generation = {"eos_token_id": end, "pad_token_id": end}
    folder = Path(__file__).parent
    code = {name: (folder / name).read_text(encoding="utf-8") for name in CODE}
    return code | {
        "config.json": json.dumps(described, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
