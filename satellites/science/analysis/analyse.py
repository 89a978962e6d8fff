"""Accumulates statistics of a checkpoint over rows of its validation split.

    load ─► traces of the rows ─► counters, one of each family per bank of experts ─► Analysis

A trace is discarded once counted, so memory does not grow with the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import moebius

from .banks import FEED_FORWARD, Bank, banks_of, choices_of
from .items import ItemCounter
from .similarity import SimilarityCounter
from .slices import Item, SliceCounter, usual_items
from .updates import UpdateCounter
from .usage import UsageCounter

OnRows = Callable[[int, int], None]
"""Told how many more rows are done, of how many in all."""


class BankAnalysis:
    """Holds the counters of one bank of experts."""

    def __init__(self, bank: Bank, vocab_size: int, token_ids: Sequence[int]) -> None:
        self.bank = bank
        self.usage = UsageCounter(bank)
        self.similarity = SimilarityCounter(bank)
        is_feed_forward = bank.kind == FEED_FORWARD
        self.items = ItemCounter(bank, vocab_size) if is_feed_forward else None
        self.slices = SliceCounter(bank, token_ids) if is_feed_forward else None

    def add(self, seen: moebius.Trace) -> None:
        """Adds one pass: this bank's routes, one for each repeat."""
        if self.bank.chosen_by == "nobody":
            return
        counted_T = seen.rows.counted_BS.flatten()
        token_ids_T = seen.rows.tokens_BS.flatten()[counted_T]
        routes = [each for each in seen.routes if each.layer == self.bank.layer]
        found = [choices_of(each, counted_T) for each in routes]
        for repeat, choices in enumerate(found):
            self.usage.add(repeat, choices)
            if self.items is not None:
                self.items.add(repeat, choices, token_ids_T)
            if self.slices is not None:
                self.slices.add(repeat, choices, token_ids_T)
        self.similarity.add(found)

    @property
    def takes_all(self) -> bool:
        """Tells whether every token went through every expert, so that nothing was chosen."""
        usage = self.usage
        everything = (usage.counts_RE >= usage.tokens_R[:, None]).all()
        return bool(everything and usage.tokens_R.any())


@dataclass
class Analysis:
    """Holds all statistics of one checkpoint."""

    run_dir: Path
    config: moebius.Config
    step: int
    split: str
    items: tuple[Item, ...]  # that are looked at one by one
    banks: tuple[BankAnalysis, ...] = ()
    updates: UpdateCounter = field(init=False)
    item_counts_V: np.ndarray = field(init=False)  # int64: how often an item was an input
    num_rows: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    loss_sum: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        """Initializes the counters."""
        self.updates = UpdateCounter(self.config.model.num_layers)
        self.item_counts_V = np.zeros(self.config.model.vocab_size, dtype=np.int64)

    @property
    def loss(self) -> float:
        """Returns the mean cross-entropy of the analyzed rows, nats per token."""
        return self.loss_sum / self.num_targets if self.num_targets else float("nan")

    def of_kind(self, kind: str) -> tuple[BankAnalysis, ...]:
        """Returns the banks of one kind, by member of the group."""
        return tuple(each for each in self.banks if each.bank.kind == kind)

    def add(self, seen: moebius.Trace) -> None:
        """Adds one pass."""
        model = self.config.model
        if not self.banks:
            token_ids = [item.token_id for item in self.items]
            self.banks = tuple(
                BankAnalysis(bank, model.vocab_size, token_ids)
                for bank in banks_of(seen.routes, model.attention.kind)
            )
        for each in self.banks:
            each.add(seen)
        self.updates.add(seen)
        counts_V = count_items(seen.rows, model.vocab_size)
        self.item_counts_V += counts_V
        self.num_rows += seen.rows.num_rows
        self.num_tokens += int(counts_V.sum())
        self.num_targets += seen.num_targets
        self.loss_sum += seen.loss_sum

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the context of every figure: model, step, tokens, seed."""
        return {
            "run": self.run_dir.resolve().name,
            "step": self.step,
            "split": self.split,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "seed": self.config.train.seed,
            "loss": round(self.loss, 6),
        }


def analyse(
    run_dir: Path,
    *,
    step: int | None = None,
    split: str = "validation",
    num_tokens: int | None = None,
    item_texts: Sequence[str] = (),
    on_rows: OnRows = lambda more, total: None,
) -> Analysis:
    """Returns the statistics of one checkpoint over a split of its data.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; None: the newest.
        split: train or validation.
        num_tokens: number of tokens, rounded up to whole rows; None: the whole split.
        item_texts: tokens to show individually; by default some of the most frequent.
        on_rows: called with the progress.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, no token counts, or an
            item's text is not one token.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(
            f"--tokens {num_tokens}: nothing would be counted; give at least 1, or `all`"
        )
    loaded = moebius.load(run_dir, step=step)
    max_rows = None if num_tokens is None else -(-num_tokens // loaded.config.data.seq_len)
    counts_V, total = _survey(loaded, split, max_rows)
    items = _named_items(loaded, item_texts) if item_texts else _frequent_items(loaded, counts_V)
    found = Analysis(
        moebius.history(run_dir).run_dir, loaded.config, loaded.step, split, tuple(items)
    )
    on_rows(0, total)
    for rows in loaded.rows(split=split, max_rows=max_rows):
        found.add(loaded.trace(rows))
        on_rows(rows.num_rows, total)
    if not found.num_tokens:
        raise ValueError(
            f"{loaded.config.data.directory}: no token of the split {split!r} counts, so there is "
            "nothing to analyse: are all of its rows padding?"
        )
    return found


def count_items(rows: moebius.Rows, vocab_size: int) -> np.ndarray:
    """Returns how often every vocabulary item is an input in rows."""
    token_ids = rows.tokens_BS[rows.counted_BS].cpu().numpy()
    return np.bincount(token_ids, minlength=vocab_size)


def _survey(
    loaded: moebius.LoadedModel, split: str, max_rows: int | None
) -> tuple[np.ndarray, int]:
    """Returns how often every vocabulary item is an input, and the number of rows."""
    vocab_size = loaded.config.model.vocab_size
    counts_V, num_rows = np.zeros(vocab_size, dtype=np.int64), 0
    for rows in loaded.rows(split=split, max_rows=max_rows):
        counts_V += count_items(rows, vocab_size)
        num_rows += rows.num_rows
    return counts_V, num_rows


def _frequent_items(loaded: moebius.LoadedModel, counts_V: np.ndarray) -> list[Item]:
    decode = loaded.tokenizer.decode
    return [Item(token_id, decode([token_id])) for token_id in usual_items(counts_V)]


def _named_items(loaded: moebius.LoadedModel, texts: Sequence[str]) -> list[Item]:
    """Returns the named items.

    Raises:
        ValueError: a text is not one token.
    """
    tokenizer = loaded.tokenizer
    found = []
    for text in texts:
        token_ids = tokenizer.encode(text).tolist()
        if len(token_ids) != 1:
            parts = ", ".join(repr(tokenizer.decode([one])) for one in token_ids)
            raise ValueError(
                f"--item {text!r} is {len(token_ids)} tokens ({parts}); name one token: a word "
                "mostly begins with the blank before it"
            )
        found.append(Item(token_ids[0], text))
    return found
