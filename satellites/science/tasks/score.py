"""Scores trained models on test items by exact match: does the model write the whole answer?

Greedy decoding writes the right answer exactly if the likeliest token is right at every place of
the answer, given the right tokens before it. One pass over prompt and answer therefore decides,
without generation. With `data.targets="paired"` the model predicts the label of every input after
the prompt.

A model with shared layers can apply them more or less often than in training, with the same
weights. A task of two or three times the length can thus be asked with more loops.

Legend: B items of a batch, S positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import moebius

from .draw import ANSWER, PROMPT, Record

_BATCH = 128  # items


@dataclass(frozen=True)
class Item:
    """Holds a prompt and its answer as tokens; the first `num_prompt` are the prompt."""

    tokens: np.ndarray  # int64, the end of the document included
    num_prompt: int


@dataclass(frozen=True)
class ExactMatch:
    """Holds a model's scores on one test set."""

    exact_match: float
    """The fraction of the items whose whole answer is right, its end included."""
    accuracy: float
    """The fraction of the answers' tokens that are right, without their ends."""
    loss: float
    """Nats per token of the answers, their ends included."""
    items: int


@dataclass(frozen=True)
class RunScores:
    """Holds a checkpoint's scores on a task's test sets, by name."""

    run: str
    seed: int
    step: int
    depth_steps: int
    trained_depth_steps: int
    scores: dict[str, ExactMatch]


def score_run(
    run_dir: Path,
    tests: Mapping[str, Callable[[], Iterable[Record]]],
    *,
    step: int | None = None,
    depth_steps: int | None = None,
) -> RunScores:
    """Scores a checkpoint on test sets.

    Args:
        run_dir: the run folder.
        tests: functions that return the records of a set, by its name.
        step: of the checkpoint; None: the newest.
        depth_steps: total number of layer applications; None: as in training.

    Raises:
        ValueError: the run cannot be read, or the model cannot be scored.
    """
    loaded = moebius.load(run_dir, step=step, depth_steps=depth_steps)
    scores = {name: score(loaded, read_items(loaded, make())) for name, make in tests.items()}
    trained = moebius.load_config(run_dir).model.num_layers
    config = loaded.config
    return RunScores(
        run=config.job.name,
        seed=config.train.seed,
        step=loaded.step,
        depth_steps=config.model.num_layers,
        trained_depth_steps=trained,
        scores=scores,
    )


def read_items(loaded: moebius.LoadedModel, records: Iterable[Record]) -> list[Item]:
    """Returns records as tokens of the model's tokenizer.

    Raises:
        ValueError: there are none, or one has no prompt or no answer.
    """
    records = list(records)
    if not records:
        raise ValueError("a test set without items")
    tokenizer = loaded.tokenizer
    prompts = [tokenizer.encode(record[PROMPT]).tolist() for record in records]
    answers = [tokenizer.encode(record[ANSWER]).tolist() for record in records]
    end = np.array([tokenizer.end_of_document_id])
    items = []
    for record, prompt, answer in zip(records, prompts, answers, strict=True):
        if not len(prompt) or not len(answer):
            raise ValueError(f"{record}: a prompt and an answer of at least one token are needed")
        tokens = np.concatenate([prompt, answer, end]).astype(np.int64)
        items.append(Item(tokens, len(prompt)))
    return items


@torch.no_grad()
def score(loaded: moebius.LoadedModel, items: Sequence[Item]) -> ExactMatch:
    """Scores a model on items; items of equal length share a batch, without padding.

    Raises:
        ValueError: an item's score would depend on later tokens or on other items.
    """
    _check_promises(loaded.config)
    paired = loaded.config.data.targets == "paired"
    sums = torch.zeros(4, dtype=torch.float64)
    for rows_BS1, prompt_B in _batches(items):
        inputs_BS, targets_BS = _split(rows_BS1, paired)
        asked_BS = _split(_places(rows_BS1) >= prompt_B[:, None], paired)[1]
        logits_BSV = loaded.logits(inputs_BS).cpu()
        right_BS = logits_BSV.argmax(-1) == targets_BS
        losses = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none")
        inner_BS = asked_BS.clone()
        inner_BS[:, -1] = False  # the end
        sums[0] += (right_BS | ~asked_BS).all(1).sum()
        sums[1] += (right_BS & inner_BS).sum()
        sums[2] += inner_BS.sum()
        sums[3] += losses[asked_BS.flatten()].sum(dtype=torch.float64)
    matched, right, inner, loss = sums.tolist()
    asked = inner + len(items)
    return ExactMatch(matched / len(items), right / inner, loss / asked, len(items))


def _check_promises(config: moebius.Config) -> None:
    promises = config.model.evaluation_promises
    if not (promises.causal and promises.batch_invariant):
        raise ValueError(
            "a token of this model can read later tokens, or other sequences of its batch, so an item's "
            "score would depend on them (`moebius models` lists what each router promises)"
        )


def _split(rows_BS1: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    """Returns the inputs of rows of tokens, and the target of each input."""
    if paired:
        return rows_BS1[:, :-1:2], rows_BS1[:, 1::2]
    return rows_BS1[:, :-1], rows_BS1[:, 1:]


def _places(rows_BS1: Tensor) -> Tensor:
    return torch.arange(rows_BS1.shape[1]).expand(rows_BS1.shape)


def _batches(items: Sequence[Item]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tokens of items of equal length, and the lengths of their prompts."""
    by_length: dict[int, list[Item]] = {}
    for item in items:
        by_length.setdefault(len(item.tokens), []).append(item)
    for _, alike in sorted(by_length.items()):
        for first in range(0, len(alike), _BATCH):
            chosen = alike[first : first + _BATCH]
            tokens = np.stack([item.tokens for item in chosen])
            prompts = [item.num_prompt for item in chosen]
            yield torch.from_numpy(tokens), torch.tensor(prompts)
