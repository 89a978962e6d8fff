"""What a trained run is worth: its loss on held-out text, how likely it finds a text, and text that
it writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data_pipeline.read.token_store import prepared_tokenizer
from ..distributed.process.process import start_process
from ..train.evaluate import Evaluation, evaluate
from .generate import check_temperature, generate
from .group_context import GroupContextText, Score, group_context_size, score
from .restore import Restored, refuse_pairs, restore


@dataclass(frozen=True)
class Measurement:
    """Loss of one checkpoint on one split."""

    step: int
    split: str
    result: Evaluation

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.split}: loss {self.result.loss:.4f} nats per token, "
            f"perplexity {self.result.perplexity:.2f}, over {self.result.tokens:,} tokens"
        )


def measure(
    run_dir: Path, *, step: int | None = None, split: str = "validation", max_rows: int = 0
) -> Measurement:
    """Returns the mean cross-entropy of a checkpoint over non-overlapping rows of a split.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; None: the newest.
        split: train or validation.
        max_rows: how many rows at most; 0: all of them.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read.
    """
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step)
        train = restored.config.train.model_copy(update={"eval_rows": max_rows})
        config = restored.config.model_copy(update={"train": train})
        result = evaluate(restored.model, config, process, split=split)
    return Measurement(restored.step, split, result)


def write_text(
    run_dir: Path,
    prompt: str,
    *,
    step: int | None = None,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """Yields the prompt and then, piece by piece, the text that the model writes after it.

    A piece may be held back while its last bytes are not a whole character yet. A model that routes
    sequences together writes beside a group context from its training text, drawn from the seed.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, or the model cannot write.
    """
    check_temperature(temperature)
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step)
        refuse_pairs(restored)
        yield from continue_text(
            restored, prompt, num_tokens=num_tokens, temperature=temperature, seed=seed
        )


def continue_text(
    restored: Restored, prompt: str, *, num_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """Does what `write_text` does, with a model that is in memory already."""
    tokenizer = prepared_tokenizer(restored.config.data.directory)
    device = next(restored.model.parameters()).device
    prompt_ids = tokenizer.encode_batch([prompt])[0].astype("int64")
    yield prompt
    ids, shown = prompt_ids.tolist(), len(prompt)
    context_MS = _group_context(restored, len(ids) + num_tokens - 1, seed=seed)
    for token in generate(
        restored.model,
        torch.from_numpy(prompt_ids).to(device),
        num_tokens=num_tokens,
        temperature=temperature,
        seed=seed,
        context_MS=None if context_MS is None else context_MS.to(device),
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


@dataclass(frozen=True)
class ScoredText:
    """How likely a text is to a checkpoint."""

    step: int
    draws: int
    result: Score

    def __str__(self) -> str:
        tokens = self.result.log_probability_RS.shape[1]
        beside = (
            f" ± {self.result.spread:.4f} over {self.draws} draws of the group context"
            if self.draws > 1
            else ""
        )
        return (
            f"step {self.step}: log-probability {self.result.mean:.4f}{beside} nats, "
            f"{self.result.mean / tokens:.4f} per token, "
            f"over {tokens:,} tokens"
        )


def score_text(
    run_dir: Path, text: str, *, step: int | None = None, draws: int = 1, seed: int = 0
) -> ScoredText:
    """Returns the log-probability of a text after an end of document.

    A longer text than the trained length is cut on the left.

    A model that routes sequences together is asked beside a group context from its training text
    (arXiv 2310.15961); several draws give the spread.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, there is nothing to score,
            or the model reads the future.
    """
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step)
        refuse_pairs(restored)
        return score_with(restored, text, draws=draws, seed=seed)


def score_with(restored: Restored, text: str, *, draws: int = 1, seed: int = 0) -> ScoredText:
    """Does what `score_text` does, with a model that is in memory already."""
    data = restored.config.data
    tokenizer = prepared_tokenizer(data.directory)
    tokens = tokenizer.encode_batch([text])[0].tolist()
    with GroupContextText(data.directory, seq_len=data.seq_len, seed=seed) as context_text:
        result = score(
            restored.model,
            tokens,
            context_text,
            end_of_document=tokenizer.end_of_document_id,
            context=data.seq_len,
            draws=draws,
        )
    return ScoredText(restored.step, len(result.log_probability_RS), result)


def _group_context(restored: Restored, length: int, *, seed: int) -> Tensor | None:
    wanted, data = group_context_size(restored.model), restored.config.data
    if wanted == 0:
        return None
    with GroupContextText(data.directory, seq_len=data.seq_len, seed=seed) as text:
        return text.draw(wanted, max(length, 1))
