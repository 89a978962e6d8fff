"""Computes log-likelihoods of many short rows of tokens, as every zero-shot task needs.

1. If a model promises that no position sees a later one and no row sees the others of its batch,
   rows of similar length share a batch, and a common beginning goes through the model once; its
   keys and values are repeated for every row (batches.py). Ten options after a page of text cost
   little more than one.
2. The head is applied only at scored positions, with a float64 log-softmax.

A model whose rows compete for capacity is asked row by row, without padding. A model that routes
sequences together needs a group context (group_context.py), a whole group for every row and draw.
With several ranks, each takes every n-th family, and all get all results. All make equally many
passes, so the model may be one in training, whose experts and weights are on other ranks.

Legend: R rows of a batch, S tokens of the longest end, D width, N scored positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.checkpoint.together import gathered
from ..distributed.process.process import Process
from ..model.attention.base import LayerCache
from ..model.layers import wide_dtype
from ..model.transformer import Transformer
from .batches import PASS_TOKENS, Family, Row, RowBatch, plan_batches, rows_alone
from .group_context import (
    GroupContextText,
    drawn_group,
    group_context_size,
    refuse_future_readers,
)
from .restore import Restored

_GPU_PASS_TOKENS = 2**13  # tokens that a GPU computes in the time of launching a pass
_LOGITS = 2**21  # in memory at a time, in float64


@dataclass(frozen=True)
class RowScore:
    """Holds the model's predictions at a row's scored tokens."""

    log_probability_S: np.ndarray  # float64, nats, each given all tokens before it
    greedy_S: np.ndarray  # int64: the most likely token in its place

    def total(self, num_scored: int | None = None) -> float:
        """Returns the log-probability of the last `num_scored` tokens; None: of all scored ones."""
        count = len(self.log_probability_S) if num_scored is None else num_scored
        return float(self.log_probability_S[-count:].sum())


class NotFiniteError(ValueError):
    """Reports weights from which nothing can be predicted; on all ranks that share a model."""

    def __init__(self) -> None:
        super().__init__(
            "the model's log-probabilities are not finite because its weights hold inf or nan; "
            "take an earlier checkpoint (--step)"
        )


Advance = Callable[[int], None]
"""Called with the number of newly finished rows."""


class Scorer:
    """Scores families of rows with one model, on one rank or on all.

    Args:
        model: in evaluation mode, whole on every rank or distributed over them.
        text: source of group contexts; None if the model needs none.
        rank: this rank.
        num_ranks: number of ranks; more than one need a process group.

    Raises:
        ValueError: the model lets a position read later ones.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        text: GroupContextText | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        refuse_future_readers(model, "score text")
        self._model, self.text = model, text
        self._rank, self._num_ranks = rank, num_ranks
        self._group = dist.group.WORLD if num_ranks > 1 else None
        promises = model.config.evaluation_promises
        self._is_alone = not promises.batch_invariant
        self.needs_draws = group_context_size(model) > 0

    @torch.no_grad()
    def score(
        self, families: Sequence[Family], *, draw: int = 0, advance: Advance | None = None
    ) -> list[list[RowScore]]:
        """Returns the score of every row in order; collective with several ranks.

        Args:
            families: rows that may begin alike.
            draw: number of the group context, if the model needs one.
            advance: called with finished rows, of this rank and about as many of each other rank.

        Raises:
            NotFiniteError: a log-probability is not finite; on all ranks.
        """
        own: list[tuple[int, int, RowScore]] = []
        batches = list(self._batches(families))
        spare = self._spare_passes(batches)  # agreed on before the first pass
        score = self._score_alone if self._is_alone else self._score_batch
        for batch in batches:
            scores = score(families, batch, draw)
            own += [(*place, one) for place, one in zip(batch.rows, scores, strict=True)]
            if advance is not None:
                advance(len(scores) * self._num_ranks)
        first = next((f for f, family in enumerate(families) if family), 0)
        for _ in range(spare):
            score(families, RowBatch(((first, (0,)),), 0), draw)
        told = [(f, r, one.log_probability_S.tolist(), one.greedy_S.tolist()) for f, r, one in own]
        found = {
            (f, r): RowScore(np.array(log_p, dtype=np.float64), np.array(greedy, dtype=np.int64))
            for share in gathered(self._group, lambda: told)
            for f, r, log_p, greedy in share
        }
        if not all(np.isfinite(one.log_probability_S).all() for one in found.values()):
            raise NotFiniteError
        return [[found[f, r] for r in range(len(family))] for f, family in enumerate(families)]

    def _spare_passes(self, batches: Sequence[RowBatch]) -> int:
        """Returns how many passes the busiest rank makes beyond this one's; collective."""
        own = sum(1 + (batch.prefix > 0) for batch in batches)
        return max(gathered(self._group, lambda: own)) - own

    def _batches(self, families: Sequence[Family]) -> Iterator[RowBatch]:
        if self._is_alone:
            return rows_alone(families, self._rank, self._num_ranks)
        on_cpu = self._model.embedding.device.type == "cpu"
        return plan_batches(
            families,
            self._rank,
            self._num_ranks,
            pass_tokens=PASS_TOKENS if on_cpu else _GPU_PASS_TOKENS,
        )

    def _score_batch(
        self, families: Sequence[Family], batch: RowBatch, _draw: int
    ) -> list[RowScore]:
        rows = [families[f][r] for f, r in batch.rows]
        cache, past = None, batch.prefix
        if past:
            heads = [families[f][members[0]].tokens[:past] for f, members in batch.families]
            cache = self._model.new_cache()
            self._run(self._tensor(heads), cache, [])
            counts = torch.tensor([len(members) for _, members in batch.families])
            family_R = torch.arange(len(counts)).repeat_interleave(counts)
            cache = [_repeated(layer, family_R) for layer in cache]
        ends = [row.tokens[past:-1] for row in rows]
        longest = max(map(len, ends))
        padded = [end + (0,) * (longest - len(end)) for end in ends]
        asked = [(r, len(end), row) for r, (end, row) in enumerate(zip(ends, rows, strict=True))]
        return self._run(self._tensor(padded), cache, asked)

    def _score_alone(
        self, families: Sequence[Family], batch: RowBatch, draw: int
    ) -> list[RowScore]:
        """Scores a batch's only row without padding, in a group context if the model needs one."""
        (place,) = batch.rows
        row = families[place[0]][place[1]]
        request_S = self._tensor([row.tokens[:-1]])[0]
        group_BS, number = drawn_group(self._model, request_S, self.text, key=(*place, draw))
        return self._run(group_BS, None, [(number, len(request_S), row)])

    def _run(
        self,
        tokens_BS: Tensor,
        cache: list[LayerCache] | None,
        asked: Sequence[tuple[int, int, Row]],
    ) -> list[RowScore]:
        """Runs the model, with the head's product at scored positions alone.

        They are read inside the pass, while a sharded head is gathered. Of each row asked for: its
        place in the batch, the length of its input, and itself.
        """
        found: list[RowScore] = []

        def read(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            handle.remove()  # `_read_out` calls the head again
            hidden = [inputs[0][r, end - row.num_scored : end] for r, end, row in asked]
            found.extend(self._read_out(hidden, [row for _, _, row in asked]) if asked else ())

        handle = self._model.head.register_forward_hook(read)
        nothing_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
        try:
            self._model(tokens_BS, cache, targets_BS=tokens_BS, loss_mask_BS=nothing_BS)
        finally:
            handle.remove()
        return found

    def _read_out(self, hidden: Sequence[Tensor], rows: Sequence[Row]) -> list[RowScore]:
        """Returns the scores of rows from the hidden rows of their scored positions."""
        hidden_ND = torch.cat(list(hidden))
        target_N = self._tensor([[t for row in rows for t in row.tokens[-row.num_scored :]]])[0]
        log_p, greedy = [], []
        chunk = max(1, _LOGITS // self._model.config.vocab_size)
        for first in range(0, len(target_N), chunk):
            logits_NV = self._model.read_out(hidden_ND[first : first + chunk])
            logits_NV = logits_NV.to(wide_dtype(logits_NV))
            log_p_NV = logits_NV.double().log_softmax(-1)
            log_p.append(log_p_NV.gather(1, target_N[first : first + chunk, None])[:, 0])
            greedy.append(logits_NV.argmax(-1))
        ends = np.cumsum([row.num_scored for row in rows])[:-1]
        log_p_N, greedy_N = torch.cat(log_p).cpu().numpy(), torch.cat(greedy).cpu().numpy()
        return [
            RowScore(*parts)
            for parts in zip(np.split(log_p_N, ends), np.split(greedy_N, ends), strict=True)
        ]

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._model.embedding.device)


def open_scorer(restored: Restored, process: Process | None = None, *, seed: int = 0) -> Scorer:
    """Returns the scorer of a restored model.

    Args:
        process: this rank, if several share the rows; None: a single one.
        seed: of group contexts, if the model needs them.
    """
    rank, num_ranks = (process.rank, process.world_size) if process else (0, 1)
    text = text_beside(restored, seed=seed)
    return Scorer(restored.model, text=text, rank=rank, num_ranks=num_ranks)


def text_beside(restored: Restored, *, seed: int) -> GroupContextText | None:
    """Returns the text of group contexts for a restored model; None if it needs none."""
    if not group_context_size(restored.model):
        return None
    data = restored.config.data
    return GroupContextText(data.directory, seq_len=data.seq_len, seed=seed)


def _repeated(layer: LayerCache, family_R: Tensor) -> LayerCache:
    """Returns a cache that repeats each family's keys and values for its rows."""
    assert layer.keys is not None
    assert layer.values is not None
    family_R = family_R.to(layer.keys.device)
    return LayerCache(layer.keys[family_R], layer.values[family_R])
