"""Exact match on test sets while a run trains: does the model write the whole answer?

The answer that a model writes, taking the likeliest token each time, is the right one exactly if the
likeliest token is right at every place of it, given the right ones before. So one pass over prompt
and answer decides, and nothing is generated. With labels of their own (`data.targets="paired"`) the
label of every input behind the prompt is asked for.

Items of one length stand in one batch, without padding. Every rank makes the same number of passes,
so that expert exchanges always meet; what fills up a last batch does not count.

Legend: B items of a batch, S positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..data_pipeline.test_sets import TestItem, read_test_sets
from ..distributed.process.process import Process
from ..model.execution.precision import forward_in, products_dtype
from ..model.transformer import Transformer
from .config.run_config import Config
from .micro_batches import document_use


@dataclass(frozen=True)
class ExactMatch:
    """Holds how a model does on one test set."""

    exact_match: float  # fraction of the items whose whole answer is right, its end included
    accuracy: float  # fraction of the answers' tokens that are, without their ends
    loss: float  # nats per token of the answers, their ends included
    items: int


def score_test_sets(model: Transformer, config: Config, process: Process) -> dict[str, ExactMatch]:
    """Scores every test set of `data.test_sets`, by name; a collective call.

    Raises:
        ValueError: a test set cannot be read.
    """
    sets = read_test_sets(config.data.model_dump_json())
    model.eval()
    found = {name: score_items(model, config, process, items) for name, items in sets.items()}
    model.train()
    return found


@torch.no_grad()
def score_items(
    model: Transformer, config: Config, process: Process, items: Sequence[TestItem]
) -> ExactMatch:
    """Scores items with a model in evaluation mode; a collective call.

    Raises:
        ValueError: an item is longer than the positions that the model has learned.
    """
    _check_lengths(config, items)
    use, dtype = document_use(config), products_dtype(config.train.precision)
    batch_size = config.train.eval_batch or config.train.micro_batch
    sums = torch.zeros(4, dtype=torch.float64, device=process.device)
    for rows_BS1, prompt_B, valid_B in _batches(items, batch_size, process):
        inputs_BS, targets_BS = use.split(rows_BS1)
        asked_BS = use.split(_answers(rows_BS1, prompt_B))[1] & valid_B[:, None]
        logits_BSV = forward_in(model, dtype, inputs_BS).logits_BSV
        right_BS = logits_BSV.argmax(-1) == targets_BS
        losses = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none")
        inner_BS = asked_BS.clone()
        inner_BS[:, -1] = False  # the end
        sums += torch.stack(
            [
                ((right_BS | ~asked_BS).all(1) & valid_B).sum(),
                (right_BS & inner_BS).sum(),
                inner_BS.sum(),
                losses[asked_BS.flatten()].sum(dtype=torch.float64),
            ]
        )
    dist.all_reduce(sums)
    matched, right, inner, loss = sums.tolist()
    asked = inner + len(items)
    return ExactMatch(matched / len(items), right / inner, loss / asked, len(items))


def _answers(rows_BS1: Tensor, prompt_B: Tensor) -> Tensor:
    places_S1 = torch.arange(rows_BS1.shape[1], device=rows_BS1.device)
    return places_S1 >= prompt_B[:, None]


def _batches(
    items: Sequence[TestItem], batch_size: int, process: Process
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields this rank's batches of items of equal length: tokens, prompts' lengths, what counts."""
    by_length: dict[int, list[TestItem]] = {}
    for item in items:
        by_length.setdefault(len(item.tokens), []).append(item)
    for _, alike in sorted(by_length.items()):
        for first in range(0, len(alike), process.world_size * batch_size):
            places = first + process.rank * batch_size + np.arange(batch_size)
            chosen = [alike[min(place, len(alike) - 1)] for place in places]
            tokens = torch.from_numpy(np.stack([item.tokens for item in chosen]))
            prompts = torch.tensor([item.num_prompt for item in chosen])
            valid = torch.from_numpy(places < len(alike))
            device = process.device
            yield tokens.to(device), prompts.to(device), valid.to(device)


def _check_lengths(config: Config, items: Sequence[TestItem]) -> None:
    longest = max(len(item.tokens) for item in items)
    most, pairs = config.model.attention.max_positions, config.data.targets == "paired"
    positions = longest // 2 if pairs else longest - 1
    if most is not None and positions > most:
        raise ValueError(
            f"data.test_sets: an item takes {positions} positions, and the model has learned "
            f"model.attention.positions.max_positions={most}: take shorter items, or rotary positions"
        )
