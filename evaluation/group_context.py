"""One sequence through a model that routes sequences together: it needs a group context.

A Mixture of Tokens or an expert choice by position cannot be asked about one sequence alone. As its
authors do (arXiv 2310.15961, zero-shot protocol), a request is put into a uniformly random row of a
group whose other rows are training text, all cut to the request's length; only the request's row is
looked at. So a score is a random variable: it is drawn from a seed, and several draws give its
spread. Cost: a whole group for every request and draw.

Requests end at their last token, since padding on the right would change nothing: no position reads
a later one. On the left nothing may be added, for a group meets position by position.

Models that route every sequence by itself need no group context and are asked as they are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..data_pipeline.read.rows import SplitReader
from ..model.transformer import Transformer


def group_context_size(model: Transformer) -> int:
    """How many sequences must stand beside one; 0 for most models."""
    return max((router.group_context_size for _, _, router in model.routers()), default=0)


def refuse_future_readers(model: Transformer, purpose: str) -> None:
    """ValueError where a later token can change what is said of an earlier one."""
    experts = model.config.experts
    if experts is not None and not model.config.evaluation_promises.causal:
        raise ValueError(
            f"router.kind={experts.router.kind!r} as configured lets a position read later ones: "
            f"such a model cannot {purpose}"
        )


class GroupContextText:
    """Stretches of a prepared folder's training text, to stand beside requests. Use as a context
    manager, or call `close`.
    """

    def __init__(self, directory: str | Path, *, seq_len: int, seed: int = 0) -> None:
        """`seq_len` as in training: the stretches begin where rows that are cut do.

        Raises:
            DataError: the folder cannot be read.
        """
        self._directory, self._seq_len, self.seed = directory, seq_len, seed
        self._reader = SplitReader(directory, "train", seq_len=seq_len)

    def draw(self, count: int, length: int, *, key: Sequence[int] = (0,)) -> Tensor:
        """(count, length) int64, the same for the same seed and key; different rows where the text
        has enough of them.

        Raises:
            ValueError: the training text is shorter than one stretch.
        """
        reader = self._reader
        if length - 1 > self._seq_len:
            reader = SplitReader(self._directory, "train", seq_len=length - 1)
        if reader.num_rows < 1:
            raise ValueError(
                f"a group context of {length} tokens needs a longer training text than the "
                f"{reader.num_tokens} tokens of "
                f"{self._directory}: ask for fewer tokens, or prepare more text"
            )
        rows = _generator(self.seed, *key).choice(
            reader.num_rows, count, replace=reader.num_rows < count
        )
        return torch.from_numpy(reader.read(rows).tokens[:, :length])

    def close(self) -> None:
        """Closes the files of the training text."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def drawn_group(
    model: Transformer, request_S: Tensor, text: GroupContextText | None, *, key: Sequence[int]
) -> tuple[Tensor, int]:
    """Returns a batch with the request in it, beside a group context if the model needs one.

    Args:
        model: whose batch it is.
        request_S: int64.
        text: where group contexts come from; None will do for a model that needs none.
        key: of the request and the draw: the same key, the same context and row.

    Returns:
        (M + 1, S), and the request's row in it.

    Raises:
        ValueError: the model needs a group context, and there is no text.
    """
    others = group_context_size(model)
    if others == 0:
        return request_S[None], 0
    if text is None:
        raise ValueError(
            f"this model is asked beside a group context of {others} sequences: give the training text to draw "
            "them from"
        )
    context_MS = text.draw(others, len(request_S), key=key).to(request_S.device)
    return in_group_context(
        request_S, context_MS, key=(text.seed, *key, 1)
    )  # not the draw's own stream


def in_group_context(
    request_S: Tensor, context_MS: Tensor | None, *, key: Sequence[int]
) -> tuple[Tensor, int]:
    """(M + 1, S), the request in a random row, and that row's number, the same for the same key."""
    if context_MS is None:
        return request_S[None], 0
    row = int(_generator(*key).integers(len(context_MS) + 1))
    return torch.cat((context_MS[:row], request_S[None], context_MS[row:])), row


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng([number % 2**63 for number in key])
