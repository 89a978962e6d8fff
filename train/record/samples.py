"""What the model writes while it trains: continuations of a few beginnings of validation rows.

The likeliest token each time, by forward passes over rows of one length: what stands behind a place
changes nothing before it, so the rest of a row may be anything. No key-value cache: this way it is
the forward pass of an evaluation, on every layout, and `train.metrics.sample_tokens` passes over
short rows cost little beside one. All ranks write the same, so that expert exchanges meet.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...data_pipeline.read.corruption import open_fetcher
from ...data_pipeline.read.loader import validation_batches
from ...data_pipeline.tokenizers.tokenizer import prepared_tokenizer
from ...distributed.process.process import Process
from ...model.execution.precision import forward_in, products_dtype
from ...model.transformer import Transformer
from ..config.run_config import Config

_ROWS = 4
_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Sample:
    """A beginning from the validation split, and how the model goes on."""

    prompt: str
    continuation: str


@torch.no_grad()
def write_samples(model: Transformer, config: Config, process: Process) -> list[Sample]:
    """Lets the model go on with beginnings of validation rows, the same ones each time.

    A collective call. The model is in evaluation mode meanwhile.

    Returns:
        The samples, on rank 0; none on the other ranks.
    """
    wanted = config.train.metrics.sample_tokens
    prompt_tokens = min(_PROMPT_TOKENS, config.data.seq_len - wanted)
    tokenizer = prepared_tokenizer(config.data.directory)
    rows_BS = _beginnings(config)[:, : prompt_tokens + wanted].to(process.device)
    rows_BS[:, prompt_tokens:] = 0
    model.eval()
    dtype = products_dtype(config.train.precision)
    for place in range(prompt_tokens, prompt_tokens + wanted):
        logits_BSV = forward_in(model, dtype, rows_BS).logits_BSV
        rows_BS[:, place] = logits_BSV[:, place - 1, : tokenizer.vocab_size].argmax(-1)
    model.train()
    if process.rank != 0:
        return []
    rows: list[list[int]] = rows_BS[:_ROWS].tolist()
    return [
        Sample(tokenizer.decode(row[:prompt_tokens]), tokenizer.decode(row[prompt_tokens:]))
        for row in rows
    ]


def _beginnings(config: Config) -> Tensor:
    """Returns rows from all over the validation split, whole groups of them."""
    group = config.model.evaluation_group_sequences
    batches = validation_batches(
        Path(config.data.directory),
        seq_len=config.data.seq_len,
        batch_size=-(-_ROWS // group) * group,
        sequences_per_group=group,
        rank=0,
        num_ranks=1,
        max_rows=_ROWS,
        fetch=open_fetcher(config.data),
    )
    return torch.from_numpy(next(iter(batches)).tokens).clone()
