"""Generates text with a trained run, converses with it, or scores a given text.

A model that routes sequences together needs a group context from its training text for both (arXiv
2310.15961), drawn from the seed.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data_pipeline.tokenizers.interface import Tokenizer
from ..data_pipeline.words import some_of
from ..train.config.arguments import checked
from ..train.config.run_config import ConfigError
from .batches import Row
from .generate import generate
from .group_context import group_context_size
from .restore import Restored, chat_of_run, refuse_pairs, tokenizer_of_run
from .scoring import open_scorer, text_beside

logger = logging.getLogger(__name__)


def write_text(
    restored: Restored, prompt: str, *, chat: bool = False, **options: Any
) -> Iterator[str]:
    """Yields the prompt and then, piece by piece, the generated text.

    A piece is held back until its last bytes form a whole character. With `chat`, the run's chat
    template makes the prompt a user's message; its answer alone is yielded, up to its end. The other
    options are `num_tokens`, `temperature`, `seed`, `top_p` and `cache_loops` of `generate`.

    Raises:
        ValueError: the run's data cannot be read, or the model cannot generate.
    """
    refuse_pairs(restored)
    tokenizer = tokenizer_of_run(restored)
    ids = chat_of_run(restored, tokenizer).begin(prompt) if chat else _plain(tokenizer, prompt)
    if not chat:
        yield prompt
    yield from continued(restored, tokenizer, ids.tolist(), ends=chat, **options)


def continued(
    restored: Restored, tokenizer: Tokenizer, ids: list[int], *, ends: bool, **options: Any
) -> Iterator[str]:
    """Yields what the model writes after ids, which it extends; if `ends`, up to an end of document."""
    length = len(ids) + options["num_tokens"] - 1
    context_MS = draw_group_context(restored, length, seed=options["seed"])
    prompt_S = torch.tensor(ids, dtype=torch.int64, device=restored.model.embedding.device)
    shown = len(tokenizer.decode(ids))
    for token in generate(restored.model, prompt_S, context_MS=context_MS, **options):
        if ends and token == tokenizer.end_of_document_id:
            return
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


class Conversation:
    """Answers prompts in view of earlier `turns`, prompts with their answers.

    Without a chat template, the model continues the text of all turns, each on a line of its own.

    Raises:
        ValueError: the run's tokenizer or template cannot be used.
    """

    def __init__(self, restored: Restored) -> None:
        refuse_pairs(restored)
        self._restored, self._tokenizer = restored, tokenizer_of_run(restored)
        self.turns: list[list[str]] = []
        try:
            self.template = chat_of_run(restored, self._tokenizer)
        except ConfigError:  # there is none
            self.template = None

    def answer(self, prompt: str, *, num_tokens: int, **options: Any) -> Iterator[str]:
        """Yields the answer piece by piece, up to its end or that of the context.

        Drops the oldest turns if neither half of the context nor what the answer may need is free.
        What an interrupted answer has said remains. For `options` see `write_text`.

        Raises:
            ValueError: the model cannot generate, the prompt alone fills the context, or the template
                refuses it.
        """
        context = self._restored.config.data.seq_len
        most = context - min(num_tokens, context // 2)
        while len(ids := self._ids(prompt)) > most and self.turns:
            del self.turns[0]
        if len(ids) >= context:
            raise ValueError(
                f"the prompt has {len(ids):,} tokens, but the context {context:,}: write a shorter one"
            )
        options["num_tokens"] = min(num_tokens, context - len(ids))
        self.turns.append([prompt, ""])
        for piece in continued(self._restored, self._tokenizer, ids, ends=True, **options):
            self.turns[-1][1] += piece
            yield piece

    def _ids(self, prompt: str) -> list[int]:
        if self.template is not None:
            return self.template.begin(prompt, self.turns).tolist()
        text = "\n".join([*map("".join, self.turns), prompt])
        return self._tokenizer.encode_batch([text])[0].tolist()


def _plain(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a text, and says so if it spells special tokens."""
    if spelled := [token for token in tokenizer.special_tokens if token in text]:
        logger.warning(
            "%s in the text is encoded as plain text, not as a special token; with --prompt, --chat "
            "(chat=True) writes special tokens as the run's chat template does",
            some_of(spelled),
        )
    return tokenizer.encode_batch([text])[0]


