"""Asks a model that routes sequences together about one sequence: it needs a group context.

Mixture of Tokens and expert choice by position cannot process a sequence alone. Following their
authors (arXiv 2310.15961, zero-shot protocol), a request is put into a random row of a group whose
other rows are training text of the same length; only the request's row is read. A score is
therefore a random variable, drawn from a seed, and several draws give its spread. Every request and
draw costs a whole group.

Requests are not padded: on the right no position would read the padding, and on the left padding
would shift positions, which the group mixes position by position.

Models that route every sequence by itself need no group context.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data_pipeline.read.rows import SplitReader
from ..model.transformer import Transformer


def group_context_size(model: Transformer) -> int:
    """Returns how many sequences must accompany one; 0 for most models."""
    return max((router.group_context_size for _, _, router in model.routers()), default=0)


def refuse_future_readers(model: Transformer, purpose: str) -> None:
    """Raises ValueError if a later token can change an earlier output."""
    experts = model.config.experts
    if experts is not None and not model.config.evaluation_promises.causal:
        raise ValueError(
            f"router.kind={experts.router.kind!r} as configured lets a position read later ones, so "
            f"the model cannot {purpose}"
        )


class GroupContextText:
    """Draws stretches of a prepared folder's training text to accompany requests."""

    def __init__(self, directory: str | Path, *, seq_len: int, seed: int = 0) -> None:
        """Opens the folder; stretches of `seq_len` tokens begin where training rows do.

        Raises:
            DataError: the folder cannot be read.
        """
        self._directory, self._seq_len, self.seed = directory, seq_len, seed
        self._reader = SplitReader(directory, "train", seq_len=seq_len)

    def draw(self, count: int, length: int, *, key: Sequence[int] = (0,)) -> Tensor:
        """Returns (count, length) int64 tokens, deterministic in seed and key.

        Rows are distinct if the text has enough of them.

        Raises:
            ValueError: the training text is shorter than one stretch.
        """
        reader = self._reader
        if length - 1 > self._seq_len:
            reader = SplitReader(self._directory, "train", seq_len=length - 1)
        if reader.num_rows < 1:
            raise ValueError(
                f"{self._directory}: its {reader.num_tokens} training tokens are too few for a group "
                f"context of {length} tokens; ask for fewer tokens, or prepare more text"
            )
        rows = _generator(self.seed, *key).choice(
            reader.num_rows, count, replace=reader.num_rows < count
        )
        return torch.from_numpy(reader.read(rows).tokens[:, :length])


def drawn_group(
    model: Transformer, request_S: Tensor, text: GroupContextText | None, *, key: Sequence[int]
) -> tuple[Tensor, int]:
    """Returns a batch with the request, and a group context if the model needs one.

    Args:
        model: the model that will read the batch.
        request_S: int64.
        text: source of group contexts; None if the model needs none.
        key: of the request and the draw; it determines the context and the request's row.

    Returns:
        (M + 1, S), and the request's row in it.

    Raises:
        ValueError: the model needs a group context but `text` is None.
    """
    others = group_context_size(model)
    if others == 0:
        return request_S[None], 0
    if text is None:
        raise ValueError(
            f"the model needs a group context of {others} sequences: pass the training text to draw "
            "them from"
        )
    context_MS = text.draw(others, len(request_S), key=key).to(request_S.device)
    return in_group_context(request_S, context_MS, key=(text.seed, *key, 1))  # a stream of its own


def in_group_context(
    request_S: Tensor, context_MS: Tensor | None, *, key: Sequence[int]
) -> tuple[Tensor, int]:
    """Returns (M + 1, S) with the request in a random row, and that row; deterministic in the key."""
    if context_MS is None:
        return request_S[None], 0
    row = int(_generator(*key).integers(len(context_MS) + 1))
    return torch.cat((context_MS[:row], request_S[None], context_MS[row:])), row


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng([number % 2**63 for number in key])
