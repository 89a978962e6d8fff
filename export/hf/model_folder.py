"""Writes a folder that transformers loads: weights, the model's code, its tokenizer and a card.

The weights are safetensors with one key per expert (../safetensors.py), because the modules in
modeling_moebius.py have the names of ours. That code needs only torch and transformers. It asks
every sequence by itself and every position without those after it, so only models that promise
both in evaluation are exported this way.
"""

import json
from pathlib import Path

import numpy as np

from ...data_pipeline.errors import DataError, ShardError
from ...data_pipeline.read.rows import SplitReader
from ...data_pipeline.tokenizers.interface import Tokenizer
from ...distributed.checkpoint.format import StartProgress, StoredCheckpoint, open_checkpoint
from ...model.config.model_config import ModelConfig
from ...own_parts import is_own
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
        source: the checkpoint; figures of the run are read from the run folder that it lies in.
        with_tokenizer: False leaves the tokenizer out, where transformers cannot have it.

    Raises:
        ValueError: transformers could not ask this model as it was trained, the tokenizer has no
            file for it, or whatever `export` refuses.
    """
    config = config_of(open_checkpoint(source))
    check_promises(config.model)  # refused before an hour of verifying
    tokenizer, words = tokenizer_of(config) if with_tokenizer else (None, "no tokenizer, as asked")
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
    """Returns texts of the run's validation split, where it is at hand."""
    data = config.data
    try:
        with SplitReader(data.directory, "validation", seq_len=data.seq_len) as reader:
            rows = reader.read(np.arange(min(_SAMPLE_ROWS, reader.num_rows))).tokens
    except (ShardError, DataError, OSError):
        return []
    return [tokenizer.decode(row) for row in rows]


def check_promises(model: ModelConfig) -> None:
    """Checks that a model's answers depend on the sequence alone and on no later position.

    Raises:
        ConfigError: they do not; the message says what they depend on. Or a part is the user's own,
            so that transformers has no code for it.
    """
    parts = {
        "model.attention.kind": model.attention.kind,
        "model.feed_forward.activation": model.feed_forward.activation,
        "model.norm_layer": model.norm_layer,
        "model.feed_forward.router.kind": model.experts.router.kind if model.experts else "",
    }
    if own := [f"{key}={name!r}" for key, name in parts.items() if is_own(name)]:
        raise ConfigError(
            f"{' and '.join(own)} cannot be exported to Hugging Face: its folder holds moebius' own "
            "code, and none of yours; use --format safetensors, or moebius itself (`moebius eval`, "
            "`generate`)"
        )
    promises = model.evaluation_promises
    broken = []
    if not promises.causal:
        broken.append("what stands at a later position can change what an earlier one gets")
    if not promises.batch_invariant:
        broken.append("the other sequences of a batch can change what a sequence gets")
    if not broken:
        return
    assert model.experts is not None, "only experts make a sequence depend on others"
    advice = ""
    factor = getattr(model.experts.router, "evaluation_capacity_factor", None)
    if factor is not None:
        advice = (
            f" (evaluation_capacity_factor={factor}; trained with "
            "model.feed_forward.router.evaluation_capacity_factor=none it could)"
        )
    raise ConfigError(
        f"router.kind={model.experts.router.kind!r} as configured cannot be exported to Hugging "
        f"Face: {' and '.join(broken)}{advice}. transformers pads, batches and caches as if neither "
        "were so; use --format safetensors, or moebius itself (`moebius eval`, `generate`)"
    )


def _model_files(
    stored: StoredCheckpoint, config: Config, dtype: Precision, tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Returns the model's code, and its configuration as transformers reads it."""
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