def draw_group_context(restored: Restored, length: int, *, seed: int) -> torch.Tensor | None:
    """Returns the group context of a generated text with that many inputs; None if none is needed."""
    if (text := text_beside(restored, seed=seed)) is None:
        return None
    context_MS = text.draw(group_context_size(restored.model), max(length, 1))
    return context_MS.to(restored.model.embedding.device)


@dataclass(frozen=True)
class ScoredText:
    """Holds a text's log-probability in nats per token, one row per draw of the group context."""

    step: int
    log_probability_RS: np.ndarray  # float64

    @property
    def mean(self) -> float:
        """Returns the text's log-probability, averaged over the draws."""
        return float(self.log_probability_RS.sum(1).mean())

    @property
    def spread(self) -> float:
        """Returns its standard deviation over the draws; 0 for a single one."""
        totals_R = self.log_probability_RS.sum(1)
        return float(totals_R.std(ddof=1)) if len(totals_R) > 1 else 0.0

    def __str__(self) -> str:
        draws, tokens = self.log_probability_RS.shape
        beside = (
            f" ± {self.spread:.4f} over {draws} draws of the group context" if draws > 1 else ""
        )
        return (
            f"step {self.step}: log-probability {self.mean:.4f}{beside} nats, "
            f"{self.mean / tokens:.4f} per token, over {tokens:,} tokens"
        )


def score_text(restored: Restored, text: str, *, draws: int = 1, seed: int = 0) -> ScoredText:
    """Returns the log-probability of a text after an end of document.

    A text longer than the trained length is cut on the left.

    Args:
        draws: of the group context, for a model that routes sequences together.
        seed: of those draws.

    Raises:
        ValueError: the run's data cannot be read, there is nothing to score, or the model reads
            later positions.
    """
    refuse_pairs(restored)
    data = restored.config.data
    tokenizer = tokenizer_of_run(restored)
    tokens = _plain(tokenizer, text).tolist()
    if not tokens or draws < 1:
        raise ValueError(
            f"scoring needs at least one token and one draw, got {len(tokens)} tokens, {draws} draws"
        )
    line = [tokenizer.end_of_document_id, *tokens][-(data.seq_len + 1) :]
    scorer = open_scorer(restored, seed=seed)
    row = Row(tuple(line), len(line) - 1)
    scores = [
        scorer.score([[row]], draw=draw)[0][0] for draw in range(draws if scorer.needs_draws else 1)
    ]
    return ScoredText(restored.step, np.stack([score.log_probability_S for score in scores]))


@checked
@dataclass(frozen=True)
class TextTokenizer:
    """Turns text into the model's tokens, and tokens into text."""

    _open: Callable[[], Tokenizer]
    _device: torch.device

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._open()  # when it is asked, because an imported model may have none

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids, including the end of a document."""
        return self._tokenizer.vocab_size

    @property
    def end_of_document_id(self) -> int:
        """Returns the id that ends a document; `encode` never returns it."""
        return self._tokenizer.end_of_document_id

    def encode(self, text: str) -> Tensor:
        """Returns a text's token ids: int64 (S,), on the model's device.

        Raises:
            UnicodeEncodeError: the text contains an unpaired surrogate.
        """
        ids = self._tokenizer.encode_batch([text])[0]
        return torch.tensor(ids.tolist(), dtype=torch.int64, device=self._device)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Returns the text of token ids, without ends of documents.

        Args:
            ids: one dimension, a tensor or a list.

        Raises:
            ValueError: they are no ids of this tokenizer.
        """
        row = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int64)
        if row.ndim != 1 or not all(0 <= id == int(id) < self.vocab_size for id in row.tolist()):
            raise ValueError(f"decode: give one row of whole numbers below {self.vocab_size}")
        return self._tokenizer.decode([int(id) for id in row.tolist()])
